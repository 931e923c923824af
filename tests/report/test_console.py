"""The console's lines in plain mode.

The live bar is only shown to appear and disappear.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from or1_megatron.report.console.format import duration, fraction, number, quantity
from or1_megatron.report.console.run_console import RunConsole
from or1_megatron.report.console.summary import summarise
from or1_megatron.rl.loop_arguments import LoopResult
from or1_megatron.schemas.fields import SUMMARY
from or1_megatron.types import EvaluationResult

BEFORE = EvaluationResult(0.36, 0.5, 0.2, 88.12, 256, 8, 10.0, 12.3)
AFTER = EvaluationResult(0.905, None, 1.0, 160.0, 256, 8, 10.0, 75.0)

STEP = {
    "stage/index": 1,
    "reward/mean": 0.41237,
    "accuracy/non_truncated": 0.618,
    "truncation/ratio": 0.3125,
    "length/mean": 88.14,
    "entropy/sampled": 0.2312,
    "entropy/coefficient": 0.01,
    "groups/kept": 23,
    "groups/rejected": 9,
    "policy/grad_norm": 0.4213,
    "policy/learning_rate": 1.5e-6,
    "rollout/tokens_per_s": 5123.0,
    "time/step": 3.216,
}


RESULT = LoopResult(
    steps=12,
    finished=True,
    before=BEFORE,
    after=AFTER,
    best_step=10,
    wall_s=200.0,
    other_s=15.0,
    seconds={"roll_out": 150.0, "reject": 0.01, "hand_off": 49.9, "batch": 0.09},
    skipped_updates=0,
)
STOPPED = LoopResult(0, False, None, None, None, 0.0, 0.0, {}, 0)


def plain(total_steps: int = 12) -> tuple[RunConsole, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, force_terminal=False, no_color=True, width=120)
    names = ["short", "a-name-too-long-for-its-column"]
    return RunConsole(console, False, total_steps=total_steps, stage_names=names, entropy_target=0.2), text


def test_a_step_is_a_line() -> None:
    shown, text = plain()
    shown.verb_started(6, "take_problems")
    shown.log(7, STEP)
    shown.log(8, {"stage/index": 0, "reward/mean": 0.0, "time/step": 3725.0})  # what is not measured is a dash
    shown.log(9, {"stage/index": 0, "reward/mean": 0.0, "time/step": 3.0, "policy/learning_rate": 0.0})
    shown.close()
    lines = text.getvalue().splitlines()
    # Left after step 8: 4 steps of (3.216 s + 3725 s) / 2; after step 9: 3 of the mean of three.
    assert [" ".join(line.split()) for line in lines] == [
        "step stage reward acc-nt trunc length entropy/target alpha kept grad lr tok/s time left",
        "7 a-name-too 0.412 61.8% 31.2% 88.1 0.231/0.200 0.0100 23/32 0.421 1.5e-06 5.1k 3.22s -",
        "8 short 0 - - - -/0.200 - -/- - - - 1h02m 2h04m",
        "9 short 0 - - - -/0.200 - -/- - 0.0e+00 - 3.00s 1h02m",
    ]
    assert {len(line) for line in lines} == {127}


def test_verdicts_that_failed_are_counted() -> None:
    shown, text = plain()
    shown.log(7, STEP | {"verify/timeout": 3.0, "verify/error": 1.0})
    assert text.getvalue().splitlines()[-1] == "step 7: 3 verdicts ran out of time (verify.timeout_s), 1 failed"


def test_the_header_comes_again_and_step_0_has_no_line() -> None:
    shown, text = plain(total_steps=100)
    shown.log(0, {"evaluation/accuracy": 0.3, "time/step": 9.0})
    for step in range(1, 42):
        shown.log(step, STEP | {"time/step": 3600.0 if step < 20 else 10.0})
    lines = text.getvalue().splitlines()
    assert [i for i, line in enumerate(lines) if "entropy/target" in line] == [0, 21, 42]
    assert len(lines) == 41 + 3
    assert lines[-1].endswith("  9m50s")  # 59 steps of 10 s: those of an hour are long ago


def test_evaluations_and_resumes_are_lines() -> None:
    shown, text = plain()
    shown.evaluated(0, BEFORE)
    shown.evaluated(12, AFTER)
    shown.resumed(5)
    assert text.getvalue().splitlines() == [
        "evaluation after step 0: accuracy 36.0% (non-truncated 50.0%), truncated 20.0%, mean length 88.1 tokens; "
        "avg@8 on 256 problems in 12.3s",
        "evaluation after step 12: accuracy 90.5% (non-truncated -), truncated 100.0%, mean length 160 tokens; "
        "avg@8 on 256 problems in 75.0s",
        "resumed from the checkpoint of step 5 of 12",
    ]


def test_the_outcome() -> None:
    shown, text = plain()
    shown.finished(summarise(RESULT, total_steps=12, seed=3, model=Path("runs/quickstart/hf"), startup_s=20.0))
    assert [line.rstrip() for line in text.getvalue().splitlines()] == [
        "",
        "step 12 of 12, seed 3",
        " held-out, avg@8           before    after",
        "───────────────────────────────────────────",
        " accuracy                   36.0%    90.5%",
        " accuracy, non-truncated    50.0%        -",
        " truncated                  20.0%   100.0%",
        " mean length, tokens         88.1      160",
        "",
        "time",
        " verb       seconds    share",
        "─────────────────────────────",
        " roll out     150.0    75.0%",
        " hand off      49.9    24.9%",
        " 2 more         0.1     0.1%",
        "",
        " all          200.0   100.0%",
        "",
        "other:  7.5% of the time (neither decoding nor forward, backward, optimizer)",
        "model:  runs/quickstart/hf",
    ]


def test_an_unfinished_run_without_evaluation_has_an_outcome_too() -> None:
    shown, text = plain()
    shown.finished(summarise(STOPPED, total_steps=12, seed=3, model=None, startup_s=None))
    assert "step 0 of 12, seed 3, stopped: the same command resumes it" in text.getvalue()
    assert "model:  not exported" in text.getvalue()


@pytest.mark.parametrize("result", [RESULT, STOPPED])
def test_the_summary_is_as_its_schema_says(result: LoopResult) -> None:
    summary = summarise(result, total_steps=12, seed=3, model=None, startup_s=1.5)
    assert list(summary) == [field.name for field in SUMMARY]
    assert summary["other_share"] == (0.075 if result.wall_s else None)


def test_plain_mode_writes_no_escape_codes() -> None:
    """Through a real pipe, by open_console, even when the environment asks for colour."""
    code = (
        "from or1_megatron.report.console.run_console import *\nc, live = open_console('auto'); assert not live\n"
        "shown = RunConsole(c, live, total_steps=1, stage_names=['a'], entropy_target=None)\n"
        "shown.say('x' * 200)\nshown.verb_started(0, 'roll_out'); shown.log(1, {'reward/mean': 1.0}); shown.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_colourful())
    assert "\x1b" not in done.stdout
    assert [len(line) for line in done.stdout.splitlines()] == [200, 127, 127]
    assert done.stderr == ""


def _colourful() -> dict[str, str]:
    return os.environ | {"COLORTERM": "truecolor", "TERM": "xterm-256color", "COLUMNS": "40"}


PATIENCE_S = 120.0
"""How long anything may take on a busy machine."""


def test_the_live_bar_counts_responses_and_goes_away() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    before = set(threading.enumerate())
    shown = RunConsole(console, True, total_steps=3, stage_names=["a"], entropy_target=0.2, progress=lambda: (17, 512))
    shown.verb_started(1, "take_problems")
    shown.verb_started(1, "roll_out")
    give_up_s = time.monotonic() + PATIENCE_S
    while "17/512" not in text.getvalue():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    shown.log(2, STEP | {"stage/index": 0})
    shown.close()
    shown.close()
    for thread in set(threading.enumerate()) - before:  # rich does not wait for its own thread
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.getvalue())
    assert "step 2/3  roll out" in words and " 0.412 " in words


def test_a_progress_that_fails_does_not_disturb_the_run() -> None:
    asked = threading.Event()

    def gone() -> tuple[int, int]:
        asked.set()
        raise ConnectionError("the manager has died")

    text = io.StringIO()
    console = Console(file=text, force_terminal=True)
    shown = RunConsole(console, True, total_steps=3, stage_names=["a"], entropy_target=None, progress=gone)
    shown.verb_started(0, "roll_out")
    assert asked.wait(PATIENCE_S)
    shown.verb_started(0, "verify")
    shown.close()
    assert "died" not in text.getvalue()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0"),
        (0.005, "0.00500"),
        (0.41237, "0.412"),
        (9.996, "10.00"),
        (88.14, "88.1"),
        (1240.4, "1240"),
        (-3.14159, "-3.14"),
        (0.00001, "1e-05"),
        (float("nan"), "nan"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert number(value) == text


def test_other_formats() -> None:
    assert [quantity(v) for v in (None, 0.0, 512.0, 5123.0, 64_200_000.0)] == ["-", "0", "512", "5.1k", "64.2M"]
    assert [fraction(v) for v in (None, 0.0, 0.3125, 1.0)] == ["-", "0.0%", "31.2%", "100.0%"]
    assert [duration(v) for v in (None, 4.207, 38.24, 725.0, 11220.0)] == ["-", "4.21s", "38.2s", "12m05s", "3h07m"]
