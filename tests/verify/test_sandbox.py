"""The sandbox's promises to honest programs and to its callers, in every tier that this machine has.

Hostile programs, and runs as an ordinary user, are in test_attacks. Not shown: cgroups v2 where this machine has v1,
and aarch64.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from or1_verify.config import VerifyConfig
from or1_verify.sandbox import confined_process as module
from or1_verify.sandbox.cgroups import CgroupPool
from or1_verify.sandbox.confined_process import ConfinedProcess
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxFailure, SandboxTier, SandboxUnavailable, SessionEnded
from or1_verify.sandbox.sandbox import Sandbox, open_sandbox

LIMITS = SandboxLimits(cpu_s=30.0, wall_s=60.0, memory_bytes=256 << 20, processes=16)
TIERS: tuple[SandboxTier, ...] = ("bubblewrap", "landlock")


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox(LIMITS, request.param)
    except SandboxUnavailable as error:
        pytest.skip(f"no {request.param} here: {error}")
    with made:
        yield made


def python(source: str, **files: bytes) -> Program:
    command = ("{python}", "{box}/main.py", *(f"{{box}}/{name}" for name in files))
    return Program({"main.py": source.encode(), **files}, command)


def test_files_arguments_input_output_and_exit_status(sandbox: Sandbox) -> None:
    source = (
        "import sys\nprint(sys.argv[1:] == [sys.argv[1]], open(sys.argv[1]).read(), input())\n"
        "print('e', file=sys.stderr)\nsys.exit(3)"
    )
    result = sandbox.run(python(source, case=b"content"), b"line\n")
    assert (result.ending, result.exit_status, result.output) == ("exited", 3, b"True content line\n")
    assert result.errors == "e\n"
    assert not result.succeeded


def test_threads_event_loops_and_pairs_of_sockets_work(sandbox: Sandbox) -> None:
    source = (
        "import asyncio, threading, socket, random, datetime, decimal\nout = []\n"
        "thread = threading.Thread(target=out.append, args=(1,))\nthread.start()\nthread.join()\n"
        "async def main():\n    await asyncio.sleep(0)\n    return 2\nout.append(asyncio.run(main()))\n"
        "a, b = socket.socketpair()\na.send(b'3')\nout.append(int(b.recv(1)))\nprint(out)"
    )
    result = sandbox.run(python(source))
    assert result.output == b"[1, 2, 3]\n", result


def test_packages_are_there_and_what_they_run_at_the_start_is_not(sandbox: Sandbox) -> None:
    """Not shown: a .pth file that is not run; Python's ``-S`` promises that."""
    source = (
        "import os, site, sys\nfolders = [path for path in site.getsitepackages() if os.path.isdir(path)]\n"
        "print(sys.flags.no_site, set(folders) <= set(sys.path))\nhelp, copyright\nexit(3)"
    )
    result = sandbox.run(python(source))
    assert (result.output, result.exit_status) == (b"1 True\n", 3), result


def test_three_descriptors_and_an_unprivileged_uid(sandbox: Sandbox) -> None:
    source = (
        "import os\nfound = []\nfor fd in range(300):\n    try: os.fstat(fd)\n    except OSError: continue\n"
        "    found.append(fd)\nprint(os.getuid() >= 1000, os.getgroups(), found)"
    )
    with open(os.devnull):
        result = sandbox.run(python(source))
    if os.geteuid() == 0 or sandbox.tier == "bubblewrap":
        assert result.output.endswith(b"[0, 1, 2]\n") and result.output.startswith(b"True"), result


def test_a_compiled_program(sandbox: Sandbox) -> None:
    """A compiler as a tool: it writes and starts processes, in either tier; what it made runs as a submission does."""
    if not Path("/usr/bin/gcc").exists():
        pytest.skip("no C compiler")
    source = b'#include <stdio.h>\nint main(void) { int n; scanf("%d", &n); printf("%d\\n", 2 * n); return 7; }'
    command = ("/bin/sh", "-c", "gcc -o a.out {box}/a.c && cat a.out")
    made = sandbox.run(Program({"a.c": source}, command, tool=True), limits=SandboxLimits(cpu_s=20, wall_s=60))
    assert made.succeeded, made
    result = sandbox.run(Program({"double": made.output}, ("{box}/double",), executable={"double"}), b"21")
    assert (result.output, result.exit_status) == (b"42\n", 7)


