"""Checks that pass, fail, crash, hang and leave a process behind; run as a script, it self-tests the named checks.

odd_checks.py OUT NAME[=LIMIT_S] ...
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from or1_megatron.selftest.one_check import Check, NotPossible
from or1_megatron.selftest.run_checks import run_checks


def passes(context: Any) -> None:
    context.require("speed of light", 3e8, "m/s", at_least=2e8)
    context.measure("patience", 1.0, "s", at_least=5.0)
    context.measure("darkness", math.nan)


def falls_short(context: Any) -> None:
    context.require("difference", 0.5, at_most=1e-3)
    context.require("nothing", math.nan, at_most=1.0)


def not_here(context: Any) -> None:
    raise NotPossible("the moon is not full")


def lacks(context: Any) -> None:
    context.find("compass", "none", "look at the sun")
    context.find("map", "torn", "nobody can start", stops=True)


def raises(context: Any) -> None:
    raise ZeroDivisionError("nothing to divide by")


def crashes(context: Any) -> None:
    context.measure("before the crash", 7)
    print("about to crash", flush=True)
    ctypes.string_at(0)


def hangs(context: Any) -> None:
    """Hang, with a process that has left the session and whose parent has ended."""
    source = "import os, sys, time; os.setsid(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(3600)"
    report = Path(os.readlink("/proc/self/fd/1")).parents[1]  # its output goes to logs/hangs.log
    command = f'"{sys.executable}" -c "{source}" {report / "orphan.pid"} &'
    subprocess.run(["/bin/sh", "-c", command], check=True)
    print("about to hang", flush=True)
    time.sleep(3600)


def sleeps(context: Any) -> None:
    from or1_megatron.selftest.checks import engines

    engines.sleep(context)


def main() -> int:
    checks = []
    for name, _, limit in (argument.partition("=") for argument in sys.argv[2:]):
        checks.append(Check(name, f"that it {name}", module="odd_checks", limit_s=float(limit or 600)))
    return len(run_checks(checks, Path(sys.argv[1])).ended("failed"))


if __name__ == "__main__":
    sys.exit(main())
