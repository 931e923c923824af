"""The plan beside what a GPU measured (benchmarks/results/gpu.json): memory, and seconds of the model that was fitted.

Not proven here: anything of Transformer Engine's layers, of several GPUs, and of engines; nor seconds of other models.
"""

from __future__ import annotations

import json

import plan_gpu
from result import RESULTS

from or1_megatron.config.hardware import read_hardware


def test_plan_is_near_what_was_measured() -> None:
    rows = list(plan_gpu.rows(json.loads((RESULTS / "gpu.json").read_text())["throughput"]))
    assert len(rows) == 8
    for name, _, _, of_seconds, _, _, of_memory in rows:
        assert abs(float(of_memory.rstrip("%"))) <= 7, name
        if name.startswith("1.5B"):
            assert abs(float(of_seconds.rstrip("%"))) <= 7, name


def test_larger_models_keep_the_fits_of_the_paper() -> None:
    """h100.yaml lists all its fits, since it has one of its own: those of 7B and 32B are h800.yaml's."""
    assert read_hardware("h100").fits[1:] == read_hardware("h800").fits
