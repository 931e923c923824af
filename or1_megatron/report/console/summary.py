"""What a run came to: the fields of ``schemas.SUMMARY``, from the loop's result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from or1_megatron.types import EvaluationResult


class Outcome(Protocol):
    """What is needed of ``rl.ports.LoopResult``: times are summed over all sessions of a resumed run."""

    @property
    def steps(self) -> int: ...

    @property
    def finished(self) -> bool: ...

    @property
    def before(self) -> EvaluationResult | None: ...

    @property
    def after(self) -> EvaluationResult | None: ...

    @property
    def best_step(self) -> int | None: ...

    @property
    def wall_s(self) -> float: ...

    @property
    def other_s(self) -> float: ...

    @property
    def seconds(self) -> Mapping[str, float]: ...

    @property
    def skipped_updates(self) -> int: ...


def summarise(
    outcome: Outcome, *, total_steps: int, seed: int, model: Path | None, startup_s: float | None
) -> dict[str, Any]:
    """``model``: the exported HF folder, None without export. ``startup_s``: of this session, up to the first verb."""
    evaluation = outcome.after or outcome.before
    return {
        **_evaluated("before", outcome.before),
        **_evaluated("after", outcome.after),
        "evaluation_samples": evaluation.samples if evaluation else None,
        "steps": outcome.steps,
        "total_steps": total_steps,
        "finished": outcome.finished,
        "best_step": outcome.best_step,
        "skipped_updates": outcome.skipped_updates,
        "seed": seed,
        "wall_s": outcome.wall_s,
        "startup_s": startup_s,
        "time_s": dict(outcome.seconds),
        "other_share": outcome.other_s / outcome.wall_s if outcome.wall_s > 0 else None,
        "model": None if model is None else str(model),
    }


def _evaluated(when: str, result: EvaluationResult | None) -> dict[str, float | None]:
    return {
        f"accuracy_{when}": result.accuracy if result else None,
        f"non_truncated_accuracy_{when}": result.non_truncated_accuracy if result else None,
        f"truncation_ratio_{when}": result.truncation_ratio if result else None,
        f"mean_length_{when}": result.mean_length_tokens if result else None,
    }
