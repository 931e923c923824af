"""Which configuration keys may change when a run is resumed, or when the next stage starts; refuses other changes."""

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
"""Dotted keys (``*``: any text) whose values may change when a run is resumed."""

NOT_RESUMABLE: Final[tuple[str, ...]] = (
    "rollout.max_staleness",
    "verify.math.*",
    "verify.custom*",
    "verify.*_reward",
)
"""Exceptions to RESUMABLE_CHANGES: keys on which the result of the run depends."""

NEXT_STAGE_CHANGES: Final[tuple[str, ...]] = (
    *RESUMABLE_CHANGES,
    "run.stage",
    "algorithm.*",
    "optimizer.*",
    "evaluate.*",
)
"""Keys whose values may differ between the runs of two successive stages. The entries of ``stages`` for the new stage
and later stages may differ too. Model, data and seed may not, because the new stage continues the data cursor."""

_ABSENT: Final = "absent"


def check_resume(old: Config, new: Config) -> None:
    """Refuse to resume a run of configuration ``old`` with ``new`` if a key that may not change on resume differs.

    Raises:
        ConfigError: a line for each such key with its old and new value.
    """
    if changed := _changed(old, new, RESUMABLE_CHANGES, NOT_RESUMABLE):
        raise ConfigError(
            f"run {new.run.folder} cannot be resumed with another configuration; put these back, "
            "or start a new run with --set run.dir=...:\n" + "\n".join(changed)
        )


def check_next_stage(old: Config, new: Config, checkpoint: Path) -> None:
    """Refuse to begin a stage from the previous stage's ``checkpoint`` if a key that must stay equal differs.

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
    """Return whether a dotted key matches one of the patterns (``*``: any text)."""
    return any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)


def _changed(old: Config, new: Config, allowed: Sequence[str], forbidden: Sequence[str]) -> list[str]:
    """Return a line ``KEY: was X, now Y`` for each changed key that is not in ``allowed`` or is in ``forbidden``."""
    before, after = leaves(old.model_dump(mode="json")), leaves(new.model_dump(mode="json"))
    return [
        f"  {key}: was {before.get(key, _ABSENT)}, now {after.get(key, _ABSENT)}"
        for key in dict.fromkeys((*before, *after))
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        and (not matches(key, allowed) or matches(key, forbidden))
    ]


def leaves(value: Any, key: str = "") -> dict[str, str]:
    """Return, by dotted key, the JSON text of each plain value of a nested dump; {} and [] count as plain values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not items or not value:
        return {key: json.dumps(value)}
    return {k: v for name, child in items for k, v in leaves(child, f"{key}.{name}" if key else str(name)).items()}
