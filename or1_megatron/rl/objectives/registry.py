"""Makes the loss that ``algorithm.objective`` names: a built-in objective or a user's own class.

An objective is a frozen dataclass. Its fields say what it reads: fields in ``_KEYS`` come from common configuration
keys, fields in ``_OF_THE_STEP`` from the step, and all other fields from ``algorithm.objective.args``. A common key
that is set is refused when the objective has no field for it.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Final

from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.config.base import ConfigError, as_annotated
from or1_megatron.config.keys import did_you_mean
from or1_megatron.config.removed import OBJECTIVES
from or1_megatron.config.schema import StageConfig
from or1_megatron.interfaces import Objective, scope_of
from or1_megatron.rl.objectives.cispo import CISPO
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.dapo import DAPO
from or1_megatron.rl.objectives.dr_grpo import DrGRPO
from or1_megatron.rl.objectives.gspo import GSPO
from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, old_is_the_policy

BUILT_IN: Final[Mapping[str, type[Any]]] = {
    "clipped": ClippedPolicyLoss,
    "gspo": GSPO,
    "cispo": CISPO,
    "dr_grpo": DrGRPO,
    "dapo": DAPO,
}

_KEYS: Final[Mapping[str, str]] = {
    "clip_low": "loss.clip_low",
    "clip_high": "loss.clip_high",
    "dual_clip": "loss.dual_clip",
    "kl_coefficient": "kl.coefficient",
    "kl_estimator": "kl.estimator",
    "kl_cap": "kl.cap",
    "correction": "correction.mode",
    "correction_cap": "correction.cap",
    "correction_floor": "correction.floor",
    "correction_level": "correction.level",
}
"""For each field that objectives share, the key below ``algorithm`` that sets the field."""
_OF_THE_STEP: Final = ("entropy_coefficient", "temperature", "on_policy", "seed", "length_share")


def find(name: str) -> type[Any]:
    """Return the class that ``algorithm.objective.name`` names. A user's module may be in the working folder.

    Raises ConfigError when no class has this name, or when the class is no dataclass with ``__call__``.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    where = f"algorithm.objective.name = {name}"
    if name in OBJECTIVES:
        raise ConfigError(f"{where}: was removed: {OBJECTIVES[name]}")
    module, colon, attribute = name.partition(":")
    if not (colon and module and attribute):
        raise ConfigError(
            f"{where}: unknown objective{did_you_mean(name.lower(), BUILT_IN)}; expected {', '.join(BUILT_IN)}, or "
            "package.module:Name of your own"
        )
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        kind: Any = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"{where}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and is_dataclass(kind) and any("__call__" in vars(k) for k in kind.__mro__)):
        raise ConfigError(f"{where}: found {kind!r:.80}, expected a dataclass with __call__")
    return kind


def build(name: str, settings: Mapping[str, Any], args: Mapping[str, Any]) -> Objective:
    """Return the named objective. Each field takes the entry of its name in ``args``, or else in ``settings``.

    Raises ConfigError, which lists everything that is wrong.
    """
    kind = find(name)
    known = {field.name for field in fields(kind) if field.init}
    own = known - _KEYS.keys() - set(_OF_THE_STEP)
    wrong = [
        f"algorithm.objective.args.{key}: objective {name} has no such parameter{did_you_mean(key, own)}; it has "
        f"{', '.join(sorted(own)) or 'none of its own'}"
        for key in args
        if key not in known
    ]
    typed, untyped = as_annotated(kind, args)
    given = {**{key: value for key, value in settings.items() if key in known}, **typed}
    wrong += [f"algorithm.objective.args.{line}" for line in untyped]
    needed = [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]
    wrong += [
        f"algorithm.objective.args.{key}: missing; objective {name} needs it" for key in needed if key not in given
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
    try:
        made: Objective = kind(**given)
        pickle.dumps(made)
        scope_of(made)
        float(made.temperature)
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"algorithm.objective: {name} cannot be made: {type(error).__name__}: {error}") from error
    return made


def make_objective(
    algorithm: AlgorithmConfig,
    stage: StageConfig,
    alpha: float,
    stale: bool = False,
    seed: int = 0,
    mean_length: float | None = None,
) -> Objective:
    """Return the objective of an SGD step, with the entropy coefficient ``alpha``.

    Args:
        stale: weights older than the policy's drew the samples (``old_is_the_policy``).
        seed: for random choices of the objective.
        mean_length: counted tokens per response of the step's batch; None: the stage's ``max_response_tokens``.

    Raises ConfigError when ``algorithm.objective`` is wrong.
    """
    settings = {field: value_at(algorithm, key) for field, key in _KEYS.items()}
    settings |= {
        "entropy_coefficient": alpha,
        "temperature": stage.temperature,
        "on_policy": stage.sgd_steps == 1 and old_is_the_policy(algorithm, stale),
        "seed": seed,
        "length_share": 1.0 if mean_length is None else mean_length / stage.max_response_tokens,
    }
    return build(algorithm.objective.name, settings, algorithm.objective.args)


def value_at(section: Any, key: str) -> Any:
    """Return the value of the dotted ``key`` below ``section``."""
    for part in key.split("."):
        section = getattr(section, part)
    return section


def objective_conflicts(algorithm: AlgorithmConfig, stage: StageConfig) -> Iterator[str]:
    """Yield, for each setting of ``algorithm`` that contradicts the objective, a sentence that says what to do."""
    name = algorithm.objective.name
    try:
        kind = find(name)
    except ConfigError as error:
        yield str(error)
        return
    try:
        make_objective(algorithm, stage, algorithm.entropy.coefficient)
    except ConfigError as error:
        yield from str(error).splitlines()
    known = {field.name for field in fields(kind)}
    common = [key for key in algorithm.objective.args if key in _KEYS or key in _OF_THE_STEP]
    for key in common:
        setter = f"algorithm.{_KEYS[key]}" if key in _KEYS else "the step"
        yield f"algorithm.objective.args.{key}: this parameter is set by {setter}; take it out here"
    plain = AlgorithmConfig()
    asked = [(field, key, value_at(plain, key)) for field, key in _KEYS.items()]
    asked += [("entropy_coefficient", "entropy.mode", "off")]
    for field, key, off in asked:
        value = value_at(algorithm, key)
        if field not in known and value != off:
            yield (
                f"algorithm.{key} = {value}, but objective {name} does not read it; set it to "
                f"{'null' if off is None else off}"
            )
    if issubclass(kind, PolicyGradientLoss):
        yield from kind.contradictions(algorithm)