def test_a_session_answers_and_says_how_it_ended(sandbox: Sandbox) -> None:
    echo = python("import sys\nfor line in sys.stdin:\n    print(1 // len(line[1:]), line[::-1].strip(), flush=True)")
    with sandbox.open(echo) as session:
        assert session.ask(b"abc") == b"0 cba"
        assert session.ask(b"x" * 300_000) == b"0 " + b"x" * 300_000
        with pytest.raises(SessionEnded, match="exit status 1: ZeroDivisionError"):
            session.ask(b"")
    limits = replace(LIMITS, cpu_s=0.2)
    words = r"used more than the CPU time limit of 0\.2 s"
    with sandbox.open(python("while True: pass"), limits) as session, pytest.raises(SessionEnded, match=words):
        session.ask(b"")


@pytest.mark.parametrize(
    ("source", "ending"),
    [
        ("print(7)", "exited"),
        ("import time\ntime.sleep(1.5)\nprint(7)", "exited"),
        ("while True: print(7)", "wall_time"),
        ("import time\nprint(7, flush=True)\ntime.sleep(600)", "wall_time"),
    ],
)
def test_a_machine_that_pauses_does_not_use_up_the_programs_time(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, source: str, ending: str
) -> None:
    """The clock jumps beyond the limit at the first look; the program has ended, goes on for a second, or for ever."""
    limits = replace(LIMITS, wall_s=4.0, cpu_s=1.0 if "sleep" in source else 60.0)
    launched = sandbox._launch(python(source), b"", limits)
    try:
        launched.release()
        if source == "print(7)":
            assert module._exited(launched.process.pid, 60.0)
        jumps, monotonic = itertools.chain([0.0, 0.0], itertools.repeat(30.0)), time.monotonic
        monkeypatch.setattr(module.time, "monotonic", lambda: monotonic() + next(jumps))
        stopped = launched.read()
        monkeypatch.undo()
        result = launched.finish(stopped or "exited")
    finally:
        launched.close()
    assert result.ending == ending and result.output.startswith(b"7\n"[: len(result.output)])
    assert ending == "wall_time" or result.output == b"7\n"


def test_one_run_leaves_nothing_to_the_next(sandbox: Sandbox) -> None:
    leave = (
        "for folder in ('/tmp', '/dev/shm', '.'):\n    try: open(folder + '/left', 'w').write('42')\n"
        "    except OSError: pass"
    )
    look = "import os\nprint([f for f in ('/tmp/left', '/dev/shm/left', 'left') if os.path.exists(f)])"
    assert sandbox.run(python(leave)).succeeded
    assert sandbox.run(python(look)).output == b"[]\n"


def test_memory_of_all_processes_together(sandbox: Sandbox) -> None:
    """Each within its own limit, together beyond the sandbox's: only cgroups see that. The first death ends it."""
    if not sandbox.cgroups or sandbox.tier != "bubblewrap":
        pytest.skip("no cgroups, or no processes to share it")
    source = (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(100 << 20)\n"
        "        time.sleep(600)\nos.wait()"
    )
    assert sandbox.run(python(source)).ending == "memory"
    assert sandbox.run(python("print(1)")).output == b"1\n"


TWO_TOGETHER = """
import os, sys
from or1_verify.sandbox import cgroups
from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxFailure
from or1_verify.sandbox.sandbox import Sandbox
for base in cgroups._split_bases().values():  # a group of our own, so that no one else's sandboxes share the budget
    group = base / sys.argv[1]
    group.mkdir(exist_ok=True)
    (group / "cgroup.procs").write_text(str(os.getpid()))
source = "import sys; x = bytearray(200 << 20)\\nfor line in sys.stdin: print(len(x), flush=True)"
program = Program({"main.py": source.encode()}, ("{python}", "{box}/main.py"))
for budget_mib in (1024, 320):
    with Sandbox(SandboxLimits(20, 60, 300 << 20), "auto", budget_mib << 20) as sandbox:
        with sandbox.open(program) as first, sandbox.open(program) as second:
            try:
                print([session.ask(b"") for session in (first, second, first, second)], flush=True)
            except SandboxFailure as error:
                print(error, flush=True)
"""


