"""A state as boxes of whole tensors: what is cut how, without a word about who cut it. Knows nothing of Megatron."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A contiguous part of a holding, and the box of a whole tensor that it is.

    ``offset`` and ``sizes`` have as many entries as ``whole``; ``start`` counts elements of the holding's tensor.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True, slots=True)
class Holding:
    """One flat tensor of this rank's state. ``tensor()`` is looked up anew at each use: it may have moved."""

    tensor: Callable[[], Tensor]
    boxes: tuple[Box, ...]
    is_written_here: bool
    """Of ranks that hold the same, one writes it."""
    may_differ: bool
    """The whole's shape depends on the layout (a padded vocabulary): rows that one side lacks are zeros."""
