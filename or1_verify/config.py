"""The settings of the verifiers: section ``verify`` of a configuration of the trainer, and the file of ``--config``.

The docstring of a key is its documentation: what it is, then ``Unit:`` where the name does not end in the unit, then
``Recipe:``, what the report (arXiv 2505.22312) or its released code says, where it says something.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from or1_verify.errors import UserError


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True)


class MathConfig(_Section):
    """What the math verifier counts as right."""

    judge: Literal["own", "math_verify"] = "own"
    """own: the rules of docs/math_verifier.md. math_verify: the verdicts of the released code's verifier, which can
    also reward truncated responses and ones that never close their reasoning. Recipe: math_verify in the released code;
    the paper gives truncated responses 0 (docs/recipe.md, section 8)."""
    without_box: Literal["claimed", "refuse"] = "claimed"
    """With the judge own, what a response without a box earns. claimed: its last sentence may claim one value, by a
    phrase such as "the answer is". refuse: nothing. Recipe: Math-Verify's extraction in the released code, which takes
    the last number of a hedge, too (``judge: math_verify``)."""
    rounding: bool = False
    """With the judge own, an exact answer is right where it rounds to the digits that a decimal gold shows: 600/7 for
    85.71, but neither 85.7 nor 85.714 (docs/math_verifier.md). Recipe: not there."""

    @model_validator(mode="after")
    def _rounds_by_our_rules_only(self) -> Self:
        if self.rounding and self.judge != "own":
            raise ValueError(
                f"verify.math.rounding is a rule of the judge own, and verify.math.judge is {self.judge}; "
                "leave one of the two at its default"
            )
        return self


class VerifyConfig(_Section):
    """The verifiers, and the limits of untrusted programs."""

    math: MathConfig = Field(default_factory=MathConfig)
    """What the math verifier counts as right."""
    workers: PositiveInt = 1
    """Verifier workers. Unit: processes."""
    timeout_s: PositiveFloat = 5.0
    """Hard limit for one verdict of a math or custom verifier; the worker is killed and replaced. Code: CPU time of
    each test, unless its row has ``limits.time_s``."""
    max_error_fraction: Annotated[float, Field(gt=0, le=1)] = 0.05
    """A step in which a larger share of the verdicts is ``error`` stops the run (of ``timeout``: more than half). Unit:
    share."""
    custom: dict[str, str] = Field(default_factory=dict)
    """Verifiers of your own by ability, without regard to case: package.module:name or path/to/file.py:name."""
    right_reward: float = 1.0
    """A response counts as right in pass rates, filters and reports from this reward of a verifier of your own. Unit:
    reward."""
    lowest_reward: float = 0.0
    """The lowest reward of a verifier of your own, such as -1; one below it is an error. Responses that are cut off,
    late or that the verifier fails on get it, so that none of them is better off than a wrong one. Unit: reward."""
    early_stop: bool = True
    """Stop at a submission's first failed test. False: run all, and the verdict says how each ended."""
    budget_s: PositiveFloat = 120.0
    """Wall time of all tests of one submission together."""
    checker_headers: Path | None = None
    """A folder that holds testlib.h, for C++ checkers that include it."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "weak"] = "auto"
    """Confinement of untrusted programs. auto: bubblewrap where the machine grants namespaces, else Landlock; weak:
    neither, and files of this machine can be read: only for a machine that holds nothing of value."""
    memory_bytes: PositiveInt = 4 << 30
    """Memory of one untrusted program, unless its row has ``limits.memory_bytes``; at most node_memory_bytes. Recipe:
    50 GB per test process in the paper (docs/recipe.md, section 8)."""
    node_memory_bytes: PositiveInt | None = None
    """Memory of all untrusted programs on one node together; where cgroups cannot be used, each worker's programs get
    the worker's share of it. Unset: half of the node's memory."""
    processes: PositiveInt = 64
    """Processes and threads of one untrusted program. Unit: processes."""

    @field_validator("custom")
    @classmethod
    def _without_case(cls, custom: dict[str, str]) -> dict[str, str]:
        return {ability.lower(): path for ability, path in custom.items()}


def read_config(path: Path | None) -> VerifyConfig:
    """Return the section ``verify`` of a YAML file; the defaults where there is no file, or no section in it.

    Raises UserError for a file that cannot be read, one with a ``base``, and wrong keys or values, all named.
    """
    if path is None:
        return VerifyConfig()
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as YAML: {error}") from None
    section = content.get("verify", {}) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise UserError(f"{path}: found no mapping, expected one with a section 'verify', itself a mapping")
    if "base" in content:
        raise UserError(f"{path}: found a 'base', expected a whole configuration: the output of `or1 config {path}`")
    try:
        return VerifyConfig.model_validate_json(json.dumps(section, default=str), strict=True)
    except ValidationError as error:
        lines = (
            f"{path}: {'.'.join(('verify', *map(str, problem['loc'])))}: {problem['msg']}, found {problem['input']!r}"
            for problem in error.errors()
        )
        raise UserError("\n".join(lines)) from None
