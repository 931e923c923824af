"""Tests the tables of ``schemas``, from which docs are generated and by which files are written."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa

from or1_megatron.schemas import fields
from or1_megatron.schemas.metrics import METRICS
from or1_verify.types import Verdict
from tools.schemas_page import markdown

ROOT = Path(__file__).parents[1]


def test_docs_are_current() -> None:
    text = (ROOT / "docs" / "schemas.md").read_text()
    assert text == markdown(), "run: python -m tools.schemas_page > docs/schemas.md"


def test_every_table_row_of_the_docs_has_four_cells() -> None:
    """A | inside a cell would break the table, so it must be escaped."""
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert all(line.replace("\\|", "").count("|") == 5 for line in rows)


def test_names_are_unique_and_meanings_there() -> None:
    for table in (fields.ROLLOUT, fields.VERDICT, fields.SUMMARY, METRICS):
        names = [row.name for row in table]
        assert len(set(names)) == len(names)
        assert all(row.meaning for row in table)


def test_a_rollout_row_holds_the_whole_verdict() -> None:
    rollout = {field.name: field.type for field in fields.ROLLOUT}
    assert all(rollout[field.name] == field.type for field in fields.VERDICT)
    own = {"verify_wall_s" if name == "wall_s" else name for name in Verdict.__slots__}
    assert own | {"problem_id", "sample_index"} == {field.name for field in fields.VERDICT}


def test_the_schema_says_its_version() -> None:
    schema = fields.arrow_schema(fields.ROLLOUT)
    assert schema.metadata == {b"or1_schema": b"1"}
    assert schema.field("response_token_ids").type == pa.list_(pa.int32())


def test_the_page_of_other_trainers_names_has_ours() -> None:
    rows = [line.split(" | ") for line in (ROOT / "docs/metric_names.md").read_text().splitlines() if "` | " in line]
    ours = {name for row in rows for name in re.findall("`([^`]+)`", row[1])}
    assert len(ours) > 40 and ours <= {metric.name for metric in METRICS}
