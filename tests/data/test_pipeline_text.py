"""The arithmetic under the duplicate steps, against sets, brute force and numbers worked by hand. That 5-character
shingles at 0.5 are a good idea is measured on a labelled set of our own, not on real data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from or1_megatron.data.pipeline.contamination import Decontamination
from or1_megatron.data.pipeline.duplicates import ExactDuplicates, NearDuplicates
from or1_megatron.data.pipeline.embedding import EmbeddingDuplicates, embed, first_alike
from or1_megatron.data.pipeline.recipe import BuildSource, DecontaminationConfig, DuplicatesConfig, EmbeddingConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, read_candidates, read_outcomes, write_shard
from or1_megatron.data.pipeline.text import band_keys, comparable, decisive, jaccard, plain, shingles, signatures
from or1_verify.problems.rows import DataError

BASE = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "base_model"


def pairs(count: int) -> list[tuple[str, str]]:
    """Texts of 30 to 300 characters, the second with a share of the first's words changed."""
    rng = random.Random(4)
    made = []
    for _ in range(count):
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 8))) for _ in range(rng.randint(8, 50))]
        share = rng.random() * 0.5
        other = ["".join(rng.choices("mnopqr", k=5)) if rng.random() < share else word for word in words]
        made.append((" ".join(words), " ".join(other)))
    return made


def runs(text: str) -> set[str]:
    return {text[n : n + 5] for n in range(len(text) - 4)}


def test_jaccard_is_that_of_the_sets_of_runs() -> None:
    for one, other in pairs(50):
        expected = len(runs(one) & runs(other)) / len(runs(one) | runs(other))
        assert jaccard(shingles(one, 5), shingles(other, 5)) == pytest.approx(expected, abs=1e-12)
    assert jaccard(shingles("ab", 5), shingles("ab", 5)) == 1.0  # shorter than a shingle


def test_signatures_agree_in_the_jaccard_share_of_their_columns() -> None:
    """Mean error near 0 over 400 pairs, as of fair draws: their deviation is at most (0.25 / 96)^0.5 = 0.051."""
    texts = pairs(400)
    signed = signatures([text for pair in texts for text in pair], 5, 96)
    errors = [
        (signed[2 * n] == signed[2 * n + 1]).mean() - jaccard(shingles(one, 5), shingles(other, 5))
        for n, (one, other) in enumerate(texts)
    ]
    assert abs(np.mean(errors)) < 0.015
    assert np.std(errors) < 0.07
    for n in (0, 7):  # a text's signature does not depend on what it is computed with
        assert (signatures([texts[n][0]], 5, 96)[0] == signed[2 * n]).all()


def test_rows_of_other_guards_share_no_band() -> None:
    signed = signatures(["the very same text"] * 3, 5, 96)
    keys = band_keys(signed, 32, np.array([1, 1, 2], dtype=np.uint64))
    assert (keys[0] == keys[1]).all() and not np.isin(keys[2], keys[0]).any()
    assert len(set(keys[0].tolist())) == 32


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ("**Problem 12.** Let $x=3$. Find $\\dfrac{1}{x}$.", "Let $ x=3 $. Find \\(\\frac{1}{x}\\)", plain),
        ("Find the roots.", "Determine the roots.  Express your answer in simplest form.", comparable),
        ("There are three cats.", "There are 3 cats", comparable),
        ("5 red and 3 blue", "3 red and 5 blue", None),
        ("Find the largest", "Find the smallest", None),
        ("It is 3.5 long", "It is 35 long", None),
    ],
)
def test_what_formatting_and_commands_do_not_change(one: str, other: str, equal: object) -> None:
    if equal is not None:
        assert equal(one) == equal(other)  # type: ignore[operator]
    if equal is not comparable:
        assert (decisive(plain(one)) == decisive(plain(other))) is (equal is plain)


def test_what_a_step_decided_is_the_same_after_a_shard(tmp_path: Path) -> None:
    """With an opening, as LiveCodeBench's prompt has, and without; the excluded one does not go on."""
    rows = [
        Candidate(
            "code", "Do it.", "{}", "s", " Now.", ("x",), {"M": 3}, {"a": [1]}, "You will: ", id="1", origin="f:1"
        ),
        Candidate("math", "Count.", '["1"]', id="2", origin="f:2"),
    ]
    outcomes, shard = [rows[0], Exclusion(rows[1], "short", {"chars": 6}), rows[1]], tmp_path / "shard.parquet"
    write_shard(shard, outcomes)
    assert list(read_outcomes([shard])) == outcomes
    assert list(read_candidates([shard])) == rows
    assert [row.messages[0].content for row in rows] == ["You will: Do it. Now.", "Count."]


def candidate(number: int, statement: str, ability: str = "math") -> Candidate:
    return Candidate(ability, statement, '["1"]', id=str(number), origin=f"f:{number}")


