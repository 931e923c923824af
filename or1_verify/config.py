"""The verifiers' configuration: the section ``verify`` of the trainer's configuration, or of a file (``--config``).

The docstring of a key is its documentation: its meaning, then ``Unit:`` unless the name ends in the unit, then
``Recipe:`` with what the report (arXiv 2505.22312) or its released code says.
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
    """Which answers the math verifier counts as right."""

    judge: Literal["own", "math_verify"] = "own"
    """own: the rules of docs/math_verifier.md. math_verify: the verdicts of the released code's verifier, which can
    also reward truncated responses and responses that never close their reasoning. Recipe: math_verify in the released
    code; the paper gives truncated responses 0 (docs/recipe.md, section 8)."""
    without_box: Literal["claimed", "refuse"] = "claimed"
    """With the judge own: how a response without a box is read. claimed: its last sentence may claim one value, by a
    phrase such as "the answer is". refuse: the response has no answer. Recipe: Math-Verify's extraction in the released
    code, which also takes the last number of a hedged sentence (``judge: math_verify``)."""
    rounding: bool = False
    """With the judge own: count an exact answer as right if it rounds to the digits of a decimal gold. If the gold is
    85.71, 600/7 is right; 85.7 and 85.714 are wrong (docs/math_verifier.md). Recipe: no such rule."""

    @model_validator(mode="after")
    def _rounds_by_our_rules_only(self) -> Self:
        if self.rounding and self.judge != "own":
            raise ValueError(
                f"verify.math.rounding is a rule of the judge own, and verify.math.judge is {self.judge}; "
                "leave one of the two at its default"
            )
        return self


class VerifyConfig(_Section):
    """Settings of the verifiers, and limits of the untrusted programs that they run."""

    math: MathConfig = Field(default_factory=MathConfig)
    """Which answers the math verifier counts as right."""
    workers: PositiveInt = 1
    """Number of verifier workers. Unit: processes."""
    timeout_s: PositiveFloat = 5.0
    """Time limit of one verdict of a math or custom verifier. A process that exceeds the limit is killed and replaced.
    For code: CPU time limit of each test, unless its problem has ``limits.time_s``."""
    max_error_fraction: Annotated[float, Field(gt=0, le=1)] = 0.05
    """The run stops if a larger share of a step's verdicts has the status ``error``, or if more than half have
    ``timeout``. Unit: share."""
    custom: dict[str, str] = Field(default_factory=dict)
    """Your own verifiers, by ability (in upper or lower case): package.module:name or path/to/file.py:name."""
    right_reward: float = 1.0
    """With a verifier of your own: a response with this reward or more counts as right in pass rates, filters and
    reports. Unit: reward."""
    lowest_reward: float = 0.0
    """Lowest reward that a verifier of your own may give, such as -1; a lower reward is an error. A response gets this
    reward if it is cut off, or if the verifier is late or fails, so that it gets no more than a wrong response.
    Unit: reward."""
    early_stop: bool = True
    """Stop at a submission's first failed test. False: run all tests; the verdict then has the result of each test."""
    budget_s: PositiveFloat = 120.0
    """Wall time limit of all tests of one submission together."""
    checker_headers: Path | None = None
    """Folder with testlib.h, for C++ checkers that include it."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "weak"] = "auto"
    """Confinement of untrusted programs. auto: bubblewrap if the machine grants namespaces, else Landlock. weak:
    neither, so that programs can read this machine's files; use it only on machines that hold nothing of value."""
    memory_bytes: PositiveInt = 4 << 30
    """Memory limit of one untrusted program, unless its problem has ``limits.memory_bytes``; at most node_memory_bytes.
    Recipe: 50 GB per test process in the paper (docs/recipe.md, section 8)."""
    node_memory_bytes: PositiveInt | None = None
    """Memory limit of all untrusted programs on one node together; without cgroups, the limit is divided equally
    among the workers. Unset: half of the node's memory."""
    processes: PositiveInt = 64
    """Largest number of processes and threads of one untrusted program. Unit: processes."""

    @field_validator("custom")
    @classmethod
    def _without_case(cls, custom: dict[str, str]) -> dict[str, str]:
        return {ability.lower(): path for ability, path in custom.items()}


def read_config(path: Path | None) -> VerifyConfig:
    """Return the section ``verify`` of a YAML file, or the defaults if there is no file or no such section.

    Raises UserError if the file cannot be read, has a ``base``, or has wrong keys or values (the message names all).
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
