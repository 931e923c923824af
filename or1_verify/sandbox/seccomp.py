"""The seccomp filter of the sandbox: which system calls a program may make, assembled here as classic BPF.

A call that is not listed fails with ENOSYS, as on an older kernel, so that libraries fall back; a call of another
architecture kills the program. So there are no sockets but pairs, no shared or anonymous memory files (which no limit
counts), no ptrace, no keys, no namespaces, no io_uring, and no calls of future kernels until they are listed.

Sources: seccomp(2) and linux/filter.h for the program's form, the kernel's tables of numbers for x86-64 and aarch64.
"""

from __future__ import annotations

import platform
import struct
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from or1_verify.sandbox.program import SandboxUnavailable

_CALLS = tomllib.loads(Path(__file__).with_name("calls.toml").read_text())
_HARMLESS, _IN_NAMESPACES, _JUDGED = (_CALLS[group] for group in ("harmless", "in_namespaces", "judged"))

_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column of calls.toml, AUDIT_ARCH_*
_X32_BIT = 0x40000000  # x86-64 only: the same numbers with another ABI

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # BPF_LD|W|ABS, JMP|JEQ, |JGE, |JSET, RET
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026

_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_CLONE_THREAD = 0x00010000
_AF_UNIX = 1
_PRCTL = (3, 15, 16, 23, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, CAPBSET_READ, SET_VMA
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_FCNTL = (0, 1, 2, 3, 4, 1030, 1031, 1032)  # DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC, SET and GET_PIPE_SZ
_FCNTL_LOCKS = (5, 6, 7, 36, 37, 38)

_Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand
_ALLOWED: _Instruction = (_RETURN, 0, 0, _ALLOW)
_REFUSED: _Instruction = (_RETURN, 0, 0, _EPERM)


def namespaced_filter() -> bytes:
    """Return the filter for a program in namespaces, which may use processes, files and signals of its own."""
    checks = {
        "clone": [*_none_of_bits(0, _NEW_NAMESPACES), _ALLOWED],
        "fcntl": _one_of(1, (*_FCNTL, *_FCNTL_LOCKS)),
    }
    return _assemble([*_by_name(_HARMLESS).values(), *_by_name(_IN_NAMESPACES).values()], checks)


def lone_filter(pid: int) -> bytes:
    """Return the filter for a program without namespaces: the one process ``pid``, which may signal only itself.

    The program cannot change files' metadata. File locks, leases and signals on input (fcntl) would affect other
    processes, and are refused too.
    """
    checks = {
        "clone": [*_none_of_bits(0, _NEW_NAMESPACES), *_all_of_bits(0, _CLONE_THREAD), _ALLOWED],
        "fcntl": _one_of(1, _FCNTL),
        "kill": _one_of(0, (0, pid)),  # 0: its own group, which is it alone
        "tgkill": _one_of(0, (pid,)),
        **{name: [_REFUSED] for name in ("fork", "vfork", "tkill")},
    }
    return _assemble(_by_name(_HARMLESS).values(), checks)


def _assemble(allowed: Iterable[int], checks: dict[str, list[_Instruction]]) -> bytes:
    """Return a filter that allows the call numbers ``allowed``, and runs ``checks`` on other calls' arguments."""
    checks = {
        "prctl": _one_of(0, _PRCTL),
        "prlimit64": _one_of(0, (0,)),
        "ioctl": _one_of(1, _IOCTL),
        "socketpair": _one_of(0, (_AF_UNIX,)),
        "socket": [_REFUSED],
        **checks,
    }
    column, architecture = _machine()
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 1:
        program += [(_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for number in allowed:
        program += [(_EQUAL, 0, 1, number), _ALLOWED]
    named = _by_name(_IN_NAMESPACES) | _by_name(_JUDGED)
    for name, check in checks.items():
        if name in named:
            program += [(_EQUAL, 0, len(check), named[name]), *check]
    program.append((_RETURN, 0, 0, _ENOSYS))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _argument(index: int) -> _Instruction:
    """Return the instruction that loads an argument's lower 32 bits, which suffice for all arguments checked here."""
    return (_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * index)


def _one_of(index: int, values: Sequence[int]) -> list[_Instruction]:
    pairs = [instruction for value in values for instruction in ((_EQUAL, 0, 1, value), _ALLOWED)]
    return [_argument(index), *pairs, _REFUSED]


def _none_of_bits(index: int, mask: int) -> list[_Instruction]:
    return [_argument(index), (_ANY_BIT, 0, 1, mask), _REFUSED]


def _all_of_bits(index: int, bit: int) -> list[_Instruction]:
    return [_argument(index), (_ANY_BIT, 1, 0, bit), _REFUSED]


def _machine() -> tuple[int, int]:
    if platform.machine() not in _MACHINES:
        raise SandboxUnavailable(f"no seccomp filter for {platform.machine()}; there is one for {', '.join(_MACHINES)}")
    return _MACHINES[platform.machine()]


def _by_name(table: str) -> dict[str, int]:
    column, _ = _machine()
    rows = [entry.split() for entry in table.split(";")]
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}
