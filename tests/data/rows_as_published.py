"""Data rows in the columns of Skywork-OR1-RL-Data and of LiveCodeBench, which several tests share."""

from __future__ import annotations

import json
from typing import Any


def skywork(content: str = "What is 1+1?", **changes: Any) -> dict[str, Any]:
    base = {
        "data_source": "train-math-numinamath1.5_olympiads",
        "prompt": [{"role": "user", "content": content}],
        "ability": "math",
        "reward_model": {"ground_truth": '["2"]', "style": "rule"},
        "extra_info": {"index": 3, "model_difficulty": {"M-7B": 5, "M-32B": 16}},
    }
    return {**base, **changes}


def livecodebench(content: str = "Read a number, print its double.", **changes: Any) -> dict[str, Any]:
    base = {
        "question_title": "Twice", "question_content": content, "platform": "atcoder", "question_id": "abc001_a",
        "contest_date": "2024-08-10T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
        "private_test_cases": "", "metadata": "{}",
    }  # fmt: skip
    return {**base, **changes}
