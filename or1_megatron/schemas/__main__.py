"""Writes docs/schemas.md: ``python -m or1_megatron.schemas > docs/schemas.md``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from or1_megatron.schemas.fields import PROBLEM, ROLLOUT, SCHEMA_VERSION, SUMMARY, VERDICT, Field, type_name
from or1_megatron.schemas.metrics import METRICS


def _table(rows: Iterable[tuple[str, str, str, str]]) -> str:
    head = ("field", "type", "unit", "meaning")
    lines = [head, ("---",) * 4, *((f"`{name}`", *rest) for name, *rest in rows)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _fields_table(fields: Sequence[Field]) -> str:
    return _table(
        (field.name, type_name(field.type) + (" or null" if field.nullable else ""), field.unit, field.meaning)
        for field in fields
    )


def markdown() -> str:
    """The text of docs/schemas.md."""
    metrics = [("step", "int64", "steps", "rollout step; 0 is before training")]
    metrics += [(metric.name, "float64", metric.unit, metric.meaning) for metric in METRICS]
    return f"""# Schemas

Every field of what a run reads and writes, with type and unit.
Made by `python -m or1_megatron.schemas > docs/schemas.md`: edit the tables in the code, not this file.

## Metrics: `metrics.jsonl`

One JSON object per line, all fields but `step` floating-point numbers. A line lacks what its step could not measure;
null: not finite. TensorBoard and W&B get the same names. When a killed run goes on, a torn last line is cut off and
the steps after the checkpoint are taken out, so that no step is there twice. A run that was stopped before an
evaluation adds it, when it goes on, as a second line of the same step: merge lines by `step`.

{_table(metrics)}

## Rollouts: `rollouts/step_000012.parquet`

One Parquet file (zstd) per recorded step, one row per response, in the order of the step's groups, rejected ones
included. The oldest files are deleted beyond `track.rollouts_keep_bytes`. File metadata:
`or1_schema` = {SCHEMA_VERSION}.

{_fields_table(ROLLOUT)}

## Verdicts

What a verifier says of one response. In a rollout file these are columns of its row.

{_fields_table(VERDICT)}

## Summary: `summary.json`

One JSON object, written when a run ends.

{_fields_table(SUMMARY)}

## Problems

Rows of a problem file, JSON lines or Parquet: the schema of Skywork-OR1-RL-Data. JSON lines of `prompt` (a string) and
`answer` are taken too.

{_fields_table(PROBLEM)}
"""


if __name__ == "__main__":
    sys.stdout.write(markdown())
