"""What every test shares: no network, few threads, GPU tests skipped where there is none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests of several packages share the engines of engine_fixtures
pytest_plugins = ["engine_fixtures"]

# Before anything imports torch or a tokenizer: the cores are shared with subprocesses that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    wanted = [item for item in items if "gpu" in item.keywords]
    if not wanted:
        return
    import torch

    if not torch.cuda.is_available():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
