"""An ablation, read from its file (lab/ablations/NN_name.yaml): the claim, and arms at two scales.

    number: 10
    title: clip-higher
    claim: ...                      # the paper's claim, in our words
    watch: [entropy/sampled, ...]   # metrics to draw
    paper: {base: ..., set: {...}, arms: {...}}
    small: {base: small.yaml, seeds: [1, 2, 3], entry: [...], arms: {...}, expects: [...]}

An arm is a set of dotted keys and values that override ``base`` and ``set``, as ``--set`` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from or1_megatron.config.load import ConfigError, load_config
from or1_megatron.config.resume import leaves
from or1_megatron.config.schema import Config, NonNegativeFloat, Positive, PositiveFloat, Section
from or1_megatron.config.yaml_reader import read_file

FOLDER: Final = Path(__file__).parents[1] / "ablations"
"""The project's ablations, with their pages."""

Scale = Literal["paper", "small"]
Window = Literal["early", "late", "all", "last", "equal_time"]
Overrides = dict[str, Any]


class Expectation(Section):
    """A prediction that follows from the claim: one arm has a higher mean of a metric, over a window, than another."""

    says: str
    metric: str
    window: Window = "late"
    """early, late: the first or last quarter of the steps with the metric; last: the metric's last value; equal_time:
    the last quarter of the seconds that the seed's fastest arm took (``outcome.value_at_time``)."""
    higher: str
    """The arm whose metric should be higher."""
    than: str
    """The other arm."""
    margin: NonNegativeFloat = 0.0
    """How much lower the metric of ``higher`` may be without contradicting the claim."""
    within: PositiveFloat | None = None
    """If the interval of the difference holds 0 and lies between minus and plus this value, the verdict is "no
    difference". Chosen before the first run."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if self.margin and self.within:
            raise ValueError(f"'{self.says}' has a margin and within; expected one of them")
        return self


class Condition(Section):
    """A condition of entry. If it is not met, the arms cannot show the claim; a run of one arm measures it first."""

    says: str
    arm: str
    """The arm whose run with ``Arms.entry_seed`` is measured."""
    metric: str
    window: Window = "late"
    above: float | None = None
    below: float | None = None

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        if self.above is None and self.below is None:
            raise ValueError(f"'{self.says}' names neither above nor below; expected a bound of {self.metric}")
        return self

    def met(self, value: float | None) -> bool:
        """Return whether the metric's value is within the bounds; None (no value) is not."""
        if value is None:
            return False
        return (self.above is None or value > self.above) and (self.below is None or value < self.below)

    def bounds(self) -> str:
        sides = ((">", self.above), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in sides if bound is not None)


class Column(Section):
    """A computed column: in each row, the distance of a metric from a fixed value or from the row before."""

    metric: str
    away_from: float | None = None
    """The fixed value; None: the metric's value in the row before."""


class Arms(Section):
    """The arms of an ablation at one scale."""

    base: Path
    """The configuration of all arms, relative to the ablation's file."""
    set: Overrides = Field(default_factory=dict)
    arms: dict[str, Overrides] = Field(min_length=1)
    seeds: tuple[Positive, ...] = Field(default=(1, 2, 3), min_length=1)
    """Chosen before the first run."""
    columns: dict[str, Column] = Field(default_factory=dict)
    """Computed columns by name. They can be watched and compared like metrics."""
    equal_time: bool = False
    """Whether arms are also compared at equal seconds of training, not only at equal steps."""
    entry: tuple[Condition, ...] = ()
    entry_seed: Positive = 101
    """Seed of the runs that measure the conditions of entry. It must not be one of ``seeds``."""
    expects: tuple[Expectation, ...] = ()
    note: str = ""
    """How this scale differs from the paper's setting."""

    @model_validator(mode="after")
    def _names_its_arms(self) -> Self:
        named = {name for expected in self.expects for name in (expected.higher, expected.than)}
        named |= {condition.arm for condition in self.entry}
        if unknown := named - set(self.arms):
            raise ValueError(f"expects and entry name {sorted(unknown)}; the arms are {list(self.arms)}")
        if self.entry and self.entry_seed in self.seeds:
            raise ValueError(f"entry_seed = {self.entry_seed} is one of the seeds {list(self.seeds)}; choose another")
        return self


class Ablation(Section):
    number: Positive
    title: str
    claim: str
    watch: tuple[str, ...] = Field(min_length=1)
    paper: Arms
    small: Arms
    path: Path

    def at(self, scale: Scale) -> Arms:
        return self.paper if scale == "paper" else self.small

    def metrics(self) -> set[str]:
        """Return the metrics that the ablation's pages, comparisons and conditions read, at both scales."""
        named = set(self.watch)
        for arms in (self.paper, self.small):
            named |= {item.metric for item in (*arms.expects, *arms.entry, *arms.columns.values())}
        return named - set(self.paper.columns) - set(self.small.columns)


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm at one scale, with its configuration."""

    name: str
    base: Path
    overrides: tuple[str, ...]
    """Texts ``key=value``, for ``or1 train --set``."""
    config: Config
    key: str
    """Digest of the configuration without seed and folder, the same for equal arms of different ablations."""


def load_ablations(folder: Path = FOLDER) -> dict[int, Ablation]:
    """Return the ablations in all files NN_name.yaml of ``folder``, by number.

    Raises ConfigError, with file, key and what was expected, if a file is wrong.
    """
    ablations: dict[int, Ablation] = {}
    for path in sorted(folder.glob("[0-9][0-9]_*.yaml")):
        try:
            data = {**read_file(path)[0], "path": str(path)}
            ablation = Ablation.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            lines = [f"{path}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError("\n".join(lines)) from None
        if ablation.number in ablations:
            raise ConfigError(f"{path}: number {ablation.number} is taken by {ablations[ablation.number].path}")
        ablations[ablation.number] = ablation
    return ablations


def arms_of(ablation: Ablation, scale: Scale, extra: Mapping[str, Any] | None = None) -> list[Arm]:
    """Return every arm with its configuration. ``extra``: overrides of all arms.

    Raises ConfigError if an arm's configuration is wrong, or the same as another arm's.
    """
    chosen = ablation.at(scale)
    base = ablation.path.parent / chosen.base
    arms: dict[str, Arm] = {}
    for name, own in chosen.arms.items():
        values = {**chosen.set, **own, **(extra or {})}
        overrides = tuple(f"{key}={json.dumps(value)}" for key, value in values.items())
        try:
            config = load_config(base, overrides)
        except ConfigError as error:
            raise ConfigError(f"{ablation.path}: arm '{name}' ({scale}): {error}") from None
        key = _key(config)
        if key in arms:
            raise ConfigError(f"{ablation.path}: arms '{arms[key].name}' and '{name}' ({scale}) are the same")
        arms[key] = Arm(name, base, overrides, config, key)
    return list(arms.values())


def differences(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Return the configuration keys in which arms differ (except seed and folder), each with its value in every arm."""
    flat = [leaves(_plain(arm.config)) for arm in arms]
    keys = dict.fromkeys(key for values in flat for key in values)
    rows = {key: [values.get(key, "absent") for values in flat] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _plain(config: Config, exclude_defaults: bool = False) -> dict[str, Any]:
    data = config.model_dump(mode="json", exclude_defaults=exclude_defaults)
    for name in ("dir", "seed"):
        data["run"].pop(name, None)
    return data


def _key(config: Config) -> str:
    # Defaults are left out, so that a new key of the schema does not change the digests.
    text = json.dumps(_plain(config, exclude_defaults=True), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
