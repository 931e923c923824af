"""Keys that the configuration had once, and what to do in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

_DEFERRING: Final = (
    "deferring a step's slowest prompts saved no time (lab/ablations/17_tail.md); take the key out. "
    "rollout.max_staleness keeps engines from waiting for the longest responses"
)
_CONTROLLED: Final = (
    "it kept entropy up only at the cost of accuracy (lab/ablations/entropy_at_n_sgd_4.md); take the key out. "
    "algorithm.entropy.mode = adaptive is the paper's control"
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
    "algorithm.entropy.bonus_on": Removed(
        "all",
        "a bonus on clipped tokens alone did nothing (lab/ablations/entropy_at_n_sgd_4.md); take the key out: all "
        "tokens get the bonus",
    ),
    "algorithm.entropy.proportional_gain": Removed(0.0, _CONTROLLED),
    "algorithm.entropy.integral_gain": Removed(0.0, _CONTROLLED),
    "algorithm.kl.where": Removed(
        "loss",
        "the KL is part of the loss; take the key out. No recipe took it off the rewards, and with advantages by group "
        "other trainers do not either (docs/objectives.md)",
    ),
    "algorithm.kl.straight_through": Removed(
        False, "its gradient was that of k2; take the key out and set algorithm.kl.estimator to k2"
    ),
    "algorithm.loss.clip_high_control": Removed(
        {"delta": 0.0, "minimum": 0.2, "maximum": 0.28},
        "steering epsilon_high showed no gain and ruined one run of three (lab/ablations/14_steered_clip_high.md); set "
        "a fixed algorithm.loss.clip_high",
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
