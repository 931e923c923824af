"""``or1 data build`` on the example's sets against the ledger known from how they are made; caching, kills, bad input.

Difficulty and judges are in test_pipeline_models.py, how well near-duplicates are found in test_pipeline_text.py.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from or1_megatron.commands.app import app
from or1_megatron.commands.open_model import open_sampler
from or1_megatron.config.load import load_as
from or1_megatron.data.pipeline.build import kept, ledger, steps_of
from or1_megatron.data.pipeline.recipe import Recipe
from or1_megatron.data.problems import load_problems

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "data"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def make_sets() -> Iterator[Any]:
    sys.path.insert(0, str(EXAMPLE))
    import make_sets

    yield make_sets
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory, make_sets: Any) -> Path:
    folder = tmp_path_factory.mktemp("sets")
    for made in make_sets.make_all():
        (folder / made.name).write_text("".join(json.dumps(row) + "\n" for row in made.rows))
    return folder


@pytest.fixture(scope="module")
def built(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example, built once. Who changes it works on a copy."""
    out = tmp_path_factory.mktemp("build")
    result = build(sets, out)
    assert result.exit_code == 0, result.output
    return out


def build(sets: Path, out: Path, *overrides: str) -> Result:
    import os

    os.environ["SETS"] = str(sets)
    try:
        arguments = [part for override in (f"out={out}", *overrides) for part in ("--set", override)]
        return invoke("data", "build", EXAMPLE / "recipe.yaml", *arguments)
    finally:
        del os.environ["SETS"]


def test_the_ledger_is_the_one_known_from_how_the_sets_are_made(built: Path, make_sets: Any) -> None:
    """Step, reason and of what: of every row, those that stay included (nothing else is in the ledger)."""
    left_out = {}
    for step, entry in ledger(built):
        of = {"of": Path(entry.evidence["of_origin"]).name} if "of_origin" in entry.evidence else {}
        origin = Path(entry.candidate.origin).name
        assert origin not in left_out
        left_out[origin] = {"origin": origin, "step": step, "reason": entry.reason, **of}
    committed = [json.loads(line) for line in (EXAMPLE / "expected_ledger.jsonl").read_text().splitlines()]
    assert left_out == {row["origin"]: row for row in committed}
    assert committed == [row for made in make_sets.make_all() for row in made.expected]
    rows = sum(len(made.rows) for made in make_sets.make_all() if made.name != "exam.jsonl")
    assert len(list(kept(built))) + len(left_out) == rows


def test_the_dataset_is_what_training_loads(built: Path, sets: Path) -> None:
    problems = load_problems(built / "dataset")
    assert {problem.ability for problem in problems} == {"math", "code"}
    by_id = {problem.id: problem for problem in problems}
    assert by_id.keys() == {row.id for row in kept(built)}
    assert "train-math-numinamath1.5_olympiads" in {problem.source for problem in problems}
    first = json.loads((sets / "olympiads.jsonl").read_text().splitlines()[0])
    (loaded,) = [problem for problem in problems if problem.messages[0].content == first["problem"]]
    assert json.loads(loaded.ground_truth) == [first["answer"]]
    schema = pq.read_schema(built / "dataset" / "math.parquet")
    assert schema.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def test_why_tells_of_excluded_and_kept_problems(built: Path) -> None:
    entry = next(entry for _, entry in ledger(built) if entry.reason == "near_duplicate")
    shown = invoke("data", "why", entry.candidate.id, "--build", built).output
    for words in ("excluded by step 'near_duplicates': near_duplicate", entry.evidence["of"], "similarity: "):
        assert words in shown
    assert shown == invoke("data", "why", Path(entry.candidate.origin).name, "--build", built).output
    assert "  kept" in invoke("data", "why", entry.evidence["of"], "--build", built).output
    result = invoke("data", "why", "ffffffffff", "--build", built)
    assert result.exit_code == 2 and "no such problem" in result.output
    result = invoke("data", "why", "a", "--build", built)
    assert result.exit_code == 2 and "problems are meant" in result.output


def cached(result: Result) -> list[str]:
    return [line.split(":")[0] for line in result.output.splitlines() if "(cached)" in line]


