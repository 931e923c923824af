"""Seeds and logging. Seeds: equal draws prove repeatability, not independence of the streams."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import torch

from or1_megatron.runtime.seeds import derive_seed, seed_everything


def test_derived_seeds_are_fixed_distinct_and_fit() -> None:
    """The first number is fixed, since a change of it would change every run."""
    assert derive_seed(1, "rollout", 0) == 1417674222
    seeds = [derive_seed(*key) for key in product(range(8), ("rollout", "rank"), range(64))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 31 for seed in seeds)
    assert derive_seed(1, "a", "b") != derive_seed(1, "ab")
    assert derive_seed(1, 2) != derive_seed(1, "2")


def test_seeding_repeats_all_three_generators_per_rank() -> None:
    def draws(seed: int, rank: int) -> tuple[float, float, float]:
        seed_everything(seed, rank)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draws(1, 0) == draws(1, 0)
    everything = [value for key in ((1, 0), (1, 1), (2, 0)) for value in draws(*key)]
    assert len(set(everything)) == 9


LOGS = """
import logging, sys, threading, warnings
from pathlib import Path
from or1_megatron.runtime.log import set_up_logging
set_up_logging(Path(sys.argv[1]), 3)
set_up_logging(Path(sys.argv[1]), 3)  # again: no line comes twice
own = logging.getLogger("or1_megatron.rl.loop")
own.debug("too fine"); own.info("a detail"); own.warning("look here")
logging.getLogger("vllm.engine").info("chatter")
logging.getLogger("megatron.core").warning("GPTModel is deprecated")
logging.getLogger("ray").error("a node died")
warnings.warn("old api")
thread = threading.Thread(target=lambda: 1 / 0, name="helper"); thread.start(); thread.join()
raise RuntimeError("the end")
"""


def test_lines_go_where_they_belong(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOGS, str(tmp_path / "logs")], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    in_file = (tmp_path / "logs" / "rank_3.log").read_text()
    assert "[rank 3] I or1_megatron.rl.loop: a detail\n" in in_file
    assert "[rank 3] W or1_megatron.rl.loop: look here\n" in in_file
    assert in_file.count("look here") == 1
    assert "[rank 3] E ray: a node died" in in_file
    assert "GPTModel is deprecated" in in_file
    assert "old api" in in_file
    assert "too fine" not in in_file and "chatter" not in in_file
    assert "uncaught exception in helper" in in_file and "ZeroDivisionError" in in_file
    assert "uncaught exception\nTraceback" in in_file and "RuntimeError: the end" in in_file

    lines = done.stderr.splitlines()
    assert lines[:2] == ["[rank 3] WARNING look here", "[rank 3] ERROR a node died"]
    assert "deprecated" not in done.stderr and "old api" not in done.stderr and "a detail" not in done.stderr
    assert done.stderr.count("RuntimeError: the end") == 1
    assert done.stdout == ""


def test_fatal_signals_leave_a_trace(tmp_path: Path) -> None:
    code = (
        "import faulthandler, sys\nfrom pathlib import Path\nfrom or1_megatron.runtime.log import set_up_logging\n"
        "set_up_logging(Path(sys.argv[1]), 0)\nfaulthandler._sigsegv()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True)
    assert "Segmentation fault" in (tmp_path / "rank_0.log").read_text()
