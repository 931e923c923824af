"""Measures what a sandbox costs per start, and tests per second and core.

    python lab/benchmarks/verify_sandbox.py [--repeats 200]

Bare Python and each tier take turns to run the same trivial program, which reads a number and prints its double, in one
process on one core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from result import figure, write_result

from or1_verify.sandbox.limits import SandboxLimits
from or1_verify.sandbox.program import Program, SandboxTier, SandboxUnavailable
from or1_verify.sandbox.sandbox import Sandbox

SOURCE = "print(int(input()) * 2)"
PROGRAM = Program({"main.py": SOURCE.encode()}, ("{python}", "{box}/main.py"))
TIERS: tuple[SandboxTier, ...] = ("bubblewrap", "landlock")


def median_ms(seconds: list[float]) -> float:
    return 1000 * statistics.median(seconds)


def starts(repeats: int) -> dict[str, Any]:
    """Return each tier's overhead over bare Python, and its tests per second on one core, each in a new sandbox."""
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
                    interpreter = str(next(iter(sandboxes.values()))._tier.interpreter)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    arguments = parser.parse_args()
    figures = starts(arguments.repeats)
    for name, entry in figures.items():
        print(name, entry)
    write_result("verify_sandbox", figures, vars(arguments))


if __name__ == "__main__":
    main()
