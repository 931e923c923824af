"""Verdicts on programs that met a limit name the limit, its value and its configuration key, in every tier.

Not shown: cgroups v2 where this machine has v1, and a node's budget that runs out (test_sandbox).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from or1_verify.code.verifier import CodeVerifier
from or1_verify.config import VerifyConfig
from or1_verify.sandbox.program import Program, SandboxUnavailable
from or1_verify.sandbox.sandbox import Sandbox, open_sandbox
from or1_verify.types import Message, Problem

# Memory that no address space counts, so that the cgroup's limit is met and not the process's own.
PIPES = (
    "import fcntl, os\ndef fill(count):\n    for _ in range(count):\n        r, w = os.pipe()\n"
    "        fcntl.fcntl(w, 1031, 1 << 20)\n        os.set_blocking(w, False)\n        os.write(w, b'x' * (1 << 20))\n"
)
CASES = {
    "CPU time": ("while True: pass", "killed: used more than the CPU time limit of 0.2 s (verify.timeout_s)"),
    "wall time": (
        "import time\ntime.sleep(600)",
        "killed: not done within the wall time limit of 0.5 s (2 x verify.timeout_s)",
    ),
    "output": ("while True: print('x' * 100000)", "killed: wrote more than the output limit of 1.0 MiB"),
    "memory": (
        f"{PIPES}x = bytearray(40 << 20)\nfill(60)",
        "killed: used more than the memory limit of 96.0 MiB (verify.memory_bytes)",
    ),
    "a process's memory": (
        "x = bytearray(1 << 30)",
        "exit status 1: MemoryError (each process has a memory limit of 96.0 MiB (verify.memory_bytes))",
    ),
    "threads": (
        "import threading, time\nthreading.stack_size(1 << 16)\n"
        "for _ in range(20): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
        "exit status 1: RuntimeError: can't start new thread (met the limit of 12 processes and threads "
        "(verify.processes))",
    ),
    "none": ("import sys\nsys.exit('gone')", "exit status 1: gone"),
    "all is well": ("print(1)", ""),
}
NEEDS_CGROUPS = {"memory", "threads"}

CALLS = {
    "CPU time": ("while True: pass", "killed: used more than the CPU time limit of 0.2 s (verify.timeout_s)"),
    "memory": (
        "BIG[::4096] = bytes(len(BIG) >> 12)\n    fill(60)",
        "killed: used more than the memory limit of 96.0 MiB (verify.memory_bytes)",
    ),
    "its own signal": ("os.kill(os.getpid(), 9)", "killed by SIGKILL; no limit of ours was reached"),
    "file size": (
        "import signal\n    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"
        "    open('/tmp/x', 'wb').write(bytes(2 << 20))",
        "killed by SIGXFSZ, the signal for exceeding the file size limit of 1.0 MiB",
    ),
    "no answer": ("os._exit(3)", "ended without an answer: exit status 3"),
}


@pytest.fixture(scope="module", params=("bubblewrap", "landlock"))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox with the configuration's keys. CPU and wall time limits are far apart, so that each is met alone."""
    try:
        made = open_sandbox(VerifyConfig(sandbox=request.param, memory_bytes=96 << 20, processes=12))
    except SandboxUnavailable as error:
        pytest.skip(f"no {request.param} here: {error}")
    made.limits = replace(made.limits, wall_s=200.0, cpu_s=60.0, output_bytes=1 << 20, file_bytes=1 << 20)
    with made:
        yield made


@pytest.mark.parametrize("case", CASES)
def test_a_run_names_the_limit_that_it_met(sandbox: Sandbox, case: str) -> None:
    if case in NEEDS_CGROUPS and not sandbox.cgroups:
        pytest.skip("only cgroups tell")
    source, words = CASES[case]
    times = {"CPU time": {"cpu_s": 0.2}, "wall time": {"wall_s": 0.5}}.get(case, {})
    program = Program({"main.py": source.encode()}, ("{python}", "{box}/main.py"))
    assert sandbox.run(program, limits=replace(sandbox.limits, **times)).failure == words


