"""The seccomp filter of the sandbox: which system calls a program may make, assembled here as classic BPF.

A call that is not listed fails with ENOSYS, as on an older kernel, so that libraries fall back; a call of another
architecture kills the program. So there are no sockets except socket pairs, no shared or anonymous memory files (which
no limit counts), no ptrace, no keys, no namespaces, no io_uring, and no calls of future kernels until they are listed.

Sources: seccomp(2) and linux/filter.h for the filter's form; the kernel's tables for the numbers (x86-64, aarch64).
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable, Sequence

from or1_verify.sandbox.program import SandboxUnavailable

# name, number on x86-64, number on aarch64; "-": aarch64 never had it
_HARMLESS = """
read 0 63; write 1 64; readv 19 65; writev 20 66; pread64 17 67; pwrite64 18 68; preadv 295 69; pwritev 296 70;
lseek 8 62; open 2 -; openat 257 56; close 3 57; close_range 436 436; dup 32 23; dup2 33 -; dup3 292 24; pipe 22 -;
pipe2 293 59; poll 7 -; ppoll 271 73; select 23 -; pselect6 270 72; epoll_create 213 -; epoll_create1 291 20;
epoll_ctl 233 21; epoll_wait 232 -; epoll_pwait 281 22; eventfd 284 -; eventfd2 290 19; fsync 74 82;
fdatasync 75 83; ftruncate 77 46; fadvise64 221 223; stat 4 -; fstat 5 80; lstat 6 -; newfstatat 262 79;
statx 332 291; access 21 -; faccessat 269 48; faccessat2 439 439; readlink 89 -; readlinkat 267 78; getdents 78 -;
getdents64 217 61; getcwd 79 17; chdir 80 49; fchdir 81 50; umask 95 166; statfs 137 43; fstatfs 138 44; brk 12 214;
mmap 9 222; mprotect 10 226; munmap 11 215; mremap 25 216; madvise 28 233; exit 60 93; exit_group 231 94;
execve 59 221; wait4 61 260; waitid 247 95; getpid 39 172; getppid 110 173; gettid 186 178; getuid 102 174;
geteuid 107 175; getgid 104 176; getegid 108 177; getresuid 118 148; getresgid 120 150; getgroups 115 158;
getpgrp 111 -; getpgid 121 155; getsid 124 156; setsid 112 157; setpgid 109 154; set_tid_address 218 96;
set_robust_list 273 99; get_robust_list 274 100; rseq 334 293; futex 202 98; membarrier 324 283; sched_yield 24 124;
sched_getaffinity 204 123; sched_getparam 143 121; sched_getscheduler 145 120; sched_get_priority_max 146 125;
sched_get_priority_min 147 126; getcpu 309 168; getpriority 140 141; arch_prctl 158 -; getrlimit 97 163;
setrlimit 160 164; getrusage 98 165; times 100 153; sysinfo 99 179; uname 63 160; rt_sigaction 13 134;
rt_sigprocmask 14 135; rt_sigreturn 15 139; rt_sigpending 127 136; rt_sigsuspend 130 133; rt_sigtimedwait 128 137;
sigaltstack 131 132; pause 34 -; alarm 37 -; setitimer 38 103; getitimer 36 102; restart_syscall 219 128;
clock_gettime 228 113; clock_getres 229 114; clock_nanosleep 230 115; nanosleep 35 101; gettimeofday 96 169;
time 201 -; getrandom 318 278; sendto 44 206; recvfrom 45 207; sendmsg 46 211; recvmsg 47 212; shutdown 48 210;
getsockopt 55 209; setsockopt 54 208; getsockname 51 204; getpeername 52 205
"""
_IN_NAMESPACES = """
mkdir 83 -; mkdirat 258 34; rmdir 84 -; rename 82 -; renameat 264 38; renameat2 316 276; unlink 87 -;
unlinkat 263 35; link 86 -; linkat 265 37; symlink 88 -; symlinkat 266 36; chmod 90 -; fchmod 91 52;
fchmodat 268 53; utimensat 280 88; flock 73 32; fork 57 -; vfork 58 -; kill 62 129; tkill 200 130; tgkill 234 131
"""
_JUDGED = """
clone 56 220; prctl 157 167; prlimit64 302 261; fcntl 72 25; ioctl 16 29; socketpair 53 199; socket 41 198
"""

_MACHINES = {"x86_64": (1, 0xC000003E), "aarch64": (2, 0xC00000B7)}  # column above, AUDIT_ARCH_*
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
    """Return the filter for a program in namespaces. The program may have processes, files and signals of its own."""
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
    """Return a filter that allows the call numbers ``allowed``, and runs ``checks`` on the arguments of other calls."""
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
    """Return the instruction that loads an argument's lower 32 bits. No argument checked here needs more."""
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
