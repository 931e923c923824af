"""A worker of the pool: a verifier for each ability, and the program that judges batches in a process of its own.

``pool.local`` starts this file as a program. Pickles go over standard input and output, each behind its length and
CRC-32. The first one in is (config, abilities, the parent's pid), answered by None when the verifiers are built.
Batches of attempts follow, each answered by the result of ``verify_batch``, or by the exception that it raised. The end
of the input ends the process. Pickle is safe here: both ends are ours, and no submission runs in this process.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from or1_verify.child_process import die_with_parent
from or1_verify.config import VerifyConfig
from or1_verify.types import Attempt, Verdict
from or1_verify.verifiers import build_verifiers

Judged = tuple[list[Verdict], int]
"""Verdicts in the order of the attempts, and the process's resident memory in bytes."""

_HEADER = struct.Struct("<QI")


class VerifierSet:
    """One verifier per ability. Raises at construction what ``build_verifiers`` raises."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._verifiers = build_verifiers(config, abilities)
        for verifier in self._verifiers.values():
            verifier.start()

    def verify_batch(self, attempts: Sequence[Attempt]) -> Judged:
        verdicts = [self._verifiers[problem.ability].verify(problem, text, cut) for problem, text, cut in attempts]
        return verdicts, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the processes that the verifiers have started."""
        for verifier in self._verifiers.values():
            verifier.close()


def send(pipe: BinaryIO, message: Any) -> None:
    content = pickle.dumps(message, protocol=5)
    pipe.write(_HEADER.pack(len(content), zlib.crc32(content)) + content)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Read one message. Raises EOFError when the other end is gone, ValueError when the message has changed bits."""
    header = pipe.read(_HEADER.size)
    if len(header) < _HEADER.size:
        raise EOFError("the other end is gone")
    length, checksum = _HEADER.unpack(header)
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError("the other end is gone")
    if zlib.crc32(content) != checksum:
        raise ValueError(
            f"a message of {length} bytes arrived with other bits than it was sent with: look at the memory"
        )
    return pickle.loads(content)


def main() -> None:
    inlet, outlet = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # what somebody prints must not look like an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        config, abilities, parent = receive(inlet)
        die_with_parent(parent)  # a busy worker would not notice that its input has ended
        verifiers = VerifierSet(config, abilities)
    except EOFError:
        return
    except Exception as error:  # goes to whoever starts the pool
        send(outlet, RuntimeError(f"{type(error).__name__}: {error}"))
        return
    try:
        send(outlet, None)
        while True:
            try:
                attempts = receive(inlet)
            except EOFError:
                return
            try:
                send(outlet, verifiers.verify_batch(attempts))
            except Exception as error:
                send(outlet, RuntimeError(f"{type(error).__name__}: {error}"))
    except BrokenPipeError:  # the parent is gone
        return
    finally:
        verifiers.close()


if __name__ == "__main__":
    main()
