from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import rank_server  # noqa: F401


@pytest.fixture(scope="session")
def tiny_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="session")
def tied_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2", tie_word_embeddings=True)