def test_steps_run_again_only_when_what_goes_into_them_changed(built: Path, sets: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "sets"
    shutil.copytree(built, out)
    shutil.copytree(sets, again)
    every = [step["step"] for step in json.loads((out / "build.json").read_text())["steps"]]
    assert cached(build(sets, out)) == every
    looser = build(sets, out, "decontaminate.overlap=0.6", "code=null", "answers=null")
    within = ["exact_duplicates_within", "near_duplicates_within"]
    assert cached(looser) == ["normalise", *within, "statements"]  # answers is gone, so what reached the others changed
    with (again / "distilled.jsonl").open("a") as file:
        file.write(json.dumps({"question": "What is the sum of all primes below thirty?", "answer": "129"}) + "\n")
    more = build(again, out, "answers=null", "code=null")
    assert cached(more) == [] and "normalise: 269 -> 269" in more.output
    assert cached(build(again, out, "answers=null", "code=null")) == [
        step for step in every if step not in ("answers", "code")
    ]


def test_torn_and_missing_files_are_made_again_and_nothing_else(built: Path, sets: Path, tmp_path: Path) -> None:
    """What a kill leaves: a step without its manifest, a shard that is cut off, a shard that is not there."""
    out = tmp_path / "out"
    shutil.copytree(built, out)
    (step,) = (out / "steps").glob("*-near_duplicates-*")
    before = {path.name: path.read_bytes() for path in step.glob("*.parquet")}
    damages = (
        lambda: (step / "manifest.json").unlink(),
        lambda: (step / "part-00000.parquet").write_bytes(before["part-00000.parquet"][:100]),
        lambda: (step / "part-00000.parquet").unlink(),
    )
    for damage in damages:
        damage()
        result = build(sets, out)
        assert result.exit_code == 0, result.output
        assert "near_duplicates" not in cached(result) and "decontaminate" in cached(result)
        assert {path.name: path.read_bytes() for path in step.glob("*.parquet")} == before


def test_sets_lose_their_own_duplicates_before_answers_are_extracted(tmp_path: Path) -> None:
    """As in the paper. By hand: of the first set's two copies the second goes at once and the first, whose solution
    says otherwise, after it. The second set's copy is compared only then, so it stays."""
    statement = "What is the sum of the first forty odd numbers, all told?"
    right = {"problem": statement, "answer": "1600", "solution": "It is \\boxed{1600}."}
    sets = {"one": [{**right, "answer": "1601"}, right], "two": [right]}
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    sources = [{"path": str(tmp_path / f"{name}.jsonl")} for name in sets]
    recipe.write_text(json.dumps({"out": str(tmp_path / "out"), "sources": sources}))
    assert invoke("data", "build", recipe).exit_code == 0
    left_out = [(step, Path(entry.candidate.origin).name) for step, entry in ledger(tmp_path / "out")]
    assert left_out == [("exact_duplicates_within", "one.jsonl:2"), ("answers", "one.jsonl:1")]
    (stays,) = kept(tmp_path / "out")
    assert (Path(stays.origin).name, stays.set_name) == ("two.jsonl:1", "two")


def test_the_papers_build_has_the_papers_sources_and_steps_in_its_order() -> None:
    """RECIPE section 7. That the hub's sets can be read as they are today is not shown."""
    recipe = load_as(Recipe, EXAMPLE / "paper.yaml")
    assert [source.name for source in recipe.sources] == [
        "numinamath1.5", "deepscaler", "still3", "omni_math", "aime", "leetcode", "taco",
    ]  # fmt: skip
    assert len(recipe.sources[0].select["source"]) == 7
    assert [step.name for step in steps_of(recipe, open_sampler)] == [
        "exact_duplicates_within", "near_duplicates_within", "statements", "answers", "exact_duplicates",
        "near_duplicates", "code", "embedding_duplicates", "decontaminate", "difficulty", "judges",
    ]  # fmt: skip
    judges = recipe.judges
    assert judges is not None and len(judges.models) == 2
    assert (judges.votes, judges.keep_at_least) == (16, 9)
    assert [model.name for model in judges.models] == ["Llama-3.3-70B-Instruct", "Qwen2.5-72B-Instruct"]


BAD = {
    "missing column": ([{"problem": "What is 1 + 1, all told?", "answer": "2"}],
                       {"columns": {"prompt": "problem", "answer": "gold"}},
                       r"bad.jsonl:1: no column 'gold', which columns.answer names"),
    "wrong type": ([{"problem": "What is 1 + 1, all told?", "answer": ["2"]}], {},
                   r"bad.jsonl:1: column 'answer': found ['2'] (list), expected text or a number"),
    "unknown layout": ([{"a": 1}], {}, "bad.jsonl:1: columns ['a'] are of no known layout"),
    "no rows": ([], {}, "bad.jsonl: holds no rows"),
    "select": ([{"problem": "What is 1 + 1, all told?", "answer": "2"}], {"select": {"origin": ["x"]}},
               "no column 'origin', by which 'select' chooses"),
    "all gone": ([{"problem": "Prove that one is not two.", "answer": "1"}], {},
                 "step 'statements' leaves none of 1 problems (excluded: proof 1)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str, tmp_path: Path) -> None:
    rows, more, words = BAD[case]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"out": str(tmp_path / "out"), "sources": [{"path": str(path), **more}]}))
    result = invoke("data", "build", recipe)
    assert result.exit_code == 2
    assert words in result.output and "Traceback" not in result.output
    if case == "all gone":  # the ledger of the step that left nothing is there
        assert (
            "excluded by step 'statements': proof"
            in invoke("data", "why", "bad.jsonl:1", "--build", tmp_path / "out").output
        )


