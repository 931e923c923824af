"""A run's responses in the terminal, each with its verdict, reward and advantage: ``or1 rollouts RUN``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import pyarrow as pa
from rich.console import Console
from rich.text import Text

from or1_megatron.runtime.jsonl import read_rows
from or1_megatron.runtime.rollout_store import read_rollouts, rollout_files
from or1_megatron.runtime.run_folder import RunFolder, step_of
from or1_megatron.types import VerdictStatus

_COLUMNS = [
    *("step", "stage", "problem_id", "sample_index", "source", "ground_truth", "prompt", "response"),
    *("response_token_ids", "finish_reason", "versions", "reward", "status", "answer", "detail", "advantage", "kept"),
]

T = TypeVar("T")

_STATUS_STYLES = {"right": "green", "wrong": "red", "truncated": "yellow", "no_answer": "red"}


def show_rollouts(run: Path, *, step: int | None, limit: int, status: str | None, console: Console) -> int:
    """Print up to ``limit`` responses of a step (None: the newest kept) and return how many.

    They are taken evenly over the step's rows, so that few show many of its prompts; ``status`` leaves only those with
    that verdict. Raises FileNotFoundError when there is no such run, no rollout yet, or none of that step (the nearest
    is named); ValueError for an unknown status.
    """
    if status is not None and status not in get_args(VerdictStatus):
        raise ValueError(f"status '{status}' is not known; expected one of {', '.join(get_args(VerdictStatus))}")
    if (run / "responses.jsonl").is_file():
        return _show_evaluation(run / "responses.jsonl", limit=limit, status=status, console=console)
    table = read_rollouts(rollout_file(run, step), _COLUMNS)
    rows = [row for row in range(table.num_rows) if status is None or table["status"][row].as_py() == status]
    chosen = _evenly(rows, limit)
    of_status = "" if status is None else f" with status {status}"
    shown_step = step if table.num_rows == 0 else table["step"][0].as_py()
    _say(console, f"step {shown_step}: {len(rows)} responses{of_status}, {len(chosen)} shown", style="bold")
    for row in table.take(pa.array(chosen, pa.int64())).to_pylist():
        _show(row, console)
    return len(chosen)


def _show_evaluation(path: Path, *, limit: int, status: str | None, console: Console) -> int:
    """The same of an evaluation's responses (``or1 eval``)."""
    found = sorted(read_rows(path), key=lambda row: (row["problem_id"], row["sample"]))
    rows = _evenly([row for row in found if status is None or row["status"] == status], limit)
    of_status = "" if status is None else f" with status {status}"
    _say(console, f"{path}: {len(found)} responses, {len(rows)}{of_status} shown", style="bold")
    for row in rows:
        _say(console, "")
        _say(console, f"{row['source']}  problem {row['problem_id']}  sample {row['sample']}", style="bold cyan")
        verdict = Text(row["status"], style=_STATUS_STYLES.get(row["status"], "magenta"))
        length = "" if row["tokens"] is None else f"  {row['tokens']} tokens"
        verdict.append(
            f"  reward {row['reward']:g}{length}{', truncated' if row['truncated'] else ''}", style="default"
        )
        console.print(verdict, soft_wrap=True, highlight=False)
        _say_answer(row, console)
    return len(rows)


def _evenly(rows: Sequence[T], limit: int) -> list[T]:
    count = min(limit, len(rows))
    return [rows[place * len(rows) // count] for place in range(count)]


def rollout_file(run: Path, step: int | None) -> Path:
    """The file of ``step``, or of the newest step that was kept. Raises FileNotFoundError as show_rollouts."""
    if not run.is_dir():
        raise FileNotFoundError(f"no run folder {run}")
    folder = RunFolder(run)
    if not folder.config.exists() and not folder.rollouts.exists():
        raise FileNotFoundError(f"{run} is not a run folder: it has neither {folder.config.name} nor rollouts/")
    files = {step_of(path): path for path in rollout_files(folder.rollouts)}
    steps = sorted(found for found in files if found is not None)
    if not steps:
        raise FileNotFoundError(f"{run} holds no rollouts yet: they are written after the first step")
    if step is None:
        return files[steps[-1]]
    if step not in files:
        nearest = min(steps, key=lambda found: abs(found - step))
        raise FileNotFoundError(
            f"{run} holds no rollouts of step {step}; the nearest is step {nearest} (kept: {len(steps)} steps from "
            f"{steps[0]} to {steps[-1]}; older ones go, and track.rollouts_every_steps leaves some out)"
        )
    return files[step]


def _show(row: Mapping[str, Any], console: Console) -> None:
    versions = ", ".join(
        str(span["version"]) + (f" from token {span['first_token']}" if span["first_token"] else "")
        for span in row["versions"]
    )
    _say(console, "")
    _say(console, f"{row['source']}  problem {row['problem_id']}  sample {row['sample_index']}", style="bold cyan")
    verdict = Text(row["status"], style=_STATUS_STYLES.get(row["status"], "magenta"))
    verdict.append(
        f"  reward {row['reward']:g}  advantage {row['advantage']:+.3f}{'' if row['kept'] else ' (group rejected)'}"
        f"  {len(row['response_token_ids'])} tokens, finish {row['finish_reason']}  weights version {versions}",
        style="default",
    )
    console.print(verdict, soft_wrap=True, highlight=False)
    _say_answer(row, console)


def _say_answer(row: Mapping[str, Any], console: Console) -> None:
    answer = f"answer {row['answer']}" if row["answer"] else "no answer"
    _say(console, f"{answer}  expected {row['ground_truth']}" + (f"  ({row['detail']})" if row["detail"] else ""))
    _say(console, _indented("prompt", row["prompt"]), style="dim")
    _say(console, _indented("response", row["response"]))


def _indented(title: str, text: str) -> str:
    """The text under its title, every line set in, so that nothing in it can pass for ours."""
    return title + "".join(f"\n    {line}" for line in (_printable(text).splitlines() or [""]))


def _printable(text: str) -> str:
    """A response may hold anything: terminal control characters are shown, not obeyed."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
