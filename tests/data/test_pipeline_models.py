"""Difficulty and judges: a vLLM engine on the quickstart's base model, and an OpenAI-compatible server that answers,
fails and babbles at will. That votes of a 70B judge are worth anything is not shown.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import RUN_ID, rollout_config
from openai_server import Reply, completion, serving

from or1_megatron.commands.open_model import open_sampler
from or1_megatron.data.pipeline.build import build, kept, ledger
from or1_megatron.data.pipeline.judges import NO_VOTE, Judges, read_vote
from or1_megatron.data.pipeline.recipe import DifficultyConfig, JudgesConfig, Recipe, SampledModel
from or1_megatron.data.pipeline.records import Candidate, write_shard
from or1_megatron.data.problems import filter_by_difficulty, load_problems
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.rollout.engine_sampler import EngineSampler
from or1_megatron.types import Sampling
from or1_verify.math.verifier import MathVerifier
from or1_verify.problems.rows import DataError
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Problem, Verdict

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"
BASE = QUICKSTART / "base_model"


def problems(count: int, seed: int = 1) -> list[dict[str, Any]]:
    sys.path.insert(0, str(QUICKSTART))
    try:
        import random

        import task
    finally:
        sys.path.remove(str(QUICKSTART))
    rng, rows = random.Random(seed), {}
    while len(rows) < count:
        expression = task.make_expression(rng, 2)
        if expression is not None:
            rows[f"Compute {expression.render()}."] = str(expression.value)
    return [{"prompt": text, "answer": answer} for text, answer in rows.items()]


def recipe(folder: Path, rows: list[dict[str, Any]], **sections: Any) -> Recipe:
    path = folder / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Recipe.model_validate({"out": folder / "out", "sources": [{"path": path}], "answers": None, **sections})


def say(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def base_engine(ray_cluster: None) -> Iterator[Any]:
    """One engine on the quickstart's base model, which solves a part of its sums."""
    from or1_megatron.rollout.engine_pool import EnginePool

    pool = EnginePool(rollout_config(engines=1), BASE, "float32", 128, f"{RUN_ID}-data", on_cpu=True)
    pool.wait_ready()
    yield pool.handles
    pool.close()


def test_difficulty_of_a_real_model_is_measured_once_per_problem(base_engine: Any, tmp_path: Path) -> None:
    """What the build says of each problem against the statuses that the engine's answers got; new problems alone are
    sampled in a second build; one that does not fit is named."""
    template = ChatTemplate(load_tokenizer(BASE))
    engines = rollout_config(engines=1)
    opened = []

    def open_engine(model: SampledModel, sampling: Sampling, longest: int) -> AbstractContextManager[EngineSampler]:
        opened.append(model.name)
        return nullcontext(EngineSampler(base_engine, engines, template, sampling, longest))

    config = DifficultyConfig(
        models=(SampledModel(name="base", hf=BASE, dtype="float32"),),
        samples_math=6, max_prompt_tokens=40, max_response_tokens=72,
    )  # fmt: skip
    rows = problems(24)
    long = {"prompt": f"Compute {'1+' * 40}1.", "answer": "41"}
    made = recipe(tmp_path, [*rows[:16], long], difficulty=config)
    build(made, open_engine, say)
    (store,) = (made.out / "results" / "difficulty").glob("base-*.jsonl")
    right: Counter[str] = Counter()
    answers = store.read_text().splitlines()
    assert len(answers) == 17 * 6
    for line in map(json.loads, answers):
        right[line["problem"][:16]] += line["result"] == "right"
    excluded = [entry for step, entry in ledger(made.out) if step == "difficulty"]
    for row in kept(made.out):
        assert 0 < right[row.id] < 6
        assert row.difficulty == {"base": round((6 - right[row.id]) * 16 / 6)}
    for entry in excluded:
        count = right[entry.candidate.id]
        if "1+1+1" in entry.candidate.statement:
            assert entry.reason == "prompt_too_long"
        else:
            assert count == {"always_solved": 6, "never_solved": 0}[entry.reason]
            assert entry.evidence == {"base": f"{count} of 6 right"}
    assert len(excluded) < 17  # some are in between: the base model is neither perfect nor hopeless
    loaded = load_problems(made.out / "dataset")
    assert len(filter_by_difficulty(loaded, "base", UnusableRows())) == len(loaded) == 17 - len(excluded)
    build(recipe(tmp_path, [*rows, long], difficulty=config), open_engine, say)
    assert opened == ["base", "base"] and len(store.read_text().splitlines()) == 17 * 6 + 8 * 6


