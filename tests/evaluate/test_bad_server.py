"""``or1 eval`` over HTTP against a server that fails, stalls and answers with garbage, until every sample is there.

Not proven here: TLS, and a server that sends headers a byte at a time.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai_server import Reply, completion, serving
from rich.console import Console
from waiting import PATIENCE_S

from or1_megatron.commands.eval import evaluate_model
from or1_megatron.evaluate.responses import EvaluationError
from or1_megatron.evaluate.settings import EvaluationSettings, EvaluationVerifyConfig

PROBLEMS, SAMPLES = 40, 4
QUIET = Console(quiet=True)


class BadServer:
    """5% of the requests fail, 5% stall, 5% get garbage: some at the first try only, others at the first two."""

    def __init__(self) -> None:
        self.tries: Counter[int] = Counter()
        self.done = threading.Event()
        self.faults: Counter[str] = Counter()

    def answer(self, body: dict[str, Any]) -> Reply:
        seed = body["seed"]
        self.tries[seed] += 1
        kind, bad_tries = seed % 20, 1 + seed // 20 % 2
        if kind > 2 or self.tries[seed] > bad_tries:
            return completion(f"<think>so</think>\\boxed{{{1 if seed % 3 else 0}}}", usage=None)
        self.faults[("failed", "stalled", "garbage")[kind]] += 1
        choices = (self._failed, self._stalled, self._garbage)
        return choices[kind](seed // 40)

    def _failed(self, number: int) -> Reply:
        busy: tuple[Reply, ...] = ((500, b"\xff\xfe"), (429, {"error": "busy"}), (503, self._drips()), (502, b""))
        return busy[number % len(busy)]

    def _stalled(self, number: int) -> Reply:
        if number % 2:
            return 200, self._drips()
        self.done.wait(PATIENCE_S)
        return completion("too late")

    def _garbage(self, number: int) -> Reply:
        bodies: tuple[Any, ...] = (
            b"<html>gateway</html>", b"", b'{"choices"', b"\xff\x00", b"[" * 100_000, b"null", {"choices": [{}]}, [],
            {"choices": [{"message": {"content": [1]}, "finish_reason": "stop"}]},
            {"choices": [{"message": None, "finish_reason": "stop"}]},
        )  # fmt: skip
        return 200, bodies[number % len(bodies)]

    def _drips(self) -> Iterator[bytes]:
        while not self.done.wait(0.05):
            yield b" "


ONE_COMMAND: dict[str, Any] = {"request_timeout_s": 4.0}  # and the default tries, which are more than the bad ones
SEVERAL: dict[str, Any] = {"request_timeout_s": 1.0, "tries": 2}


@pytest.mark.parametrize("how", [ONE_COMMAND, SEVERAL], ids=["one command", "several"])
def test_every_sample_is_accounted_for(tmp_path: Path, how: dict[str, Any]) -> None:
    """160 samples. With the default tries the first command finishes; with two each, those that failed twice are asked
    for again by the same command, the others not. Every sample is there once, with the reward of the answer that the
    server gave to its seed."""
    data = tmp_path / "ones.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(PROBLEMS)))
    server, out = BadServer(), tmp_path / "out"
    settings = EvaluationSettings(
        max_response_tokens=64, concurrent=32, model="solver", verify=EvaluationVerifyConfig(workers=1), **how
    )
    with serving(server.answer) as url:
        commands = 0
        while True:
            commands += 1
            assert commands < 20, "still not finished"
            try:
                results = evaluate_model(url, str(data), SAMPLES, out, settings, QUIET, Path("none"))
                break
            except EvaluationError as error:
                assert "responses did not come" in str(error)
        server.done.set()
    assert commands == 1 if how is ONE_COMMAND else commands >= 2
    assert set(server.faults) == {"failed", "stalled", "garbage"}
    rows = [json.loads(line) for line in (out / "responses.jsonl").read_text().splitlines()]
    assert Counter((row["problem_id"], row["sample"]) for row in rows).most_common(1)[0][1] == 1
    assert len(rows) == PROBLEMS * SAMPLES == sum(results["outcome"]["statuses"].values())
    assert all(row["reward"] == (1.0 if row["seed"] % 3 else 0.0) for row in rows)
    assert results["outcome"]["average"]["value"] == pytest.approx(sum(row["reward"] for row in rows) / len(rows))


def test_answers_that_no_model_gives_are_judged_like_any_other(tmp_path: Path) -> None:
    """Half a character, zero bytes and counts of tokens that cannot be: stored, judged, and in the figures."""
    data = tmp_path / "ones.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "1"}) + "\n" for n in range(5)))
    texts = {
        "0": "</think>\\boxed{\ud800}",
        "1": "</think>\x00\\boxed{1}",
        "2": "",
        "3": "</think>\\boxed{1}" + "\ud800",
    }

    def answer(body: dict[str, Any]) -> Reply:
        number = body["messages"][0]["content"][0]
        status, reply = completion(texts.get(number, "</think>\\boxed{1}"))
        tokens: Any = {"0": -5, "1": True, "2": "many", "3": 1e300}.get(number, 7)
        return status, {**reply, "usage": {"completion_tokens": tokens}}

    verify = EvaluationVerifyConfig(workers=1)
    settings = EvaluationSettings(max_response_tokens=64, model="solver", verify=verify, tries=1)
    with serving(answer) as url:
        out = tmp_path / "out"
        outcome = evaluate_model(url, str(data), 1, out, settings, QUIET, Path("none"))["outcome"]
    assert sum(outcome["statuses"].values()) == 5 and outcome["statuses"]["right"] == 3
    assert outcome["mean_tokens"] == 7.0
