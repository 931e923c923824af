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
    mean = measure([tmp_path / "rollouts" / "step_000003.parquet"], TokenTexts(tmp_path))[3]
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
    codes = ["0a11", "0b10", "0c00", "0d01", "8a00", "9a10", "9b01", "9c11", "9d11"]  # step, problem, right or not
    each = [(int(step), problem, digit) for step, problem, *digits in codes for digit in digits]
    told = [(0, stage, *one, ["wrong", "right"][int(digit)]) for stage in (HELD_OUT, "short") for *one, digit in each]
    rows = pd.DataFrame(told, columns=["run", "stage", "step", "problem", "status"])
    falls, rises = ["0a right", "9a wrong"], ["0d wrong", "9d right", "0c wrong", "9c right"]
    for count, expected in {4: [*falls, *rises[2:]], 100: [*falls, *rises], 0: []}.items():  # c rises more than d
        chosen = rows.loc[pairs(rows, count)]
        assert [f"{row.step}{row.problem} {row.status}" for row in chosen.itertuples()] == expected
        assert set(chosen["stage"]) <= {HELD_OUT}
