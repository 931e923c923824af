"""Keys that the configuration had once, and what to do in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

_DEFERRING: Final = (
    "deferring a step's slowest prompts saved no time (lab/ablations/17_tail.md); take the key out. "
    "rollout.max_staleness keeps engines from waiting for the longest responses"
)


class Removed(NamedTuple):
    default: Any
    """What a run's own config.yaml has where the key was not set. It changed nothing, and is passed over."""
    why: str
    """Why the key was removed, and what to do."""


REMOVED: Final = {
    "rollout.tail": Removed("wait", _DEFERRING),
    "rollout.tail_share": Removed(0.25, _DEFERRING),
    "rollout.continued": Removed("none", _DEFERRING),
    "rollout.speculation": Removed(
        None,
        "drafts are vLLM's to configure; set rollout.engine_args.speculative_config, for example {method: ngram, "
        "num_speculative_tokens: 4, prompt_lookup_max: 5} (docs/stages.md)",
    ),
    "algorithm.loss.divisor": Removed(
        "own",
        "neither the recipe nor a published trainer that we know divides by other steps' tokens; take the key out: a "
        "mini-batch's sum is divided by its own tokens",
    ),
    "algorithm.entropy.preset": Removed(
        None,
        "set the keys that it stood for: paper is the default; released-code is delta 0.0001, maximum 0.005, "
        "measured_on kept and gate late, as in the recipes released/or1_7b and released/or1_32b (docs/recipe.md)",
    ),
}
"""By the dotted key without places in lists."""


def why_removed(parts: Iterable[str]) -> str | None:
    """Return ``was removed: ...`` for a key, given by its parts, that the configuration had once; None for others."""
    removed = REMOVED.get(".".join(part for part in parts if not part.isdecimal()))
    return None if removed is None else f"was removed: {removed.why}"


def pass_over_defaults(data: dict[str, Any]) -> None:
    """Drop removed keys that have their default from a configuration, in place: runs of former versions wrote them."""
    for key, removed in REMOVED.items():
        *sections, name = key.split(".")
        at: Any = data
        for section in sections:
            at = at.get(section) if isinstance(at, dict) else None
        if isinstance(at, dict) and name in at and at[name] == removed.default:
            del at[name]