ROWS = {
    "time": ("program", {"time_s": 0.2}, "while True: pass", "the row's limits.time_s)"),
    "a call's time": ("call", {"time_s": 0.2}, "while True: pass", "the row's limits.time_s)"),
    "a process's memory": (
        "stdin",
        {"memory_bytes": 80 << 20},
        "x = bytearray(90 << 20)",
        "memory limit of 80.0 MiB (the row's limits.memory_bytes)",
    ),
    "more than the configuration's": ("call", {"memory_bytes": 200 << 20}, "x = bytearray(110 << 20)", ""),
    "more than the node's": (
        "stdin",
        {"memory_bytes": 1 << 40},
        "x = bytearray(1 << 30)",
        "memory limit of 256.0 MiB (verify.node_memory_bytes)",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_a_row_has_limits_of_its_own(sandbox: Sandbox, case: str) -> None:
    """In the place of the configuration's, for each kind of test, and never more memory than the node's budget."""
    kind, limits, body, words = ROWS[case]
    truth: dict[str, object] = {
        "stdin": {"inputs": [""], "outputs": ["1"]},
        "call": {"inputs": [[]], "outputs": [1], "fn_name": "f"},
        "program": {"assert_case": ["x = 1\nassert f() == x"]},
    }[kind]
    source = f"def f():\n    {body}\n    return 1\n" + ("print(f())" if kind == "stdin" else "")
    text = json.dumps({**truth, "limits": limits})
    problem = Problem("i", "s", "code", (Message("user", "q"),), text, {}, "x.jsonl:1")
    sandbox.limits = replace(sandbox.limits, most_memory_bytes=256 << 20)
    verdict = CodeVerifier(VerifyConfig(), sandbox).verify(problem, f"</think>\n```python\n{source}\n```", False)
    assert verdict.status == ("wrong" if words else "right") and words in verdict.detail, verdict


def test_memory_is_at_most_the_nodes() -> None:
    """A recipe's 50 GB on a machine that has less."""
    made = open_sandbox(VerifyConfig(memory_bytes=50_000_000_000, node_memory_bytes=1 << 30, workers=2))
    made.close()
    expected = (
        (1 << 30, "verify.node_memory_bytes")
        if made.cgroups
        else (1 << 29, "verify.node_memory_bytes / verify.workers")
    )
    assert (made.limits.memory_bytes, made.limits.keys["memory"]) == expected
    assert made.limits.most_memory_bytes == expected[0]


@pytest.mark.parametrize("case", CALLS)
def test_a_verdict_names_the_limit_that_a_call_met(sandbox: Sandbox, case: str) -> None:
    """A call runs in a fork, whose death its parent reports from inside; in the second tier there are no forks."""
    if case == "memory" and not sandbox.cgroups:
        pytest.skip("only cgroups tell")
    if case in ("file size", "no answer") and sandbox.tier != "bubblewrap":
        pytest.skip("no files or no forks here")
    body, words = CALLS[case]
    truth = json.dumps({"inputs": [[1]], "outputs": [1], "fn_name": "f"})
    problem = Problem("i", "s", "code", (Message("user", "q"),), truth, {}, "x.jsonl:1")
    source = f"{PIPES}BIG = bytearray(45 << 20)\ndef f(x):\n    {body}"
    limits = sandbox.limits
    sandbox.limits = replace(limits, cpu_s=0.2) if case == "CPU time" else limits
    try:
        verdict = CodeVerifier(VerifyConfig(), sandbox).verify(problem, f"</think>\n```python\n{source}\n```", False)
    finally:
        sandbox.limits = limits
    assert (verdict.status, verdict.detail) == ("wrong", f"0 of 1 tests passed [F]; test 0: {words}")
