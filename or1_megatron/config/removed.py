"""Configuration keys and values that were removed, each with a text that says what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_TAKE_OUT: Final = "take the key out; nothing is in its place"
_TAKEN_OUT: Final = """
    algorithm.entropy.bonus_on algorithm.entropy.minimum algorithm.kl.where algorithm.loss.divisor
    parallel.overlap_param_gather parallel.overlap_tensor rollout.old_kv_cache
    safety.dump_steps safety.dump_weights safety.keep_dumps verify.max_pending verify.worker_memory_bytes
"""
_TAKEN_OUT_OF_RECIPES: Final = """
    answers.without_solution code.max_solutions judges.abilities judges.max_without_vote statements
    duplicates.bands duplicates.embedding.backend duplicates.embedding.batch duplicates.rows_per_band
    duplicates.shingle_chars
"""

OBJECTIVES: Final = dict.fromkeys(
    ("clip_cov", "kl_cov"),
    "take clipped with algorithm.entropy.mode = adaptive, or write a class of your own of scope batch "
    "(docs/changing_the_objective.md)",
)
"""Removed values of ``algorithm.objective.name``, with what to do instead."""

REMOVED: Final = {
    **dict.fromkeys(_TAKEN_OUT.split(), _TAKE_OUT),
    **dict.fromkeys(
        ("rollout.tail", "rollout.tail_share", "rollout.continued"),
        "take the key out; rollout.max_staleness keeps engines from waiting for the longest responses",
    ),
    **dict.fromkeys(
        ("algorithm.entropy.proportional_gain", "algorithm.entropy.integral_gain"),
        "take the key out; algorithm.entropy.mode = adaptive is the paper's control",
    ),
    "checkpoint.in_memory": "take the key out, and set checkpoint.every_steps to the steps that the loss of a "
    "rank may cost",
    "data.train.weight": "set repeat, or a stage's mixture: to train on half as much of a source, repeat the others "
    "twice",
    "rollout.speculation": "set rollout.engine_args.speculative_config, for example "
    "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 5} (docs/stages.md)",
    "handoff.backend": "take the key out; handoff.transport says what carries the weights (docs/handoff.md)",
    "algorithm.entropy.estimate": "take the key out; e_k is of the sampled tokens, the metric entropy/full of the full "
    "vocabulary",
    "algorithm.entropy.preset": "paper is the default; for released-code set delta 0.0001, maximum 0.005, measured_on "
    "kept and gate late (docs/recipe.md)",
    "algorithm.kl.straight_through": "set algorithm.kl.estimator to k2",
    "algorithm.loss.clip_high_control": "set a fixed algorithm.loss.clip_high",
}
"""For each removed key (dotted, without list indices), what to do instead."""

OF_RECIPES: Final = {
    **dict.fromkeys(_TAKEN_OUT_OF_RECIPES.split(), _TAKE_OUT),
    "sources.layout": "columns tell a layout; set `columns` where a file has names of its own",
    "sources.limit": "give a file of the source's first rows",
    "code.without_solution": "leave the section out (code: null) to keep problems without a solution",
    "judges.retries": "ask for more votes",
}
"""Like REMOVED, for the recipes of ``or1 data build``."""


def why_removed(parts: Iterable[str]) -> str | None:
    """Return ``was removed: ...``, with what to do, for a removed key given by its parts; None for other keys."""
    why = (REMOVED | OF_RECIPES).get(".".join(part for part in parts if not part.isdecimal()))
    return None if why is None else f"was removed: {why}"


def drop_removed(data: dict[str, Any], above: tuple[str, ...] = ()) -> None:
    """Drop removed keys, in place, from a run's own config.yaml, because an earlier version may have written them."""
    for name, value in list(data.items()):
        if why_removed((*above, name)) is not None:
            del data[name]
        for section in value if isinstance(value, list) else [value]:
            if isinstance(section, dict):
                drop_removed(section, (*above, name))
