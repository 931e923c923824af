"""On which nodes the ranks are, as torchrun's environment says. Imports no package, so the engines' owner need not."""

from __future__ import annotations

import os


def several_nodes() -> bool:
    """Return whether the ranks of this one's world are on several nodes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ranks_per_node(world: int) -> int:
    """Return how many of the ``world`` ranks are on this rank's node, as on each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))
