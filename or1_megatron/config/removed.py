"""Configuration keys that were removed, with the reason and what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

_DEFERRING: Final = (
    "deferring a step's slowest prompts saved no time (lab/ablations/17_tail.md); take the key out. "
    "rollout.max_staleness keeps engines from waiting for the longest responses"
)
_CONTROLLED: Final = (
    "it kept entropy up only at the cost of accuracy (lab/ablations/entropy_at_n_sgd_4.md); take the key out. "
    "algorithm.entropy.mode = adaptive is the paper's control"
)

_DUMPED: Final = (
    "batches are not dumped any more; take the key out. To see an SGD step again, resume a copy of the run from a "
    "checkpoint before it; its responses are in rollouts/"
)

OBJECTIVES: Final = dict.fromkeys(
    ("clip_cov", "kl_cov"),
    "at N_SGD 4 entropy collapsed with Clip-Cov as without it (lab/ablations/entropy_at_n_sgd_4.md); take clipped with "
    "algorithm.entropy.mode = adaptive, or write a class of your own of scope batch (docs/changing_the_objective.md)",
)
"""Removed values of ``algorithm.objective.name``, with the reason and what to do instead."""

REMOVED: Final = {
    "checkpoint.in_memory": "checkpoints are on disk only, written while training goes on; take the key out and set "
    "checkpoint.every_steps to the steps that the loss of a rank may cost",
    "data.train.weight": "a problem occurs a whole number of times per epoch; take the key out and set repeat, or a "
    "stage's mixture: to train on half as much of a source, repeat the others twice",
    "rollout.tail": _DEFERRING,
    "rollout.tail_share": _DEFERRING,
    "rollout.continued": _DEFERRING,
    "rollout.old_kv_cache": "new weights always read the responses in flight anew: with the old keys and values the "
    "rest of a response was sampled from no version's model; take the key out",
    "rollout.speculation": "drafts are vLLM's to configure; set rollout.engine_args.speculative_config, for example "
    "{method: ngram, num_speculative_tokens: 4, prompt_lookup_max: 5} (docs/stages.md)",
    "parallel.overlap_param_gather": "no layout set it, and a handoff would wait for the gather that it defers; take "
    "the key out",
    "parallel.overlap_tensor": "no layout set it, and `or1 plan` expected 2% of a run's time from it at best; take "
    "the key out",
    "handoff.backend": "every handoff sends each engine rank just the slices that it needs; rank 0 gathering whole "
    "tensors (gloo) was 1.9 times slower. Take the key out; handoff.transport says what carries the slices "
    "(docs/handoff.md)",
    "algorithm.loss.divisor": "neither the recipe nor a published trainer that we know divides by other steps' "
    "tokens; take the key out: a mini-batch's sum is divided by its own tokens",
    "algorithm.entropy.estimate": "e_k is always of the sampled tokens, as in every recipe; take the key out. The "
    "full-vocabulary entropy is the metric entropy/full, which costs no forward pass of its own",
    "algorithm.entropy.minimum": "the lowest coefficient is 0, as in every recipe; take the key out",
    "algorithm.entropy.preset": "set the keys that it stood for: paper is the default; released-code is delta 0.0001, "
    "maximum 0.005, measured_on kept and gate late, as in the recipes released/or1_7b and released/or1_32b "
    "(docs/recipe.md)",
    "safety.keep_dumps": _DUMPED,
    "safety.dump_weights": _DUMPED,
    "safety.dump_steps": _DUMPED,
    "verify.max_pending": "it bounded no memory; take the key out",
    "verify.worker_memory_bytes": "the memory of verifier workers stays flat (docs/performance.md); take the key out",
    "algorithm.entropy.bonus_on": "a bonus on clipped tokens alone did nothing (lab/ablations/entropy_at_n_sgd_4.md); "
    "take the key out: all tokens get the bonus",
    "algorithm.entropy.proportional_gain": _CONTROLLED,
    "algorithm.entropy.integral_gain": _CONTROLLED,
    "algorithm.kl.where": "the KL is part of the loss; take the key out. No recipe took it off the rewards, and with "
    "advantages by group other trainers do not either (docs/objectives.md)",
    "algorithm.kl.straight_through": "its gradient was that of k2; take the key out and set algorithm.kl.estimator to "
    "k2",
    "algorithm.loss.clip_high_control": "steering epsilon_high showed no gain and ruined one run of three "
    "(lab/ablations/14_steered_clip_high.md); set a fixed algorithm.loss.clip_high",
}
"""The reason and what to do instead, by the removed key (dotted, without list indices)."""

_AS_MEASURED: Final = "the figures of docs/building_data.md are those of its fixed value; take the key out"

OF_RECIPES: Final = {
    "sources.layout": "columns tell a layout; set `columns` where a file has names of its own",
    "sources.limit": "a source is read whole; for a trial give a file of its first rows",
    "judges.abilities": "judges see math problems alone, as in the paper; take the key out",
    "statements": "all of its checks are always made; take the section out, and see the ledger for what they leave out",
    "answers.without_solution": "answers keeps problems without a solution, as STILL-3's must be; take the key out",
    "code.without_solution": "code leaves out problems without a solution; without the section (code: null) they stay",
    "code.max_solutions": "up to three solutions are tried; take the key out",
    "duplicates.shingle_chars": _AS_MEASURED,
    "duplicates.bands": _AS_MEASURED,
    "duplicates.rows_per_band": _AS_MEASURED,
    "duplicates.embedding.backend": "transformers loads the model, and its hidden states are mean-pooled",
    "duplicates.embedding.batch": "64 texts go through the model at a time; take the key out",
    "judges.retries": "a vote that cannot be read is not asked for again; ask for more votes",
    "judges.max_without_vote": "a judge of whose votes more than half cannot be read stops the build; take the key out",
}
"""As REMOVED, for keys of the recipes of ``or1 data build``."""


def why_removed(parts: Iterable[str]) -> str | None:
    """Return ``was removed: ...`` with reason and advice for a removed key, given by its parts; None for other keys."""
    why = (REMOVED | OF_RECIPES).get(".".join(part for part in parts if not part.isdecimal()))
    return None if why is None else f"was removed: {why}"


def pass_over_removed(data: dict[str, Any], above: tuple[str, ...] = ()) -> None:
    """Drop removed keys, in place, from a run's own configuration, into which an earlier version wrote every key."""
    for name, value in list(data.items()):
        if why_removed((*above, name)) is not None:
            del data[name]
        for section in value if isinstance(value, list) else [value]:
            if isinstance(section, dict):
                pass_over_removed(section, (*above, name))
