"""``or1 rollouts`` on small real run folders."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from report_runs import NASTY, write_run
from rich.console import Console

from or1_megatron.report.console.rollouts import show_rollouts
from or1_megatron.runtime.run_folder import RunFolder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose steps 1 and 3 are no longer kept."""
    root = write_run(tmp_path / "run")
    for step in (1, 3):
        (root / "rollouts" / f"step_{step:06d}.parquet").unlink()
    return root


def shown(run: Path, step: int | None = None, limit: int = 10, status: str | None = None) -> str:
    text = io.StringIO()
    show_rollouts(run, step=step, limit=limit, status=status, console=Console(file=text, width=200))
    return text.getvalue()


def test_responses_with_their_verdicts(run: Path) -> None:
    """The newest step by default. Markup and terminal control in a response are shown, not obeyed."""
    nasty = "</script><script>window.broken = 1</script> <b>&amp;</b> \\u202e\\x1b[2J 数学 👩\\u200d🔬"
    lines = shown(run, limit=3, status="right").splitlines()
    tokens = len(f"x=0 {NASTY}".encode()) + 1
    assert lines[:10] == [
        "step 4: 6 responses with status right, 3 shown",
        "",
        "sums  problem p1  sample 0",
        f"right  reward 1  advantage +1.000  {tokens} tokens, finish stop  weights version 3, 4 from token 2",
        'answer 7  expected ["7"]',
        "prompt",
        f"    What is p1? {nasty}",
        "response",
        f"    x=0 {nasty}",
        "",
    ]
    assert "words  problem p2  sample 2" in lines  # every second of the six
    truncated = shown(run, step=2, status="truncated")
    assert truncated.count("truncated  reward 0  advantage +0.000 (group rejected)") == 4


def test_few_are_spread_over_the_prompts(run: Path) -> None:
    text = shown(run, limit=3)
    assert "step 4: 12 responses, 3 shown" in text
    assert all(text.count(f"problem p{number}") == 1 for number in range(3))
    assert "step 4: 0 responses with status timeout, 0 shown" in shown(run, status="timeout")


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no rollouts of step 3; the nearest is step 2 \(kept: 2 steps"):
        shown(run, step=3)
    with pytest.raises(FileNotFoundError, match="the nearest is step 4"):
        shown(run, step=100)
    with pytest.raises(FileNotFoundError, match="no run folder"):
        shown(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    with pytest.raises(FileNotFoundError, match="is not a run folder: it has neither config"):
        shown(tmp_path / "other")
    RunFolder(tmp_path / "fresh").create()
    with pytest.raises(FileNotFoundError, match="holds no rollouts yet"):
        shown(tmp_path / "fresh")
    with pytest.raises(ValueError, match="status 'rihgt' is not known; expected one of right, wrong"):
        shown(run, status="rihgt")
