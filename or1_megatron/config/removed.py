"""Keys that the configuration had once, and what to do in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

REMOVED: Final = {
    "rollout.speculation": (
        "drafts are vLLM's to configure; set rollout.engine_args.speculative_config, for example {method: ngram, "
        "num_speculative_tokens: 4, prompt_lookup_max: 5} (docs/stages.md)"
    ),
}
"""Why a key was removed and what to do, by the dotted key without places in lists."""


def why_removed(parts: Iterable[str]) -> str | None:
    """Return ``was removed: ...`` for a key, given by its parts, that the configuration had once; None for others."""
    why = REMOVED.get(".".join(part for part in parts if not part.isdecimal()))
    return None if why is None else f"was removed: {why}"
