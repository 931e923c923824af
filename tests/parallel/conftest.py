from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import rank_server  # noqa: F401

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group


@pytest.fixture(scope="session")
def tiny_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2")


@pytest.fixture(scope="session")
def tied_qwen2(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen2", tie_word_embeddings=True)


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A world of this process alone."""
    start_process_group(60)
    yield build_mesh(ParallelConfig(), seed=1)
    stop_process_group()
