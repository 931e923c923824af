"""Soaks the verifiers: many mixed samples, 5% of them hostile, through the pool of local processes, in each tier.

    python benchmarks/verify_soak.py [--samples 10000] [--second 2000] [--workers 2]

Half of the samples are math, half code (programs, calls, asserts): right, wrong, truncated, without an answer. The soak
counts samples without a verdict, verdicts other than by construction, and what is left afterwards: processes (this one
becomes the reaper of orphans, so that none escapes the count), sandbox folders, cgroups. It takes the verifiers' memory
and descriptors at a tenth of the way and near the end. Some hundred samples also go through 1, 2 and 4 workers.

The first tier gets ``--samples``, the second ``--second``.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from result import figure, write_result

from or1_megatron.config.schema import VerifyConfig
from or1_megatron.types import Completion, Message, Problem, VersionSpan
from or1_megatron.verify.pool.local import local_workers
from or1_megatron.verify.pool.queue import VerifierPool

TIERS = ("bubblewrap", "landlock")
TIMEOUT_S = 2.0
STDIN = json.dumps({"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]})
CALL = json.dumps({"inputs": [[[3, 1, 2]], [[]]], "outputs": [[1, 2, 3], []], "fn_name": "ordered"})
ASSERT = json.dumps({"assert_case": ["for n in range(4):\n    assert twice(n) == n + n"]})
CODE = (
    (STDIN, "print(int(input()) * 2)", "print(42)"),
    (CALL, "def ordered(x): return sorted(x)", "def ordered(x): return x"),
    (ASSERT, "def twice(n): return 2 * n", "def twice(n): return n"),
)
MATH = (
    ('["12"]', "12", "13"),
    ('["\\\\frac{1}{2}"]', "0.5", "0.6"),
    ('["x+y"]', "y+x", "y-x"),
    ('["(1,2]"]', "1 < x \\le 2", "[1,2]"),
)
HOSTILE_CODE = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
    "x = [bytearray(1 << 24) for _ in range(1 << 12)]",
    "while True: print('42' * 10000)",
    "import os\nos.kill(-1, 9)\nos._exit(0)",
    "import os\nos._exit(0)",
    "while True: pass",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint(42)",
    "import os, time\nos.close(1)\nos.close(2)\ntime.sleep(600)",
    "import os\nfor fd in range(256):\n    try: os.write(fd, b'{\"value\": 1}\\n')\n    except OSError: pass\nexit()",
    "for n in range(10 ** 5): open(f'/tmp/{n}', 'wb').write(b'x' * (1 << 20))",
)
HOSTILE_MATH = ("9^{9^{9^{9}}}", "\\boxed{" * 50, "{" * 3000, "((((((((((2^{9})!)!)!)!)!)!)!)!)!)!", "\\sqrt" * 900)
MAY_BE = {
    "right": {"right"},
    "wrong": {"wrong"},
    "none": {"no_answer"},
    "cut": {"truncated"},
    "hostile": {"wrong", "timeout", "no_answer"},
}


@dataclass
class Tally:
    """What the soak records on the way."""

    statuses: list[str]
    resident_bytes: list[int]
    descriptors: list[int]
    retries: int = 0


def sample(number: int) -> tuple[Problem, Completion, str]:
    """Return (problem, completion, kind) of the soak's n-th sample."""
    kind = "hostile" if number % 20 == 7 else ("right", "wrong", "right", "none", "cut")[number // 2 % 5]
    if number % 2:
        truth, right, wrong = CODE[number // 10 % len(CODE)]
        hostile = HOSTILE_CODE[number // 20 % len(HOSTILE_CODE)]
        source = {"hostile": hostile, "wrong": wrong}.get(kind, right)
        text = f"</think>\n```python\n{source}\n```" if kind != "none" else "</think>no program"
    else:
        truth, right, wrong = MATH[number // 10 % len(MATH)]
        text = f"</think>\\boxed{{{wrong if kind == 'wrong' else right}}}" if kind != "none" else "no end"
    if kind == "hostile" and number // 20 % 4 == 3:  # a quarter of the hostile ones
        truth, text = MATH[number // 80 % len(MATH)][0], f"</think>\\boxed{{{HOSTILE_MATH[number // 80 % 5]}}}"
    ability = "math" if truth.startswith("[") else "code"
    problem = Problem(f"p{number // 8}", "soak", ability, (Message("user", "q"),), truth, {}, f"soak:{number}")
    ids, log_probs = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    reason = "length" if kind == "cut" else "stop"
    spans = (VersionSpan(0, 0),)
    return problem, Completion(problem.id, number % 8, ids, log_probs, text, reason, spans, 0, 0, 0.0, 1.0), kind


def verifiers() -> list[psutil.Process]:
    """Return the pool's processes and their Math-Verify children."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if {"or1_megatron.verify.pool.worker", "or1_megatron.verify.math.worker"} & set(process.cmdline()):
                found.append(process)
        except psutil.Error:  # it has ended
            continue
    return found


async def judged(samples: int, workers: int, tier: str, marks: frozenset[int], timeout_s: float = TIMEOUT_S) -> Tally:
    """Judge the first ``samples``. Memory is recorded when as many as one of ``marks`` are judged."""
    config = VerifyConfig(
        workers=workers, timeout_s=timeout_s, memory_bytes=512 << 20, max_pending=64, sandbox=tier, processes=32
    )
    abilities = frozenset({"math", "code"})
    pool = VerifierPool(config, abilities, local_workers(config, abilities))
    tally = Tally([], [], [])
    done, started_s = 0, time.monotonic()

    async def judge(number: int) -> str:
        nonlocal done
        problem, completion, _ = sample(number)
        status = (await pool.verify(problem, completion, number // 8, 8)).status
        done += 1
        if done in marks:
            running = verifiers()
            tally.resident_bytes.append(sum(process.memory_info().rss for process in running))
            tally.descriptors.append(sum(process.num_fds() for process in running))
        if done % 500 == 0:
            print(f"{tier}: {done} of {samples}, {done / (time.monotonic() - started_s):.1f}/s", flush=True)
        return status

    try:
        await pool.start()
        tally.statuses = list(await asyncio.gather(*map(judge, range(samples))))
        tally.retries = pool.retries
        return tally
    finally:
        await pool.close()


def left_behind() -> set[str]:
    """Return processes below this one, and folders and cgroups of verifiers that are gone."""
    processes = psutil.Process().children(recursive=True)
    found = {f"{child.pid} {child.name()}" for child in processes if child.status() != psutil.STATUS_ZOMBIE}
    places = [*Path(tempfile.gettempdir()).glob("or1-sandbox-*"), *Path("/sys/fs/cgroup").glob("**/or1-verify/*-*")]
    for place in places:
        owner = place.name.removeprefix("or1-sandbox-").partition("-")[0]
        if not psutil.pid_exists(int(owner)):
            found.add(str(place))
    return found


def soak(samples: int, workers: int, tier: str) -> dict[str, Any]:
    before = left_behind()
    marks = frozenset({samples // 10, samples * 9 // 10})
    started_s = time.monotonic()
    tally = asyncio.run(judged(samples, workers, tier, marks))
    wall_s = time.monotonic() - started_s
    kinds = [sample(number)[2] for number in range(samples)]
    other = [n for n in range(samples) if tally.statuses[n] not in MAY_BE[kinds[n]]]
    accepted = [n for n in other if kinds[n] == "hostile" and tally.statuses[n] == "right"]
    print(f"{tier}: {Counter(zip(kinds, tally.statuses, strict=True))}; {tally}"[:2000])
    print(f"{tier}: other than by construction: {[(n, kinds[n], tally.statuses[n]) for n in other[:20]]}")
    left = sorted(left_behind() - before)
    print(f"{tier}: left: {left}")
    return {
        f"{tier}: samples": figure(samples),
        f"{tier}: of them hostile": figure(kinds.count("hostile")),
        f"{tier}: samples without a verdict": figure(samples - len(tally.statuses), "", at_most=0),
        f"{tier}: hostile ones accepted": figure(len(accepted), "", at_most=0),
        f"{tier}: verdicts other than by construction": figure(len(other), "", at_most=0),
        f"{tier}: errors": figure(tally.statuses.count("error"), "", at_most=0),
        f"{tier}: processes, folders and cgroups left": figure(len(left), "", at_most=0),
        f"{tier}: verifiers' memory, at 90% of the way over at 10%": figure(
            tally.resident_bytes[-1] / tally.resident_bytes[0], "", at_most=1.1
        ),
        f"{tier}: verifiers' descriptors, at 90% less at 10%": figure(
            tally.descriptors[-1] - tally.descriptors[0], "", at_most=8
        ),
        f"{tier}: samples per second": figure(samples / wall_s, "samples/s"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--second", type=int, default=2_000)
    parser.add_argument("--compared", type=int, default=400)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become our children, and are counted
    figures: dict[str, Any] = {}
    by_workers = [asyncio.run(judged(arguments.compared, count, TIERS[0], frozenset())).statuses for count in (1, 2, 4)]
    figures["the same verdicts through 1, 2 and 4 workers"] = figure(by_workers[0] == by_workers[1] == by_workers[2])
    for tier, samples in zip(TIERS, (arguments.samples, arguments.second), strict=True):
        figures |= soak(samples, arguments.workers, tier)
    for name, entry in figures.items():
        print(name, entry)
    write_result("verify_soak", figures, vars(arguments))


if __name__ == "__main__":
    main()