def judging(url: str, *names: str, **more: Any) -> JudgesConfig:
    models = tuple(SampledModel(name=name, endpoint=url, concurrent=4, tries=1) for name in names)
    return JudgesConfig(models=models, **{"votes": 4, "keep_at_least": 5, **more})


def vote(kinds: str) -> str:
    names = ("clear", "complete", "formatted", "focused")
    lines = (f"{name}: {'yes' if kind == 'y' else 'no'}" for name, kind in zip(names, kinds, strict=True))
    return "Let me see.</think>\n" + "\n".join(lines)


STATEMENTS = {
    "good": "What is the sum of the first forty odd numbers?",
    "vague": "What is the value of the number, more or less, as said above?",
    "split": "How many zeros does one hundred factorial have at its end?",
    "silly": "Which whole number is one more than forty-one, dear reader?",
}
ROWS = [{"prompt": text, "answer": "1"} for text in STATEMENTS.values()]


def test_code_is_not_judged(tmp_path: Path) -> None:
    """As in the paper: no judge is asked about code, and the problem passes; about math its judge is opened."""
    code = Candidate("code", "Sort a list.", "{}", id="c", origin="set.jsonl:1")
    shard = tmp_path / "part-00000.parquet"
    write_shard(shard, [code])

    def opened(*_: Any) -> Any:
        raise LookupError("opened")

    step = Judges(judging("http://127.0.0.1:9/v1", "a", keep_at_least=1), tmp_path / "votes", opened)
    step.prepare([shard])
    assert step.apply([code], 0) == [code]
    write_shard(shard, [replace(code, ability="math")])
    with pytest.raises(LookupError, match="opened"):
        step.prepare([shard])


def test_votes_of_several_judges_decide(tmp_path: Path) -> None:
    """Two judges, 4 votes each, 5 of 8 needed. By hand: good 8; split 4 (one judge is always against); vague 0 and
    never complete; of silly two votes of each judge cannot be read, so that there are too few."""
    calls: Counter[tuple[str, str, int]] = Counter()

    def answer(body: dict[str, Any]) -> Reply:
        text = body["messages"][0]["content"]
        (name,) = (name for name, statement in STATEMENTS.items() if statement in text)
        calls[name, body["model"], body["seed"]] += 1
        tried = sum(count for (n, model, _), count in calls.items() if (n, model) == (name, body["model"]))
        if name == "silly" and tried <= 2:
            return completion("Beautiful! I vote yes.")
        return completion(
            vote({"vague": "ynyy", "split": "yyyy" if body["model"] == "a" else "yyyn"}.get(name, "yyyy"))
        )

    with serving(answer) as url:
        made = recipe(tmp_path, ROWS, judges=judging(url, "a", "b"))
        build(made, open_sampler, say)
    stays = {row.statement: row.notes["votes"] for row in kept(made.out)}
    assert stays == {STATEMENTS["good"]: {"for": 8, "readable": 8, "of": 8}}
    gone = {entry.candidate.statement: (entry.reason, entry.evidence) for _, entry in ledger(made.out)}
    reason, evidence = gone[STATEMENTS["silly"]]
    assert (reason, evidence["for"], evidence["readable"]) == ("too_few_votes", 4, 4)
    reason, evidence = gone[STATEMENTS["split"]]
    assert (reason, evidence["for"], evidence["for_by_model"]) == ("voted_out", 4, {"a": 4, "b": 0})
    reason, evidence = gone[STATEMENTS["vague"]]
    assert (reason, evidence["for"], evidence["against"]["complete"]) == ("voted_out", 0, 8)
    assert sum(calls.values()) == 4 * 8
    assert max(calls.values()) == 1  # another seed each time


