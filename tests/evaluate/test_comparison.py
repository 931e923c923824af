"""``or1 eval --compare``: folders as ``or1 eval`` writes them, made by hand; the intervals are test_intervals'."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.evaluate.comparison import compare
from or1_megatron.evaluate.outcome import summarise
from or1_megatron.evaluate.responses import EvaluationError, Response, ResponseStore


def evaluation(folder: Path, right: dict[str, int], k: int = 4, gold: str = '["1"]', **results: Any) -> Path:
    """Write the folder of an evaluation in which problem p is solved in right[p] of k samples."""
    store = ResponseStore(folder, {"model": folder.name})
    rows = [
        [
            Response(
                p,
                n,
                "sums",
                "math",
                gold,
                f"What is\n|{p}|?",
                "",
                7,
                False,
                0.0,
                "right" if n < count else "wrong",
                "",
                "",
                n,
            )
            for n in range(k)
        ]
        for p, count in right.items()
    ]
    for response in (response for row in rows for response in row):
        store.add(response)
    store.close()
    found = {
        "model": folder.name,
        "data": "sums",
        "temperature": 1.0,
        **results,
        "outcome": asdict(summarise(rows, 64)),
    }
    (folder / "results.json").write_text(json.dumps(found))
    return folder


def compared(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["eval", "--compare", *map(str, arguments)], env={"COLUMNS": "160"})
    return done.exit_code, done.output


def test_differences_and_the_problems_that_changed_sides(tmp_path: Path) -> None:
    """Right of 4: a 0, 3; b 2, 3; c 4, 1; d 3, 4; e 2, 1. avg 11/20, 12/20. Most samples: a and b gained, c lost;
    d and e stay on their sides (2 of 4 is not most)."""
    one = evaluation(tmp_path / "one", {"a": 0, "b": 2, "c": 4, "d": 3, "e": 2})
    two = evaluation(tmp_path / "two", {"e": 1, "d": 4, "c": 1, "b": 3, "a": 3}, temperature=0.6)
    found = compare(one, two)
    assert [it.name for it in found.scores] == ["avg@4", "pass@2", "pass@4"]
    average, pairs, any_of_4 = found.scores
    assert (average.first, average.second, average.difference.value) == pytest.approx((0.55, 0.6, 0.05))
    # pass@2 is 1 - C(wrong, 2) / 6: 0, 5/6, 1, 1, 5/6 and 1, 1, 1/2, 1, 1/2
    assert (pairs.first, pairs.second) == pytest.approx((11 / 15, 4 / 5))
    assert any_of_4.difference.value == pytest.approx(0.2)
    assert [(it.problem["id"], it.first, it.second) for it in found.gained] == [("a", 0, 3), ("b", 2, 3)]
    assert [(it.problem["id"], it.first, it.second) for it in found.lost] == [("c", 4, 1)]
    code, shown = compared(one, two, "--out", tmp_path / "page")
    assert code == 0, shown
    for words in ("55.0%", "+5.0", "2 problems that only the second solves", "temperature 1.0, 0.6", "0/4"):
        assert words in shown, shown
    page = (tmp_path / "page" / "comparison.md").read_text()
    assert "| avg@4 | 55.0% | 60.0% | +5.0 |" in page and "| c | sums | 4/4 | 1/4 | What is \\|c\\|? |" in page
    assert [it.difference.value for it in compare(two, one).scores] == pytest.approx(
        [-it.difference.value for it in found.scores]
    )


def test_more_samples_than_the_results_have_are_left_out(tmp_path: Path) -> None:
    """A larger --k that was killed leaves further responses beside the results of the finished evaluation."""
    one = evaluation(tmp_path / "one", {"a": 1, "b": 4})
    with (one / "responses.jsonl").open("a") as file:
        row = json.loads((one / "responses.jsonl").read_text().splitlines()[0])
        file.write(json.dumps({**row, "sample": 4, "status": "right"}) + "\n")
    assert compare(one, one).scores[0].first == pytest.approx(5 / 8)


def test_what_cannot_be_compared_is_named_all_at_once(tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", {"a": 0, "b": 2, "c": 1})
    other = evaluation(tmp_path / "other", {"b": 2, "c": 1, "d": 1}, k=2, gold='["2"]')
    with pytest.raises(EvaluationError) as caught:
        compare(one, other)
    samples, ours, theirs, golds = str(caught.value).splitlines()
    assert samples.startswith(f"{one} has 4 samples per problem and {other} 2; expected as many")
    assert ours == f"1 problems of {one} are not in {other}: a (What is |a|?)"
    assert theirs == f"1 problems of {other} are not in {one}: d (What is |d|?)"
    assert golds.startswith("2 problems have other ground truths in the two: b (")

    half = evaluation(tmp_path / "half", {"a": 0, "b": 2})
    lines = (half / "responses.jsonl").read_text().splitlines(keepends=True)
    (half / "responses.jsonl").write_text("".join(lines[:5]))
    begun = evaluation(tmp_path / "begun", {"a": 0})
    (begun / "results.json").unlink()
    code, shown = compared(half, begun)
    assert code == 2
    assert f"{half} is not finished: 5 responses to 2 problems, expected 8 to 2" in shown
    assert f"{begun} is not finished: run its command again" in shown
    (begun / "results.json").write_text("{")
    code, shown = compared(begun, tmp_path / "nowhere")
    assert code == 2 and "results.json or responses.jsonl cannot be read (JSONDecodeError" in shown
    assert f"{tmp_path / 'nowhere'} holds no evaluation; expected results.json and responses.jsonl" in shown


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("results.json", text) for text in ("[]", "null", '{"outcome": 5}', "[" * 100_000, "\ufeff{}")),
        ("results.json", '{"outcome": {"samples": 4, "problems": 1}}'),
        *(
            ("results.json", f'{{"model": "m", "outcome": {{"samples": {k}, "problems": {p}}}}}')
            for k, p in (("0", "0"), ("-1", "-1"), ("1e999", "1"), ("NaN", "1"), ('"x"', "1"), ("null", "1"))
        ),
        *(
            ("responses.jsonl", f'{{"problem_id": "a", "source": "s", "ground_truth": "", "prompt": "", {rest}}}\n')
            for rest in ('"sample": "0", "status": "right"', '"sample": 0, "reward": 1', '"x": 1')
        ),
        *(("responses.jsonl", text) for text in ("5\n", "\x00\n", "[" * 100_000 + "\n")),
    ],
)
def test_files_of_nonsense_are_an_error_in_words(file: str, text: str, tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", {"a": 1})
    other = evaluation(tmp_path / "other", {"a": 1})
    (other / file).write_text(text, encoding="utf-8")
    with pytest.raises(EvaluationError, match=f"{other}: results.json or responses.jsonl cannot be read"):
        compare(one, other)


def test_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    one = evaluation(tmp_path / "one", {"a": 0})
    code, shown = compared(one, one, "--k", 4, "--data", "aime24")
    assert code == 2 and "--compare takes no --data, --k" in " ".join(shown.split())
    done = CliRunner().invoke(app, ["eval", "--data", "aime24"], env={"COLUMNS": "160"})
    assert done.exit_code == 2 and "expected --model, --out (or --compare A B)" in " ".join(done.output.split())
