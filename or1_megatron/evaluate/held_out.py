"""The evaluation during training, on held-out problems with the run's engines; its avg@k is a plain mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

import numpy as np

from or1_megatron.config.schema import EvaluationConfig, EvaluationSetConfig
from or1_megatron.evaluate.pass_at_k import best_at, sizes
from or1_megatron.interfaces import Rollouts
from or1_megatron.rl.entropy import sampled_entropy
from or1_megatron.rl.fatal_checks import check_verdicts
from or1_megatron.types import EvaluationResult, Group, Prompt, RolloutReport, Sampling


class HeldOut:
    """Evaluates the policy on held-out problem sets during a run, without any effect on training.

    The evaluation has its own, constant seed, so that the same weights give the same result, and the order of training
    data does not change.
    """

    def __init__(
        self,
        sets: Mapping[str, Sequence[Prompt]],
        rollouts: Rollouts,
        max_response_tokens: int,
        max_error_fraction: float,
        clock: Callable[[], float] = time.perf_counter,
        keep: Callable[[Sequence[Group]], None] = lambda groups: None,
    ) -> None:
        """
        Args:
            sets: prompts by the name of their set.
            max_response_tokens: limit of a response if the settings give none: the final stage's, in all stages.
            keep: gets the responses to each set, with their verdicts.

        Raises:
            ValueError: a set is empty, or there is no set.
        """
        empty = [name for name, prompts in sets.items() if not prompts]
        if empty or not sets:
            raise ValueError(f"evaluate: no held-out problem is left{' in ' + empty[0] if empty else ''}")
        self._sets = {name: tuple(prompts) for name, prompts in sets.items()}
        self._rollouts = rollouts
        self._max_response_tokens = max_response_tokens
        self._max_error_fraction = max_error_fraction
        self._clock = clock
        self._keep = keep

    def evaluate(self, settings: EvaluationConfig, whole: bool) -> EvaluationResult:
        """Return the combined result of all sets. Each problem gets ``samples`` responses if ``whole``, else
        ``samples_during``. Raises what the rollout raises, and VerificationFailing."""
        return combine({held_out.title: self._evaluate(held_out, settings, whole) for held_out in settings.data})

    def _evaluate(self, held_out: EvaluationSetConfig, settings: EvaluationConfig, whole: bool) -> EvaluationResult:
        started_s = self._clock()
        temperature = settings.temperature if held_out.temperature is None else held_out.temperature
        samples, tokens = settings.samples_of(held_out, whole), settings.longest_of(held_out, self._max_response_tokens)
        sampling = Sampling(temperature, held_out.top_p or settings.top_p, tokens)
        ticket = self._rollouts.roll_out(self._sets[held_out.title], samples, sampling, settings.seed, urgent=True)
        self._rollouts.wait_decoded(ticket)
        groups, report = self._rollouts.collect(ticket)
        check_verdicts(groups, self._max_error_fraction)
        self._keep(groups)
        return summarise(groups, report, self._clock() - started_s, greedy=temperature == 0)


def combine(results: Mapping[str, EvaluationResult]) -> EvaluationResult:
    """Return one result for several sets: scores are unweighted means over sets; times and problems are added up."""
    if len(results) == 1:
        return next(iter(results.values()))
    sets = list(results.values())
    ended = [result.non_truncated_accuracy for result in sets if result.non_truncated_accuracy is not None]
    entropies = [result.entropy for result in sets if result.entropy is not None]
    of_all = [name for name in sets[0].more if all(name in result.more for result in sets)]
    return EvaluationResult(
        accuracy=fmean(result.accuracy for result in sets),
        non_truncated_accuracy=fmean(ended) if ended else None,
        truncation_ratio=fmean(result.truncation_ratio for result in sets),
        mean_length_tokens=fmean(result.mean_length_tokens for result in sets),
        problems=sum(result.problems for result in sets),
        samples=max(result.samples for result in sets),
        decode_s=sum(result.decode_s for result in sets),
        wall_s=sum(result.wall_s for result in sets),
        sets=dict(results),
        entropy=fmean(entropies) if entropies else None,
        more={name: fmean(result.more[name] for result in sets) for name in of_all},
    )


def summarise(groups: Sequence[Group], report: RolloutReport, wall_s: float, greedy: bool = False) -> EvaluationResult:
    """Return the result of one evaluation rollout; a response whose verdict failed counts as wrong."""
    right = np.concatenate([group.right for group in groups])
    truncated = np.concatenate([group.truncated for group in groups])
    lengths = np.array([completion.token_ids.size for group in groups for completion in group.completions])
    return EvaluationResult(
        accuracy=float(right.mean()),
        non_truncated_accuracy=None if truncated.all() else float(right[~truncated].mean()),
        truncation_ratio=float(truncated.mean()),
        mean_length_tokens=float(lengths.mean()),
        problems=len(groups),
        samples=len(groups[0].completions),
        decode_s=report.decode_s,
        wall_s=wall_s,
        entropy=None if greedy else sampled_entropy(groups),
        more=_more(groups),
    )


def _more(groups: Sequence[Group]) -> dict[str, float]:
    """Return pass@k; best@k if some reward is neither 1 nor 0; accuracies by source if there are several sources."""
    right = np.array([group.right for group in groups], np.float64)
    rewards = np.array([group.rewards for group in groups], np.float64)
    kinds = {"pass": right} if (rewards == right).all() else {"pass": right, "best": rewards}
    more = {f"{kind}@{k}": best_at(of, k) for kind, of in kinds.items() for k in sizes(right.shape[1])[1:]}
    sources = np.array([group.prompt.problem.source for group in groups])
    for source in np.unique(sources) if (sources != sources[0]).any() else ():
        more[f"source/{source}/accuracy"] = float(right[sources == source].mean())
    return more
