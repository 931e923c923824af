"""Ray for the pool's tests: embedded, small, one for the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="session")
def small_ray() -> Iterator[None]:
    started_here = not ray.is_initialized()
    if started_here:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # whatever else runs here
    yield
    if started_here:
        ray.shutdown()
