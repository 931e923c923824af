"""Writes the result file of a benchmark: its figures, and the facts that are needed to believe or repeat them.

    from result import figure, write_result

    write_result(
        "packing",
        {"padding": figure(0.013, "share", at_most=0.02), "planning time": figure(0.41, "s", at_most=1.0)},
        {"responses": 4096, "data-parallel ranks": 32},
    )

writes lab/results/packing.json: ``name``, ``command``, ``commit``, ``date``, ``device``, ``versions``,
``settings`` (name to value) and ``figures`` (name to {``value``, ``unit``, and where there is one ``limit`` and
whether it is ``met``}). docs/performance.md takes its claims from these files.
"""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from or1_megatron.runtime.versions import ROOT as ROOT
from or1_megatron.runtime.versions import commit, device, versions
from or1_megatron.selftest.one_check import figure as figure
from or1_megatron.selftest.one_check import shown as shown

RESULTS = ROOT / "lab" / "results"


def write_result(name: str, figures: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    """Write lab/results/<name>.json, or <name>.json in the folder $BENCHMARK_RESULTS if this is set; return its path.

    Args:
        figures: results of ``figure`` by name. A bare value is a figure without unit and limit.
        settings: what was measured (sizes, dtypes, repetitions), as JSON values.
    """
    folder = Path(os.environ.get("BENCHMARK_RESULTS", RESULTS))
    folder.mkdir(parents=True, exist_ok=True)
    result = {
        "name": name,
        "command": command_line(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device(),
        "versions": versions(),
        "settings": dict(settings),
        "figures": {key: value if isinstance(value, Mapping) else figure(value) for key, value in figures.items()},
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return path


def command_line() -> str:
    """Return the command that started this process, as a person would type it in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    shown = script.relative_to(ROOT) if script.is_relative_to(ROOT) else Path(script.name)
    return shlex.join(["python", str(shown), *sys.argv[1:]])
