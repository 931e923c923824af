"""The page of ``or1 report`` at size: how large, how long to make, and when a browser first shows something.

    python benchmarks/report.py

A run of its own making: responses of log-normal length, as many as asked for, with all that a run records of a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from chromium import Chromium, find_chromium
from result import ROOT, figure, write_result

from or1_megatron.report.page.run_page import TEXTS, write_report
from or1_megatron.runtime.rollout_store import RolloutStore
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.types import (
    AdvantagedGroup,
    Completion,
    Group,
    Message,
    Problem,
    Prompt,
    TokenScores,
    Verdict,
    VersionSpan,
)

TOKENIZER = ROOT / "examples" / "quickstart" / "base_model"
GROUP = 16
CAP_TOKENS = 32_768
METRICS = 90


def make_run(root: Path, responses: int, steps: int, mean_tokens: int) -> None:
    """``steps`` steps in two stages, as many responses in each; every second one right, long ones cut off."""
    folder = RunFolder(root)
    folder.create()
    folder.write_config(f"model: {{hf: {TOKENIZER}}}\nstages: [{{name: short}}, {{name: long}}]\n")
    store = RolloutStore(folder.rollouts, 1 << 40)
    rng = np.random.default_rng(1)
    for step in range(1, steps + 1):
        groups = [_group(f"{i % 97:016x}", rng, mean_tokens) for i in range(responses // steps // GROUP)]
        kept = [AdvantagedGroup(each, 1 - 2 * (np.arange(GROUP) % 2).astype(np.float32)) for each in groups]
        completions = [completion for each in groups for completion in each.completions]
        scores = TokenScores(
            tuple(c.log_probs + rng.normal(0, 0.01, c.log_probs.size).astype(np.float32) for c in completions),
            tuple(rng.exponential(0.3, c.log_probs.size).astype(np.float32) for c in completions),
        )
        store.write(step, "short" if step <= steps // 2 else "long", groups, kept, scores)
    store.close()
    with folder.metrics.open("w") as file:
        for step in range(1, 1001):  # of a long run, of which only the newest rollouts are kept
            row: dict[str, Any] = {"step": step, "stage/index": int(step > 500)}
            row |= {f"group{i % 9}/metric{i}": float(value) for i, value in enumerate(rng.random(METRICS))}
            row |= {"accuracy/all": step / 1000, "time/roll_out": 600.0, "time/update": 200.0}
            file.write(json.dumps(row) + "\n")


def _group(name: str, rng: np.random.Generator, mean_tokens: int) -> Group:
    problem = Problem(name, f"source-{int(name, 16) % 5}", "math", (Message("user", "Compute 1+1."),), '["2"]', {}, "x")
    completions, verdicts = [], []
    for i in range(GROUP):
        wanted = int(rng.lognormal(np.log(mean_tokens) - 0.32, 0.8))  # sigma^2 / 2 below the mean's logarithm
        size = min(max(wanted, 1), CAP_TOKENS)
        ids = rng.integers(4, 90, size, dtype=np.int32)
        log_probs = -rng.exponential(0.4, size).astype(np.float32)
        ended, span = wanted <= CAP_TOKENS, (VersionSpan(0, 0),)
        reason = "stop" if ended else "length"
        text = "so it goes, " * (size // 3)  # the page shows the tokens' own
        completions.append(Completion(name, i, ids, log_probs, text, reason, span, 0, i, 0.0, size / 50))  # type: ignore[arg-type]
        verdicts.append(
            Verdict(float(ended and i % 2 == 0), "right" if ended and i % 2 == 0 else "wrong", "2", "", 0.1)
        )
    return Group(Prompt(problem, np.arange(20, dtype=np.int32)), tuple(completions), tuple(verdicts))


def look(page: Path, times: int) -> dict[str, float]:
    """Medians, seconds from the navigation's start: first paint, all drawn, a filter's answer, a row's tokens shown."""
    executable = find_chromium()
    if executable is None:
        raise SystemExit("no Chromium: `make browser` installs one")
    found: dict[str, list[float]] = {}
    for _ in range(times):
        with Chromium(executable, 1400, 900, deadline_s=300) as browser:  # a fresh one: nothing is cached
            browser.open(page)
            browser.wait_for("performance.getEntriesByType('paint').length && document.documentElement.dataset.ready")
            paints = browser.evaluate(
                "Object.fromEntries(performance.getEntriesByType('paint').map(e => [e.name, e.startTime / 1000]))"
            )
            seen = {"first contentful paint": paints["first-contentful-paint"]}
            seen["curves drawn"] = browser.evaluate("performance.getEntriesByName('curves')[0].startTime / 1000")
            browser.evaluate("document.getElementById('tab-rollouts').click()")
            browser.wait_for("document.querySelector('.row')")
            seen["a filter over all rows"] = browser.evaluate(
                "(() => { const start = performance.now(); document.getElementById('full').click(); "
                "document.querySelector('.scroller').clientHeight; return (performance.now() - start) / 1000; })()"
            )
            browser.evaluate("document.querySelectorAll('.head button')[6].click()")  # by tokens, the longest first
            started_s = time.perf_counter()
            browser.evaluate("document.querySelector('.row').click()")
            browser.wait_for("document.querySelectorAll('.tokens b').length")
            seen["the longest text shown"] = time.perf_counter() - started_s
            if browser.complaints or any(not url.startswith("file:") for url in browser.requests):
                raise SystemExit(f"the page complained or asked for something: {browser.complaints} {browser.requests}")
        for name, value in seen.items():
            found.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--responses", type=int, default=12_288)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--mean-tokens", type=int, default=2000)
    parser.add_argument("--times", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run, page = Path(scratch) / "run", Path(scratch) / "report.html"
        make_run(run, arguments.responses, arguments.steps, arguments.mean_tokens)
        recorded = sum(path.stat().st_size for path in (run / "rollouts").iterdir())
        started_s = time.perf_counter()
        written = write_report([run], page)
        built_s = time.perf_counter() - started_s
        seen = look(page, arguments.times)
    first = seen.pop("first contentful paint")
    figures = {
        "first contentful paint": figure(first, "s", at_most=3.0),
        "page": figure(written.size_bytes / 1e6, "MB", at_most=50.0),
        "rollouts listed": figure(written.rows, at_least=10_000),
        "texts": figure(written.texts, at_least=TEXTS),
        **{name: figure(value, "s") for name, value in seen.items()},
        "making the page": figure(built_s, "s"),
        "rollout files": figure(recorded / 1e6, "MB"),
    }
    write_result(
        "report",
        figures,
        {"responses": arguments.responses, "mean tokens": arguments.mean_tokens, "window": "1400 x 900"},
    )
    for name, found in figures.items():
        print(f"{name}: {found['value']:.4g} {found['unit']}")


if __name__ == "__main__":
    main()