def test_the_budget_of_the_node_is_kept_by_all_together_and_blames_no_submission() -> None:
    """Each program is within its own limit, both within one budget but not within another."""
    pool = CgroupPool.open(None)
    if pool is None or pool.version != 1:
        pytest.skip("cgroups v1 cannot be written here")
    pool.close()
    name = f"or1-test-{os.getpid()}"
    done = subprocess.run([sys.executable, "-c", TWO_TOGETHER, name], capture_output=True, text=True, check=False)
    for group in Path("/sys/fs/cgroup").glob(f"**/{name}"):
        group.rmdir()
    together, apart = done.stdout.splitlines()
    assert together == str([b"209715200"] * 4), done
    assert apart == "killed because this node ran out of memory; the program was within its own limit", done


def test_two_sandboxes_of_a_process_have_groups_of_their_own() -> None:
    first = CgroupPool.open(None)
    if first is None:
        pytest.skip("no cgroups can be made here")
    second = CgroupPool.open(None)
    assert second is not None
    groups = [pool.take() for pool in (first, second, first, second)]
    assert len({group.folders["pids"] for group in groups}) == 4
    first.close()
    second.close()


def test_a_program_that_bubblewrap_has_just_reaped_is_ended_quietly() -> None:
    """Its number is gone while bubblewrap still runs; no load is needed to see what becomes of that."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    ours, theirs = socket.socketpair()
    with theirs, subprocess.Popen(["sleep", "0.3"]) as bubblewrap:
        launched = ConfinedProcess(bubblewrap, ours, LIMITS, pid=gone.pid)
        launched.close()
    assert bubblewrap.returncode is not None and ours.fileno() == -1


def test_without_cgroups_each_worker_has_its_share_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CgroupPool, "open", lambda node_memory_bytes: None)
    results = {}
    for workers in (1, 4):
        with open_sandbox(VerifyConfig(workers=workers, node_memory_bytes=1 << 30, memory_bytes=2 << 30)) as sandbox:
            results[workers] = sandbox.run(python("x = bytearray(500 << 20)\nprint(len(x))"))
    assert results[1].output == b"524288000\n" and "MemoryError" in results[4].errors, results


def test_limits_come_from_the_configuration() -> None:
    """The defaults as well: a sandbox made without a configuration has those of the section ``verify``."""
    with open_sandbox(VerifyConfig(timeout_s=3.0, memory_bytes=1 << 30, processes=7)) as sandbox:
        made = sandbox.limits
    assert (made.cpu_s, made.wall_s, made.memory_bytes, made.processes) == (3.0, 6.0, 1 << 30, 7)
    default, limits = VerifyConfig(), SandboxLimits()
    assert (limits.cpu_s, limits.memory_bytes, limits.processes) == (
        default.timeout_s,
        default.memory_bytes,
        default.processes,
    )


def test_a_sandbox_that_cannot_be_set_up_is_a_failure_not_a_result(sandbox: Sandbox) -> None:
    """The runner ends before it is at the gate; the program would have printed the right answer."""
    with pytest.MonkeyPatch.context() as patch:
        runner = b"print(1)\nraise SystemExit('no such thing here')"
        patch.setattr(f"or1_verify.sandbox.{sandbox.tier}.RUNNER", runner)
        with pytest.raises(SandboxFailure, match="no such thing here"):
            sandbox.run(python("print(1)"))
    assert sandbox.run(python("print(1)")).output == b"1\n"


def test_where_namespaces_are_refused_landlock_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    broken.chmod(0o755)
    tmp_path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(SandboxUnavailable, match="user namespaces"):
        Sandbox(LIMITS, "bubblewrap")
    try:
        with caplog.at_level(logging.WARNING), Sandbox(LIMITS) as sandbox:
            assert sandbox.tier == "landlock"
            assert "no namespaces here" in caplog.text
    except SandboxUnavailable:
        pytest.skip("no Landlock here")


def test_the_weak_tier_is_never_taken_by_itself_and_says_what_it_is(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), Sandbox(LIMITS, "weak") as sandbox:
        assert "can read every file" in caplog.text
        assert sandbox.run(python("print(1)")).output == b"1\n"
        assert b"PermissionError" in sandbox.run(python("import socket\nsocket.socket()")).errors.encode()
