"""What may change in the configuration of a run that is resumed, or of the next stage."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from or1_megatron.config.base import ConfigError
from or1_megatron.config.schema import Config

RESUMABLE_CHANGES: Final[tuple[str, ...]] = (
    # Where things are and how long the run goes on.
    "run.dir",
    "run.max_restarts",
    "run.previous",  # its checkpoint has been read
    "stages.*.steps",
    "data.unusable",  # if refuse starts a run, drop gives the same problems; the data's fingerprint is compared anyway
    # How the work is spread: any layout loads any other's checkpoint, and the loss does not depend on the cut.
    "parallel.*",
    "rollout.*",
    "handoff.*",
    "cluster.*",
    # Limits of the verifiers: a time-out is counted apart from a wrong answer.
    "verify.*",
    # What is watched and kept. Not the evaluation's data and sampling: the best checkpoint is chosen by them.
    "evaluate.every_steps",
    "evaluate.samples_during",
    "checkpoint.*",
    "safety.*",
    "track.*",
)
"""Dotted keys (``*``: any part) whose value may differ from that of the run that is resumed."""

NOT_RESUMABLE: Final[tuple[str, ...]] = (
    "rollout.max_staleness",
    "verify.math.*",
    "verify.custom*",
    "verify.*_reward",
)
"""Exceptions to RESUMABLE_CHANGES: the result of the run depends on them."""

NEXT_STAGE_CHANGES: Final[tuple[str, ...]] = (
    *RESUMABLE_CHANGES,
    "run.stage",
    "algorithm.*",
    "optimizer.*",
    "evaluate.*",
)
"""Keys whose value may differ from that of the previous stage's run, beside the stage's own entry in ``stages`` and
later entries. Model, data and seed may not: the data cursor continues."""

_ABSENT: Final = "absent"


def check_resume(old: Config, new: Config) -> None:
    """Refuse to resume a run of ``old`` as ``new`` where they differ in more than RESUMABLE_CHANGES.

    Raises:
        ConfigError: a line for each such key with its old and new value.
    """
    if changed := _changed(old, new, RESUMABLE_CHANGES, NOT_RESUMABLE):
        raise ConfigError(
            f"run {new.run.folder} cannot be resumed with another configuration; put these back, "
            "or start a new run with --set run.dir=...:\n" + "\n".join(changed)
        )


def check_next_stage(old: Config, new: Config, checkpoint: Path) -> None:
    """Refuse to begin stage ``new.run.stage`` from ``checkpoint``, of a run of ``old``, if keys differ that must not.

    Raises:
        ConfigError: a line for each key that differs and is neither in NEXT_STAGE_CHANGES nor of a later stage.
    """
    assert new.run.stage is not None
    later = [f"stages.{index}.*" for index in range(new.run.stage - 1, max(len(old.stages), len(new.stages)))]
    if changed := _changed(old, new, (*NEXT_STAGE_CHANGES, *later), ()):
        raise ConfigError(
            f"stage {new.run.stage} cannot begin from {checkpoint} with another configuration in what a new stage does "
            "not change; put these back:\n" + "\n".join(changed)
        )


def matches(key: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns stands for a dotted key."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _changed(old: Config, new: Config, allowed: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    """Return a line for each key that differs and may not."""
    before, after = leaves(old.model_dump(mode="json")), leaves(new.model_dump(mode="json"))
    return [
        f"  {key}: was {before.get(key, _ABSENT)}, now {after.get(key, _ABSENT)}"
        for key in dict.fromkeys((*before, *after))
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        and (not matches(key, allowed) or matches(key, forbidden))
    ]


def leaves(value: Any, key: str = "") -> dict[str, str]:
    """Return the JSON text of every leaf of a dump by its dotted key; an empty list or mapping is a leaf."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        return {key: json.dumps(value)}
    return {k: v for name, child in items for k, v in leaves(child, f"{key}.{name}" if key else str(name)).items()}
