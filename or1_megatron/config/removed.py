"""Keys that the configuration had once, and what to do in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_DEFERRING: Final = (
    "deferring a step's slowest prompts saved no time (docs/ablations/17_tail.md); take the key out. "
    "rollout.max_staleness keeps engines from waiting for the longest responses"
)

REMOVED: Final = {
    "rollout.tail": _DEFERRING,
    "rollout.tail_share": _DEFERRING,
    "rollout.continued": _DEFERRING,
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
