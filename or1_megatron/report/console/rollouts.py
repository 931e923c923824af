"""Prints responses of a run with verdict, reward and advantage in the terminal: ``or1 rollouts RUN``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.text import Text

from or1_megatron.runtime.jsonl import read_rows
from or1_megatron.runtime.rollout_store import read_rollouts, rollout_files
from or1_megatron.runtime.run_folder import find_run, step_of
from or1_verify.types import VerdictStatus

_COLUMNS = [
    *("step", "stage", "problem_id", "sample_index", "source", "ground_truth", "prompt", "response"),
    *("response_token_ids", "finish_reason", "versions", "reward", "status", "answer", "detail", "advantage", "kept"),
]


_STATUS_STYLES = {"right": "green", "wrong": "red", "truncated": "yellow", "no_answer": "red"}


def show_rollouts(run: Path, *, step: int | None, limit: int, status: str | None, console: Console) -> int:
    """Print up to ``limit`` responses of a step (None: the newest step with rollouts), and return their number.

    The responses are spread evenly over the step, so that a few cover many prompts. ``status`` selects responses with
    this verdict. In the folder of an evaluation (``or1 eval``), which has no steps, all responses count.
    Raises FileNotFoundError if the run, its rollouts or the step's rollouts do not exist (the nearest step is named),
    ValueError for an unknown status.
    """
    if status is not None and status not in get_args(VerdictStatus):
        raise ValueError(f"status '{status}' is not known; expected one of {', '.join(get_args(VerdictStatus))}")
    of_status = "" if status is None else f" with status {status}"
    if (path := run / "responses.jsonl").is_file():
        stored = sorted(read_rows(path), key=lambda row: (row["problem_id"], row["sample"]))
        rows = _evenly([row for row in stored if status is None or row["status"] == status], limit)
        _say(console, f"{path}: {len(stored)} responses, {len(rows)}{of_status} shown", style="bold")
    else:
        path = rollout_file(run, step)
        table = read_rollouts(path, _COLUMNS)
        if status is not None:
            table = table.filter(pc.field("status") == status)
        rows = table.take(pa.array(_evenly(range(table.num_rows), limit), pa.int64())).to_pylist()
        _say(console, f"step {step_of(path)}: {table.num_rows} responses{of_status}, {len(rows)} shown", style="bold")
    for row in rows:
        _show(row, console)
    return len(rows)


def _evenly[T](rows: Sequence[T], limit: int) -> list[T]:
    count = min(limit, len(rows))
    return [rows[number * len(rows) // count] for number in range(count)]


def rollout_file(run: Path, step: int | None) -> Path:
    """Return the rollout file of ``step`` (None: of the newest step that has one). Raises FileNotFoundError."""
    files = {step_of(path) or 0: path for path in rollout_files(find_run(run).rollouts)}
    if not files:
        raise FileNotFoundError(f"{run} holds no rollouts yet: they are written after the first step")
    chosen = max(files) if step is None else step
    if chosen not in files:
        nearest = min(files, key=lambda kept: abs(kept - chosen))
        raise FileNotFoundError(
            f"{run} holds no rollouts of step {step}; the nearest is step {nearest} (kept: {len(files)} steps from "
            f"{min(files)} to {max(files)}; older files are deleted, and track.rollouts_every_steps skips steps)"
        )
    return files[chosen]


def _show(row: Mapping[str, Any], console: Console) -> None:
    sample = row["sample"] if "sample" in row else row["sample_index"]
    _say(console, "")
    _say(console, f"{row['source']}  problem {row['problem_id']}  sample {sample}", style="bold cyan")
    verdict = Text(row["status"], style=_STATUS_STYLES.get(row["status"], "magenta"))
    verdict.append(f"  reward {row['reward']:g}{_facts(row)}", style="default")
    console.print(verdict, soft_wrap=True, highlight=False)
    answer = f"answer {row['answer']}" if row["answer"] else "no answer"
    _say(console, f"{answer}  expected {row['ground_truth']}" + (f"  ({row['detail']})" if row["detail"] else ""))
    _say(console, _indented("prompt", row["prompt"]), style="dim")
    _say(console, _indented("response", row["response"]))


def _facts(row: Mapping[str, Any]) -> str:
    if "versions" not in row:  # of an evaluation
        length = "" if row["tokens"] is None else f"  {row['tokens']} tokens"
        return length + (", truncated" if row["truncated"] else "")
    versions = ", ".join(
        str(span["version"]) + (f" from token {span['first_token']}" if span["first_token"] else "")
        for span in row["versions"]
    )
    return (
        f"  advantage {row['advantage']:+.3f}{'' if row['kept'] else ' (group rejected)'}"
        f"  {len(row['response_token_ids'])} tokens, finish {row['finish_reason']}  weights version {versions}"
    )


def _indented(title: str, text: str) -> str:
    """Return a title, and below it a text whose lines are indented, so that they differ from this program's output."""
    return title + "".join(f"\n    {line}" for line in (_printable(text).splitlines() or [""]))


def _printable(text: str) -> str:
    """Return a text with its control characters escaped, because a terminal would obey those in a response."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
