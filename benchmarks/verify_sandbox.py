"""What a sandbox costs per start, tests per second and core, the same verdicts for any number of workers, and a soak.

    python benchmarks/verify_sandbox.py [--repeats 200] [--samples 10000] [--workers 2] [--no-soak]

Starts: bare Python and each tier in turn, on the same trivial program that reads a number and prints its double, in one
process on one core. Soak: mixed samples (right, wrong, truncated, without an answer; 5% hostile) through the pool of
verifier actors; resident memory of the whole process tree at a tenth of the way and at the end, processes and sandbox
folders before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from result import figure, write_result

from or1_megatron.config import VerifyConfig
from or1_megatron.types import Completion, Message, Problem, VersionSpan
from or1_megatron.verify.pool import VerifierPool
from or1_megatron.verify.program import Program, SandboxLimits, SandboxTier, SandboxUnavailable
from or1_megatron.verify.sandbox import Sandbox

SOURCE = "print(int(input()) * 2)"
PROGRAM = Program({"main.py": SOURCE.encode()}, ("{python}", "{box}/main.py"))
TIERS: tuple[SandboxTier, ...] = ("bubblewrap", "landlock")
TRUTH = json.dumps({"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]})
RIGHT, WRONG = SOURCE, "print(42)"
HOSTILE = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: break",
    "x = [bytearray(1 << 24) for _ in range(1 << 12)]",
    "while True: print('42' * 10000)",
    "import os\nos.kill(-1, 9)\nos._exit(0)",
    "while True: pass",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint(42)",
)


def median_ms(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)


def starts(repeats: int) -> dict[str, Any]:
    """Overhead of each tier over bare Python, and tests per second of one core with a fresh sandbox each."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    sandboxes = {}
    for tier in TIERS:
        try:
            sandboxes[tier] = Sandbox(SandboxLimits(), tier)
        except SandboxUnavailable as error:
            print(f"{tier}: {error}")
    spent: dict[str, list[float]] = {name: [] for name in ("bare", *sandboxes)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "main.py"
        script.write_text(SOURCE)
        for _ in range(repeats):
            for name in spent:
                started_s = time.perf_counter()
                if name == "bare":
                    interpreter = str(next(iter(sandboxes.values()))._tier._interpreter)
                    command = [interpreter, "-I", "-B", str(script)]
                    output = subprocess.run(command, input=b"21", capture_output=True, check=True).stdout
                else:
                    output = sandboxes[name].run(PROGRAM, b"21").output
                spent[name].append(time.perf_counter() - started_s)
                assert output == b"42\n"
    figures = {"bare Python's start": figure(median_ms(spent["bare"]), "ms")}
    for name, sandbox in sandboxes.items():
        sandbox.close()
        overhead_ms = median_ms(spent[name]) - median_ms(spent["bare"])
        figures[f"overhead per start, {name}"] = figure(overhead_ms, "ms", at_most=20.0)
        per_second = len(spent[name]) / sum(spent[name])
        figures[f"tests per second and core, {name}"] = figure(per_second, "tests/s", at_least=30.0)
    return figures


def sample(number: int) -> tuple[Problem, Completion, str]:
    """(problem, completion, expected status) of the soak's n-th sample."""
    problem = Problem(f"p{number // 8}", "soak", "code", (Message("user", "q"),), TRUTH, {}, f"soak:{number}")
    kind = "hostile" if number % 20 == 7 else ("right", "wrong", "right", "none", "cut")[number % 5]
    source = {"hostile": HOSTILE[number // 20 % len(HOSTILE)], "wrong": WRONG}.get(kind, RIGHT)
    text = f"</think>\n```python\n{source}\n```" if kind != "none" else "</think>no program"
    status = {"right": "right", "none": "no_answer", "cut": "truncated"}.get(kind, "wrong")
    ids, log_probs = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.float32)
    reason = "length" if kind == "cut" else "stop"
    spans = (VersionSpan(0, 0),)
    return problem, Completion(problem.id, number % 8, ids, log_probs, text, reason, spans, 0, 0, 0.0, 1.0), status


async def judged(samples: int, workers: int, resident: list[int]) -> list[str]:
    config = VerifyConfig(workers=workers, timeout_s=1.0, memory_bytes=1 << 30, max_pending=64)
    pool = VerifierPool(config, frozenset({"code"}))
    await pool.start()
    done = 0
    started_s = time.monotonic()

    async def judge(number: int) -> str:
        nonlocal done
        problem, completion, _ = sample(number)
        status = (await pool.verify(problem, completion, number // 8, 8)).status
        done += 1
        if done in (samples // 10, samples - 1):
            resident.append(tree_bytes())
        if done % 500 == 0:
            print(f"{done} of {samples}, {done / (time.monotonic() - started_s):.1f}/s")
        return status

    try:
        return list(await asyncio.gather(*map(judge, range(samples))))
    finally:
        await pool.close()


def tree_bytes() -> int:
    """Resident memory of the verifier actors."""
    actors = [
        process for process in psutil.process_iter(["cmdline"]) if "VerifierActor" in str(process.info["cmdline"])
    ]
    return sum(actor.memory_info().rss for actor in actors)


def left_behind() -> int:
    """Programs that run as a sandbox's user, and folders of sandboxes."""
    folders = len(list(Path(tempfile.gettempdir()).glob("or1-sandbox-*")))
    return folders + sum("bwrap" in (process.info["name"] or "") for process in psutil.process_iter(["name"]))


def soak(samples: int, workers: int) -> dict[str, Any]:
    before = left_behind()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    resident: list[int] = []
    statuses = asyncio.run(judged(samples, workers, resident))
    few = min(samples, 200)
    by_workers = [asyncio.run(judged(few, count, [])) for count in (1, 2, 4)]
    ray.shutdown()
    expected = [sample(number)[2] for number in range(samples)]
    wrong = [number for number in range(samples) if statuses[number] != expected[number]]
    print(f"other than by construction: {[(n, statuses[n], expected[n]) for n in wrong[:10]]}")
    return {
        "samples without a verdict": figure(samples - len(statuses), "", at_most=0),
        "verdicts other than by construction": figure(len(wrong), "", at_most=0),
        "errors": figure(Counter(statuses)["error"], "", at_most=0),
        "verifiers' memory, end over a tenth of the way": figure(resident[-1] / resident[0], "", at_most=1.1),
        "processes and folders left": figure(max(left_behind() - before, 0), "", at_most=0),
        "1, 2 and 4 workers agree": figure(by_workers[0] == by_workers[1] == by_workers[2]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-soak", action="store_true")
    arguments = parser.parse_args()
    cores = os.sched_getaffinity(0)
    figures = starts(arguments.repeats)
    os.sched_setaffinity(0, cores)
    if not arguments.no_soak:
        figures |= soak(arguments.samples, arguments.workers)
    for name, entry in figures.items():
        print(name, entry)
    write_result("verify_sandbox", figures, {key: value for key, value in vars(arguments).items() if key != "no_soak"})


if __name__ == "__main__":
    main()
