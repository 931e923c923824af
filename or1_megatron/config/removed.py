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
    "verify.max_pending": Removed(16384, "it bounded no memory; take the key out"),
    "verify.worker_memory_bytes": Removed(
        2 << 30, "the memory of verifier workers stays flat (docs/performance.md); take the key out"
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
        section, _, name = key.rpartition(".")
        at = data.get(section)
        if isinstance(at, dict) and name in at and at[name] == removed.default:
            del at[name]