def test_rows_of_the_wrong_shape_are_all_named_or_go_to_the_ledger(tmp_path: Path) -> None:
    """60 of 120 rows have a number for a problem, one line is cut: refused with the first 20 and a file of all; with
    drop the ledger has them, and the other problems go on as in a build of a file without them."""
    rows = [{"problem": 7 if n % 2 else f"What is {n} + {n}, all told?", "answer": str(2 * n)} for n in range(120)]
    lines = [json.dumps(row) for row in rows] + ['{"problem": "cut']
    (tmp_path / "set.jsonl").write_text("\n".join(lines))
    (tmp_path / "clean.jsonl").write_text("\n".join(lines[0:120:2]))
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    sources = [{"path": str(tmp_path / "set.jsonl"), "name": "s"}]
    recipe.write_text(json.dumps({"out": str(out), "sources": sources, "answers": None}))
    refused = invoke("data", "build", recipe)
    assert refused.exit_code == 2
    assert "61 unusable rows (60 column 'problem' has a wrong type, 1 not a JSON object)" in refused.output
    assert f"and 41 more; {out / 'unusable_rows.jsonl'} lists them" in refused.output
    assert len((out / "unusable_rows.jsonl").read_text().splitlines()) == 61

    done = invoke("data", "build", recipe, "--set", "unusable=drop")
    assert done.exit_code == 0, done.output
    assert "normalise: 121 -> 60" in done.output and "unusable_row 61" in done.output
    excluded = {entry.candidate.origin for _, entry in ledger(out) if entry.reason == "unusable_row"}
    assert excluded == {f"{tmp_path}/set.jsonl:{n}" for n in [*range(2, 121, 2), 121]}
    shown = invoke("data", "why", "set.jsonl:4", "--build", out).output
    assert "excluded by step 'normalise': unusable_row" in shown and "column 'problem': found 7 (int)" in shown
    sources[0]["path"] = str(tmp_path / "clean.jsonl")
    recipe.write_text(json.dumps({"out": str(tmp_path / "other"), "sources": sources, "answers": None}))
    assert invoke("data", "build", recipe).exit_code == 0
    assert [row.id for row in kept(out)] == [row.id for row in kept(tmp_path / "other")]


def test_a_recipe_is_refused_as_a_config_is(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sources: [{path: x.jsonl, colunms: {}}]\n")
    result = invoke("data", "build", recipe)
    assert result.exit_code == 2 and "did you mean sources.0.columns?" in result.output
    recipe.write_text("sources: [{path: x.jsonl}]\nduplicates: {embedding: {model: x, backend: transformers}}\n")
    said = invoke("data", "build", recipe).output
    assert "recipe.yaml:2: duplicates.embedding.backend: was removed: take the key out" in said
    recipe.write_text(
        "sources: [{path: x.jsonl}]\njudges: {votes: 1, keep_at_least: 1, models: [{name: j, endpoint: 'host:80'}]}\n"
    )
    assert "endpoint: found 'host:80', expected http://host:port/v1" in invoke("data", "build", recipe).output
    recipe.write_text("sources: [{path: absent.jsonl}]\n")
    result = invoke("data", "build", recipe, "--set", f"out={tmp_path}/out")
    assert result.exit_code == 2 and "absent.jsonl: cannot be read" in result.output
