"""The fields of rollout files, verdicts and ``summary.json``: names, types, units and meanings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, get_args

import pyarrow as pa

from or1_megatron.types import FinishReason
from or1_verify.types import VerdictStatus

SCHEMA_VERSION: Final = 1
"""Version of the rollout files' schema (``or1_schema`` in their Parquet metadata). New fields do not change it."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a file's records. ``unit`` is "" for a field without a unit."""

    name: str
    type: pa.DataType
    unit: str
    meaning: str
    nullable: bool = False


def _one_of(literal: Any) -> str:
    return ", ".join(f"`{value}`" for value in get_args(literal))


_SPAN = pa.struct([pa.field("version", pa.int32()), pa.field("first_token", pa.int32())])

VERDICT: Final[tuple[Field, ...]] = (
    Field("problem_id", pa.string(), "", "hash of source and prompt; the same across files and runs"),
    Field("sample_index", pa.int32(), "", "which of the group's samples, from 0"),
    Field("reward", pa.float32(), "", "1 when `status` is `right`, else 0; a verifier of your own gives any number"),
    Field(
        "status",
        pa.string(),
        "",
        f"one of {_one_of(VerdictStatus)}; `unreadable`: no gold can be read, and the answer is another text; "
        "`timeout` and `error`: the verifier itself failed on the sample",
    ),
    Field("answer", pa.string(), "", "the final answer extracted from the response; empty when there is none"),
    Field("detail", pa.string(), "", "why, in words; may be empty"),
    Field("verify_wall_s", pa.float32(), "s", "wall time of the verdict"),
)
"""Fields of a verdict on one response, which are also columns of rollout files."""

_VERDICT_OWN = tuple(field for field in VERDICT if field.name not in ("problem_id", "sample_index"))

ROLLOUT: Final[tuple[Field, ...]] = (
    Field("step", pa.int32(), "steps", "rollout step of the run, counted over all stages"),
    Field("stage", pa.string(), "", "name of the stage that the step belongs to"),
    *VERDICT[:2],
    Field("source", pa.string(), "", "`data_source` of the problem"),
    Field("ability", pa.string(), "", "`math` or `code`"),
    Field("ground_truth", pa.string(), "", "`reward_model.ground_truth` of the problem, unchanged"),
    Field("prompt", pa.string(), "", "the contents of the prompt's turns, before the chat template"),
    Field("prompt_token_ids", pa.list_(pa.int32()), "", "the prompt as the engine got it, chat template applied"),
    Field("response", pa.string(), "", "the response's text, without the end-of-sequence token"),
    Field("response_token_ids", pa.list_(pa.int32()), "", "with the end-of-sequence token where there is one"),
    Field(
        "log_probs",
        pa.list_(pa.float32()),
        "nats",
        "the engine's log-prob of each response token: temperature applied, before any top-p or top-k",
    ),
    Field(
        "finish_reason",
        pa.string(),
        "",
        f"one of {_one_of(FinishReason)}: end-of-sequence token, or cut off at the response limit T",
    ),
    Field("truncated", pa.bool_(), "", "`finish_reason` is `length`"),
    Field(
        "versions",
        pa.list_(_SPAN),
        "",
        "weights versions that sampled the response, each from its `first_token` up to the next span's",
    ),
    Field("engine", pa.int32(), "", "index of the engine"),
    Field("seed", pa.int64(), "", "of the request"),
    Field("started_s", pa.float64(), "s since the epoch", "when the engine started on the request"),
    Field("finished_s", pa.float64(), "s since the epoch", "when its last token was sampled"),
    *_VERDICT_OWN,
    Field("advantage", pa.float32(), "", "of all the response's tokens; 0 where the group was rejected"),
    Field("kept", pa.bool_(), "", "the group entered the batch; false: rejected, because all its advantages are zero"),
    Field(
        "log_prob_differences",
        pa.list_(pa.float16()),
        "nats",
        "per response token, the policy's first log-prob in this step minus the engine's; null: not trained on",
        True,
    ),
    Field(
        "entropies",
        pa.list_(pa.float16()),
        "nats",
        "per response token, the entropy of the policy's full distribution; null: not trained on",
        True,
    ),
)
"""Columns of ``rollouts/step_NNNNNN.parquet``, which has a row for each response, of kept and of rejected groups."""


def _evaluated(when: str) -> tuple[Field, ...]:
    held_out = f"held-out responses at the final stage's T, {when} training"
    return (
        Field(f"accuracy_{when}", pa.float64(), "fraction", f"avg@k: right ones among all {held_out}", True),
        Field(f"non_truncated_accuracy_{when}", pa.float64(), "fraction", "the same of those not cut off", True),
        Field(f"truncation_ratio_{when}", pa.float64(), "fraction", f"cut off at T, of the {held_out}", True),
        Field(f"mean_length_{when}", pa.float64(), "tokens", f"mean length of the {held_out}", True),
    )


SUMMARY: Final[tuple[Field, ...]] = (
    *_evaluated("before"),
    *_evaluated("after"),
    Field("evaluation_samples", pa.int64(), "responses", "k of avg@k, before and after", True),
    Field("steps", pa.int64(), "steps", "rollout steps done"),
    Field("total_steps", pa.int64(), "steps", "rollout steps of all stages"),
    Field("finished", pa.bool_(), "", "all steps and evaluations are done; false: stopped on request, to be resumed"),
    Field("best_step", pa.int64(), "", "the step after which the evaluation was best", True),
    Field("skipped_updates", pa.int64(), "steps", "SGD steps skipped because loss or gradient was not finite"),
    Field("seed", pa.int64(), "", "of the run"),
    Field(
        "wall_s",
        pa.float64(),
        "s",
        "wall time of all recorded steps and evaluations, over all sessions of a resumed run; without start-up and "
        "without steps that a kill undid",
    ),
    Field("startup_s", pa.float64(), "s", "from the start of the last session to its first verb", True),
    Field("time_s", pa.map_(pa.string(), pa.float64()), "s", "of `wall_s`, per verb of the loop"),
    Field(
        "other_share",
        pa.float64(),
        "fraction",
        "of `wall_s`: neither an engine decoding nor forward, backward or optimizer",
        True,
    ),
    Field("model", pa.string(), "", "the exported HF folder; null when there was no export", True),
)
"""Fields of the object in ``summary.json``; null means not measured (no held-out problems, or no step done)."""


def arrow_schema(fields: Sequence[Field]) -> pa.Schema:
    """Return the Arrow schema of the given fields, in their order, with the schema's version."""
    return pa.schema(
        [pa.field(field.name, field.type, nullable=field.nullable) for field in fields],
        metadata={"or1_schema": str(SCHEMA_VERSION)},
    )
