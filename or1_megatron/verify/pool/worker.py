"""What one worker of the pool does: it holds a verifier per ability and judges batches.

``pool.ray`` puts a ``Bench`` into an actor; ``pool.local`` starts this file as a program. Packed messages then go over
standard input and output, each behind its length (8 bytes, little-endian). The first one in is (config, abilities, the
parent's pid), answered by None when the verifiers are built. Batches of claims follow, each answered by the result of
``verify_batch``, or by the exception that it raised. The end of the input ends the process. Pickle is safe here: both
ends are ours, and no submission runs in this process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.runtime.signals import die_with_parent
from or1_megatron.types import Problem, Verdict
from or1_megatron.verify.registry import build_verifiers

Claim = tuple[Problem, str, bool]
"""(problem, response text, truncated): the part of a completion that a verifier needs, without token arrays."""

Judged = tuple[list[Verdict], int]
"""Verdicts in the order of the claims, and the process's resident memory in bytes."""


class Bench:
    """One verifier per ability. Raises at construction what ``build_verifiers`` raises."""

    def __init__(self, config: VerifyConfig, abilities: frozenset[str]) -> None:
        self._verifiers = build_verifiers(config, abilities)
        for verifier in self._verifiers.values():
            verifier.start()

    def verify_batch(self, claims: Sequence[Claim]) -> Judged:
        verdicts = [self._verifiers[problem.ability].verify(problem, text, cut) for problem, text, cut in claims]
        return verdicts, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        """End the processes that the verifiers have started."""
        for verifier in self._verifiers.values():
            verifier.close()


def send(pipe: BinaryIO, message: Any) -> None:
    content = pack(message)
    pipe.write(len(content).to_bytes(8, "little") + content)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Read one message. Raises EOFError when the other end is gone."""
    length = pipe.read(8)
    content = pipe.read(int.from_bytes(length, "little")) if len(length) == 8 else b""
    if not content or len(content) < int.from_bytes(length, "little"):
        raise EOFError("the other end is gone")
    return unpack(content)


def main() -> None:
    inlet, outlet = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # a stray print must not look like an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        config, abilities, parent = receive(inlet)
        die_with_parent(parent)  # a busy worker would not notice that its input has ended
        bench = Bench(config, abilities)
    except EOFError:
        return
    except Exception as error:  # goes to whoever starts the pool
        send(outlet, RuntimeError(f"{type(error).__name__}: {error}"))
        return
    try:
        send(outlet, None)
        while True:
            try:
                claims = receive(inlet)
            except EOFError:
                return
            try:
                send(outlet, bench.verify_batch(claims))
            except Exception as error:
                send(outlet, RuntimeError(f"{type(error).__name__}: {error}"))
    except BrokenPipeError:  # the parent is gone
        return
    finally:
        bench.close()


if __name__ == "__main__":
    main()
