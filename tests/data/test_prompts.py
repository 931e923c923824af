"""Prompts against transformers' own path from messages to token ids, with a small tokenizer built here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from or1_megatron.data.prompts import ChatTemplate, load_tokenizer
from or1_verify.problems.rows import DataError
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Message, Problem

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] != 'user' %}{{ raise_exception('only users') }}{% endif %}"
    "<u>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<a><think>{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<unk>", "<s>", "<u>", "<a>", "<think>", *(f"w{n}" for n in range(20))]
    backend = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    made.add_special_tokens({"additional_special_tokens": ["<u>", "<a>", "<think>"]})
    made.chat_template = template
    return made


def problem(content: str, role: str = "user", line: int = 1) -> Problem:
    return Problem(f"{content}{line}", "s", "math", (Message(role, content),), '["1"]', {}, f"x.jsonl:{line}")


def test_token_ids_are_those_of_transformers() -> None:
    made = tokenizer()
    ids = ChatTemplate(made).token_ids((Message("user", "w1 w2"),))
    assert ids.dtype == np.int32
    assert ids.tolist() == [1, 2, 6, 7, 3, 4]  # by hand: <s> <u> w1 w2 <a> <think>, one BOS only
    expected = made.apply_chat_template(
        [{"role": "user", "content": "w1 w2"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids.tolist() == expected


def test_long_prompts_are_dropped_and_counted() -> None:
    problems = [problem("w1"), problem("w1 w2 w3 w4"), problem("w1 w2")]  # 5, 8 and 6 tokens with the template's 4
    template, unusable = ChatTemplate(tokenizer()), UnusableRows()
    made = template.make_prompts(problems, 6, unusable)
    assert [prompt.problem.messages[0].content for prompt in made.prompts] == ["w1", "w1 w2"]
    assert {prompt.opened for prompt in made.prompts} == {"<think>"}
    assert (made.too_long, made.longest_tokens) == (1, 8)
    none = template.make_prompts(problems, 4, unusable)
    expected = r"none of 3 prompts \(from x\.jsonl:1 on\) fits into max_prompt_tokens = 4; the longest has 8"
    with pytest.raises(DataError, match=expected):
        none.check(Path("x.jsonl"))
    assert not unusable


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate(tokenizer(None))
    unusable = UnusableRows()
    assert ChatTemplate(tokenizer()).make_prompts([problem("w1", "tool", 7)], 9, unusable).prompts == []
    with pytest.raises(DataError, match=r"x\.jsonl:7: field 'prompt'.*\['tool'\].*only users"):
        unusable.refuse()
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"holds no tokenizer; expected one of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_saved_tokenizer_loads(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    assert ChatTemplate(load_tokenizer(tmp_path)).token_ids((Message("user", "w0"),)).tolist() == [1, 2, 5, 3, 4]
