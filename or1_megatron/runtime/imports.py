"""Imports of large packages without garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Switch garbage collection off inside the block. Objects that exist at its end are never collected.

    The collector would walk all loaded modules again and again. vLLM also collects several times while an engine
    starts, which then takes no time either.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