SOLD = (
    "A farmer named Marta sells 12 baskets of apples for 3 dollars each and 7 jars of honey for 5 dollars each at the "
    "market. What is the total amount of money that she earns?"
)
VARIANTS = {
    "capitals": (SOLD.upper(), "exact_duplicate"),
    "numbering and markup": ("**Problem 4.** " + SOLD.replace("12", "$ 12 $"), "exact_duplicate"),
    "boilerplate": (SOLD + " Express your answer as a whole number and show all work.", "near_duplicate"),
    "another command": (SOLD.replace("What is the total", "Find the total"), "near_duplicate"),
    "another name": (SOLD.replace("Marta", "Julia"), "near_duplicate"),
    "synonyms": (SOLD.replace("money", "cash").replace("farmer", "grower"), "near_duplicate"),
    "a typing error": (SOLD.replace("baskets", "baskts"), "near_duplicate"),
    "a number as a word": (SOLD.replace("12", "twelve"), "near_duplicate"),
    "another number": (SOLD.replace("12", "13"), None),
    "numbers exchanged": (SOLD.replace("12", "x").replace("7", "12").replace("x", "7"), None),
    "a word that turns the meaning": (SOLD.replace("total", "smallest"), None),
    "the same in other words": ("A farmer sells 12 baskets at 3 dollars and 7 jars at 5 dollars. For how much?", None),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_what_counts_as_the_same_problem(case: str, tmp_path: Path) -> None:
    """How often this is right on 606 labelled variants: docs/building_data.md."""
    text, expected = VARIANTS[case]
    rows, shard, reason = [candidate(0, SOLD), candidate(1, text)], tmp_path / "part-00000.parquet", None
    write_shard(shard, rows)
    for step in (ExactDuplicates(), NearDuplicates(DuplicatesConfig())):
        step.prepare([shard])
        first, second = step.apply(rows, 0)
        assert first == rows[0]
        if reason is None and isinstance(second, Exclusion):
            assert second.evidence["of"] == "0"
            reason = second.reason
    assert reason == expected


def test_overlap_is_the_share_of_the_shorter_text_s_ngrams(tmp_path: Path) -> None:
    """By hand, with 3-grams: w0..w9 has 8. w0..w5 and 4 others share 4 of 8; w0..w3 alone shares 2 of its 2."""
    path = tmp_path / "exam.jsonl"
    words = [f"word{chr(97 + n)}" for n in range(10)]
    others = [f"other{chr(97 + n)}" for n in range(10)]
    path.write_text(json.dumps({"problem": " ".join(words), "answer": "1"}) + "\n")
    config = DecontaminationConfig(against=(BuildSource(path=path),), ngram_words=3, overlap=0.5)
    texts = (
        " ".join(words), " ".join(words[:6] + others[:4]), " ".join(words[:5] + others[:5]), " ".join(words[:4]),
        " ".join(others[:9] + words + others[:9]), " ".join(words[::-1]),
    )  # fmt: skip
    step = Decontamination(config, tmp_path / "unusable.jsonl")
    step.prepare([])
    outcomes = step.apply([candidate(n, text) for n, text in enumerate(texts)], 0)
    shares = [outcome.evidence.get("overlap", 1.0) if isinstance(outcome, Exclusion) else None for outcome in outcomes]
    assert shares == [1.0, 0.5, None, 1.0, 1.0, None]


def test_unusable_rows_of_an_evaluation_set_are_listed(tmp_path: Path) -> None:
    path, listed = tmp_path / "exam.jsonl", tmp_path / "unusable.jsonl"
    path.write_text((json.dumps({"problem": 7, "answer": "1"}) + "\n") * 25)
    step = Decontamination(DecontaminationConfig(against=(BuildSource(path=path),)), listed)
    with pytest.raises(DataError, match=r"and 5 more; .*unusable\.jsonl lists them"):
        step.prepare([])
    assert len(listed.read_text().splitlines()) == 25


def test_first_alike_is_that_of_all_pairs() -> None:
    vectors = np.random.default_rng(1).normal(size=(60, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    stays: list[int] = []
    expected = {}
    for row in range(60):
        cosines = [float(vectors[row] @ vectors[other]) for other in stays]
        if cosines and max(cosines) >= 0.8:
            expected[row] = stays[int(np.argmax(cosines))]
        else:
            stays.append(row)
    alike = first_alike(vectors.astype(np.float32), 0.8)
    assert {row: original for row, (original, _) in alike.items()} == expected


def test_embeddings_of_a_local_model_find_the_same_program(tmp_path: Path) -> None:
    """The step looks at the chosen ability only: the math rows pass, though they are equal."""
    texts = ["Compute 1+2.", "Compute 7*(3+4)-20.", "Compute 1+2."]
    rows = [candidate(n, text, "code") for n, text in enumerate(texts)]
    rows += [candidate(3, "Compute 1+2."), candidate(4, "Compute 1+2.")]
    path = tmp_path / "part-00000.parquet"
    write_shard(path, rows)
    step = EmbeddingDuplicates(EmbeddingConfig(model=BASE, threshold=0.999))
    step.prepare([path])
    excluded = {
        outcome.candidate.id: outcome.evidence["of"]
        for outcome in step.apply(rows, 0)
        if isinstance(outcome, Exclusion)
    }
    assert excluded == {"2": "0"}


def test_an_embedding_model_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"duplicates\.embedding\.model: .*nowhere: no such folder"):
        embed(tmp_path / "nowhere", ["x"])
    with pytest.raises(DataError, match=r"duplicates\.embedding\.model: .*empty cannot be loaded"):
        embed(tmp_path / "empty", ["x"])