def test_a_failing_endpoint_is_named_and_votes_that_came_are_kept(tmp_path: Path) -> None:
    asked = 0

    def answer(body: dict[str, Any]) -> Reply:
        nonlocal asked
        asked += 1
        return (
            (500, b"out of memory")
            if broken and "forty odd" in body["messages"][0]["content"]
            else completion(vote("yyyy"))
        )

    with serving(answer) as url:
        made = recipe(tmp_path, ROWS, judges=judging(url, "a", keep_at_least=4))
        broken = True
        with pytest.raises(DataError, match=r"step 'judges': 4 of 16 requests to 'a' were not answered \(first: .*500.*"
                           r"out of memory.*\); the answers that came are kept"):  # fmt: skip
            build(made, open_sampler, say)
        broken, asked = False, 0
        build(made, open_sampler, say)
    assert asked == 4
    assert len(list(kept(made.out))) == 4


def test_a_model_that_only_babbles_is_no_judge(tmp_path: Path) -> None:
    """Every vote is unreadable, which stops the build, again and again, and asks no more."""
    asked = 0

    def answer(body: dict[str, Any]) -> Reply:
        nonlocal asked
        asked += 1
        return completion("Beautiful! I vote yes.")

    with serving(answer) as url:
        made = recipe(tmp_path, ROWS, judges=judging(url, "a", keep_at_least=1))
        for _ in range(2):
            with pytest.raises(DataError, match=r"16 of 16 answers of 'a' hold no vote"):
                build(made, open_sampler, say)
    assert asked == 16


def test_a_verdict_that_failed_is_no_failure_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 of 8 verdicts fail, as in a sandbox out of processes: the build stops, the other 6 are kept, and only the 2 are
    asked for again. More samples are more questions, and another decision."""
    verify = MathVerifier.verify

    def breaks_on_one(self: MathVerifier, problem: Problem, response: str, truncated: bool) -> Verdict:
        if "forty odd" in problem.messages[-1].content:
            return Verdict(0.0, "error", "", "no process left", 0.0)
        return verify(self, problem, response, truncated)

    asked = 0

    def answer(body: dict[str, Any]) -> Reply:
        nonlocal asked
        asked += 1
        return completion(f"</think>\\boxed{{{asked % 2}}}")

    with serving(answer) as url:
        models = (SampledModel(name="m", endpoint=url, concurrent=1, tries=1),)
        made = recipe(tmp_path, ROWS, difficulty=DifficultyConfig(models=models, samples_math=2))
        with (
            pytest.raises(
                DataError, match=r"step 'difficulty': 2 verdicts on answers of 'm' failed \(first: no process"
            ),
            monkeypatch.context() as broken,
        ):
            broken.setattr(MathVerifier, "verify", breaks_on_one)
            build(made, open_sampler, say)
        assert asked == 8
        build(made, open_sampler, say)
        assert asked == 10
        assert [row.difficulty for row in kept(made.out)] == [{"m": 8}] * 4
        more = DifficultyConfig(models=models, samples_math=3)
        build(recipe(tmp_path, ROWS, difficulty=more), open_sampler, say)
    assert asked == 14
    assert {row.difficulty["m"] for row in kept(made.out)} == {5, 11}  # 1 or 2 failures in 3, in sixteenths


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (vote("yynn"), "yynn"),
        ("**Clear**: Yes\n- complete: no\n* formatted = yes\nfocused: **no**", "ynyn"),
        ("clear: no\n" + vote("yyyy"), "yyyy"),
        ("clear: yes\ncomplete: yes\nformatted: yes\nfocused: yes and no\nfocused: no", "yyyn"),
        ("clear: yes\ncomplete: yes\nformatted: yes", NO_VOTE),
        ("clear: yes\ncomplete: yes\nformatted: yes\nfocused: yes</think> I cannot say.", NO_VOTE),
        ("yes yes yes yes", NO_VOTE),
        ("", NO_VOTE),
    ],
)
def test_votes_are_read_strictly(answer: str, expected: str) -> None:
    assert read_vote(answer) == expected
