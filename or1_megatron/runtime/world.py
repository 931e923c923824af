"""On which nodes the ranks are, as torchrun's environment says. Imports no package, so the engines' owner need not."""

from __future__ import annotations

import os

from or1_verify.errors import UserError


def several_nodes() -> bool:
    """Return whether the ranks of this one's world are on several nodes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def ranks_per_node(world: int) -> int:
    """Return how many of the ``world`` ranks are on this rank's node, as on each."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def check_torchrun() -> None:
    """Refuse a torchrun on several nodes that could not start the ranks again.

    Raises:
        UserError: it keeps one store over its restarts, with the addresses of ranks that have ended, and its agents do
            not count restarts alike.
    """
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if several_nodes() and restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            f"torchrun --max-restarts {restarts} on several nodes: ranks that start again would look for each other at "
            "the addresses of those that have ended. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun on every "
            "node, and let them meet by --rdzv-backend c10d"
        )
