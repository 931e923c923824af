"""Adds a self-test's figures to a result file, check by check: a run of some checks leaves the others' figures, and a
check that did not come to its end leaves those of one that did.

    python lab/benchmarks/gpu/keep.py selftest.json gpu.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def kept(report: dict[str, Any]) -> dict[str, Any]:
    """Return {check: a result as the other result files have it} for each check that measured something."""
    ran = {"commit": report["commit"], "versions": report["versions"]}
    ran |= {"date": report["started"], "device": report["machine"]}
    return {
        outcome["name"]: {
            "command": f"lab/benchmarks/gpu/run.sh {outcome['name']}",
            **ran,
            "settings": settings_of(outcome),
            "figures": outcome["figures"],
        }
        for outcome in report["outcomes"]
        if outcome["figures"]
    }


def settings_of(outcome: dict[str, Any]) -> dict[str, str]:
    """Return how a check ended that has not passed, to stand beside its figures."""
    return {} if outcome["status"] == "passed" else {"result": f"{outcome['status']}: {outcome['reason']}"}


def main() -> int:
    report, target = (Path(argument) for argument in sys.argv[1:])
    found = json.loads(target.read_text()) if target.is_file() else {}
    for name, result in kept(json.loads(report.read_text())).items():
        if result["settings"] and set(result["figures"]) < set(found.get(name, {"figures": ()})["figures"]):
            print(f"{name} did not come to its end: the figures of {found[name]['date']} stay")
        else:
            found[name] = result
    target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
