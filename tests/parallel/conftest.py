from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import rank_server  # noqa: F401

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.mesh import Mesh, build_mesh, start_process_group, stop_process_group


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A world of this process alone."""
    start_process_group(60)
    yield build_mesh(ParallelConfig(), seed=1)
    stop_process_group()
