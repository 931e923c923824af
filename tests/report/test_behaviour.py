"""What ``or1 report`` measures of responses: numbers worked out by hand, and token by token in plain Python.

Not proven here: that a word or a script means what its name says in every language.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean

import pandas as pd
import pytest
from report_runs import group, tokenizer_of_bytes

from or1_megatron.report.page.behaviour import measure
from or1_megatron.report.page.responses import TokenTexts
from or1_megatron.report.page.selection import pairs
from or1_megatron.runtime.rollout_store import HELD_OUT, RolloutStore

TEXTS = {
    "Wait, 12 = 12. \\boxed{3}, no: \\boxed{4}": "right",
    "\\boxed{3} is 3, so \\boxed{3}": "right",
    "ab" * 12: "truncated",
    "привет 数学, 等等": "wrong",  # 6 letters of Cyrillic, and 4 of CJK that count as 12
    "verify it: " + "".join(map(chr, range(0x4E00, 0x4E00 + 40))): "wrong",  # 8 letters and 120
    "7 + 5": "wrong",
}
KINDS = {"digit": "0123456789", "operator": "+=", "space": " ", "CJK": "数", "word": "abcdefghijklmnopqrstuvwxyzW"}


def test_means_of_a_step(tmp_path: Path) -> None:
    """A token is a byte here, and a part of a character is of kind ``other``, as the end is; 数 is one token."""
    tokenizer = tokenizer_of_bytes(tmp_path, ["数"])
    one = group("p", list(TEXTS.items()), tokenizer)
    store = RolloutStore(tmp_path / "rollouts", 1 << 30)
    store.write(3, "short", [one] * 50, [])  # 300 rows: two batches
    store.close()
    found = measure([tmp_path / "rollouts" / "step_000003.parquet"], TokenTexts(tmp_path))
    assert found.keys() == {3}
    mean = found[3]
    sizes = [completion.token_ids.size for completion in one.completions]
    assert (mean["length/right"], mean["length/truncated"]) == (fmean(sizes[:2]), 24)
    assert mean["length/wrong"] == pytest.approx(fmean(sizes[3:]), rel=1e-5)
    for name, share in {"truncated": 1 / 6, "repeats": 1 / 6, "changed": 1 / 6}.items():
        assert mean[name] == pytest.approx(share, rel=1e-5), name
    assert mean["other_script"] == pytest.approx((1 + 120 / 128) / 5, rel=1e-5)  # one has no letter
    assert mean["checks"] == pytest.approx(1000 * 3 / sum(sizes), rel=1e-5)  # Wait, 等等, verify
    expected = defaultdict(list)
    for completion in one.completions:
        for i, (token, log_prob) in enumerate(zip(completion.token_ids, completion.log_probs, strict=True)):
            text = tokenizer.decode([token], skip_special_tokens=False)
            kind = next((kind for kind, chars in KINDS.items() if text in set(chars)), "other")
            expected[f"tenth/{10 * i // len(completion.token_ids)}"].append(-log_prob)
            expected[f"kind/{kind}"].append(-log_prob)
    entropies = {name.removeprefix("entropy/"): value for name, value in mean.items() if name.startswith("entropy/")}
    assert entropies == pytest.approx({name: fmean(values) for name, values in expected.items()}, rel=1e-4)


def test_responses_to_compare() -> None:
    """Problem a falls, c and d rise, b stays; the step between the first and the last does not count."""
    rights = {0: {"a": (1, 1), "b": (1, 0), "c": (0, 0), "d": (0, 1)}, 8: {"a": (0, 0), "c": (0, 0), "d": (0, 0)}}
    rights[16] = {"a": (1, 0), "b": (0, 1), "c": (1, 1), "d": (1, 1)}
    rows = pd.DataFrame(
        [
            {"run": 0, "stage": stage, "step": step, "problem": problem, "sample": sample, "status": "wr"[right]}
            for stage in (HELD_OUT, "short")
            for step, problems in rights.items()
            for problem, samples in problems.items()
            for sample, right in enumerate(samples)
        ]
    ).replace({"status": {"w": "wrong", "r": "right"}})

    def told(count: int) -> list[tuple[str, str, int, str]]:
        return [tuple(row) for row in rows.loc[pairs(rows, count), ["stage", "problem", "step", "status"]].to_numpy()]

    falls = [(HELD_OUT, "a", 0, "right"), (HELD_OUT, "a", 16, "wrong")]
    rises = [(HELD_OUT, name, step, status) for name in "dc" for step, status in ((0, "wrong"), (16, "right"))]
    assert told(4) == [*falls, *rises[2:]]  # c rises more than d
    assert told(100) == [*falls, *rises] and told(0) == []
    assert pairs(rows[:0], 10) == []
