"""Shows a training run in the terminal: a line per step, a live progress bar, and a table of the outcome at the end.

In ``plain`` mode (by choice, or without a terminal) it prints the same lines without bar and colour, for log files.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from or1_megatron.report.console.format import duration, fraction, number, quantity
from or1_megatron.report.console.summary import show_summary
from or1_megatron.types import EvaluationResult

_HEADER_EVERY_LINES = 20
_POLL_S = 0.25
_SAMPLING_VERBS = ("roll_out", "evaluate")
"""The loop's verbs in which responses finish one by one. During these verbs the bar shows how many have finished."""

_FIRST_VERBS = ("begin_stage", "take_problems")

_WIDTHS = {
    "step": 5,
    "stage": 10,
    "reward": 6,
    "acc-nt": 6,
    "trunc": 6,
    "length": 6,
    "entropy/target": 14,
    "alpha": 7,
    "kept": 7,
    "grad": 7,
    "lr": 7,
    "tok/s": 6,
    "time": 7,
    "left": 7,
}
"""Columns of a step's line and their widths. acc-nt: accuracy of the responses that were not truncated; left: expected
time of the remaining steps, from the mean time of this session's last 20 steps."""


def open_console(mode: Literal["auto", "rich", "plain"]) -> tuple[Console, bool]:
    """Return (console on stdout, whether it is live). A live console shows a progress bar and colours. ``auto`` is live
    on a terminal; ``plain`` is never live, and prints no escape codes."""
    live = mode == "rich" or (mode == "auto" and sys.stdout.isatty())
    if live:
        return Console(force_terminal=True), True
    return Console(force_terminal=False, no_color=True, width=120, soft_wrap=True), False


class RunConsole:
    """Prints a training run in the terminal. The loop calls it as a Tracker and as an Observer."""

    def __init__(
        self,
        console: Console,
        live: bool,
        *,
        total_steps: int,
        stage_names: Sequence[str],
        entropy_target: float | None,
        progress: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        """``progress`` returns the numbers (finished, requested) of the current rollout's responses. A thread calls it
        while the bar is live, so it must not block."""
        self._console = console
        self._total_steps = total_steps
        self._stage_names = stage_names
        self._entropy_target = entropy_target
        self._progress = progress
        self._lines = 0
        self._took_s = deque[float](maxlen=20)
        self._verb = ""
        self._step = "start"
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            refresh_per_second=4,  # leaves the cores to the trainer
            disable=not live,
        )
        self._task = self._bar.add_task("start", total=None, count="")
        self._bar.start()
        self._poller = threading.Thread(target=self._poll, name="console", daemon=True)
        if live and progress is not None:
            self._poller.start()

    def verb_started(self, step: int, verb: str) -> None:
        """Show a verb (method of the loop) in the bar. ``step``: number of rollout steps whose update is done."""
        self._verb = verb
        if verb in _FIRST_VERBS:
            self._step = f"step {step + 1}/{self._total_steps}"
        with self._lock:  # a task's total cannot be unset, so each verb gets a new one
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(f"{self._step}  {verb.replace('_', ' ')}", total=None, count="")

    def rolled_out(self, *_: object, **__: object) -> None:
        """Do nothing: responses are not printed."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step. Metrics without a rollout (those of step 0) print nothing."""
        if "reward/mean" not in metrics:
            return
        if self._lines % _HEADER_EVERY_LINES == 0:
            self._print("  ".join(name.rjust(width) for name, width in _WIDTHS.items()), style="bold")
        self._lines += 1
        self._took_s.append(metrics.get("time/step", 0.0))
        cells = self._cells(step, metrics)
        self._print("  ".join(cells[name].rjust(width) for name, width in _WIDTHS.items()))
        late, failed = (int(metrics.get(f"verify/{status}", 0)) for status in ("timeout", "error"))
        if late or failed:
            self._print(f"step {step}: {late} verdicts ran out of time (verify.timeout_s), {failed} failed", "yellow")

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        self._print(
            f"evaluation after step {step}: accuracy {fraction(result.accuracy)}"
            f" (non-truncated {fraction(result.non_truncated_accuracy)}), "
            f"truncated {fraction(result.truncation_ratio)}, mean length {number(result.mean_length_tokens)} tokens; "
            f"avg@{result.samples} on {result.problems} problems in {duration(result.wall_s)}",
            style="cyan",
        )

    def alarmed(self, step: int, text: str) -> None:
        self._print(text, style="yellow")

    def resumed(self, step: int) -> None:
        self._print(f"resumed from the checkpoint of step {step} of {self._total_steps}", style="cyan")

    def say(self, text: str) -> None:
        self._print(text)

    def finished(self, summary: Mapping[str, Any]) -> None:
        """Remove the bar, and print the run's outcome (fields of ``schemas.SUMMARY``)."""
        self.close()
        show_summary(summary, self._console)

    def close(self) -> None:
        """Remove the bar, so that the bar does not mix with an error's message. A second call does nothing."""
        self._closed.set()
        if self._poller.is_alive():
            self._poller.join(timeout=1.0)
        self._bar.stop()

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def _cells(self, step: int, metrics: Mapping[str, float]) -> dict[str, str]:
        get = metrics.get
        stage = get("stage/index")
        target = "-" if self._entropy_target is None else f"{self._entropy_target:.3f}"
        kept, rejected = get("groups/kept"), get("groups/rejected")
        groups = None if kept is None or rejected is None else kept + rejected
        left_s = (self._total_steps - step) * sum(self._took_s) / len(self._took_s)
        return {
            "step": str(step),
            "stage": "-" if stage is None else self._stage_names[int(stage)][: _WIDTHS["stage"]],
            "reward": number(get("reward/mean")),
            "acc-nt": fraction(get("accuracy/non_truncated")),
            "trunc": fraction(get("truncation/ratio")),
            "length": number(get("length/mean")),
            "entropy/target": f"{number(get('entropy/sampled'))}/{target}",
            "alpha": number(get("entropy/coefficient")),
            "kept": f"{quantity(kept)}/{quantity(groups)}",
            "grad": number(get("policy/grad_norm")),
            "lr": "-" if (rate := get("policy/learning_rate")) is None else f"{rate:.1e}",
            "tok/s": quantity(get("rollout/tokens_per_s")),
            "time": duration(get("time/step")),
            "left": duration(left_s if len(self._took_s) > 1 else None),
        }

    def _poll(self) -> None:
        # If the engines are gone, the loop reports the reason; the bar only stops.
        with contextlib.suppress(Exception):
            while self._progress is not None and not self._closed.wait(_POLL_S):
                if self._verb in _SAMPLING_VERBS:
                    done, asked = self._progress()
                    with self._lock:
                        self._bar.update(self._task, completed=done, total=asked or None, count=f"{done}/{asked}")
