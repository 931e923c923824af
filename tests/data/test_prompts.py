"""Prompts against transformers' own path from messages to token ids, with a small tokenizer built here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from or1_megatron.data.prompts import encode_problems, thinking_rule
from or1_megatron.data.stream import PromptSource
from or1_megatron.data.template import ChatTemplate, load_tokenizer
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
    made = encode_problems(template, problems, 6, unusable)
    assert [prompt.problem.messages[0].content for prompt in made.prompts] == ["w1", "w1 w2"]
    assert {prompt.opened for prompt in made.prompts} == {"<think>"}
    assert (made.too_long, made.longest_tokens) == (1, 8)
    none = encode_problems(template, problems, 4, unusable)
    expected = r"none of 3 prompts \(from x\.jsonl:1 on\) fits into max_prompt_tokens = 4; the longest has 8"
    with pytest.raises(DataError, match=expected):
        none.check(Path("x.jsonl"))
    assert not unusable


def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template"):
        ChatTemplate(tokenizer(None))
    unusable = UnusableRows()
    assert encode_problems(ChatTemplate(tokenizer()), [problem("w1", "tool", 7)], 9, unusable).prompts == []
    with pytest.raises(DataError, match=r"x\.jsonl:7: field 'prompt'.*\['tool'\].*only users"):
        unusable.refuse()
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(DataError, match=r"holds no tokenizer; expected one of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="its tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ messages[0]['content'] }}\n{% if %}", "is broken at line 2"),
        ("{{ 1 + messages[0]['content'] }}", "fails: TypeError"),
        ("{{ messages[0]['text'] }}<a>", "leaves out what the user says"),
    ],
)
def test_a_broken_template_is_named(template: str, said: str) -> None:
    with pytest.raises(DataError, match=rf"^the chat template of .*tokenizer_config\.json\) {said}"):
        ChatTemplate(tokenizer(template))


def test_the_thinking_rule_is_said() -> None:
    sources = [
        PromptSource(encode_problems(ChatTemplate(tokenizer(template)), [problem("w1")], 9, UnusableRows()).prompts, 1)
        for template in (TEMPLATE, TEMPLATE.replace("<think>", ""))
    ]
    assert thinking_rule(sources[:1]).startswith("the chat template opens <think>, so a response counts only from")
    assert "opens no reasoning, so all of a response is read" in thinking_rule(sources[1:])
    assert thinking_rule(sources).count("the chat template") == 2


def byte_level(folder: Path, architecture: str, template: str = TEMPLATE) -> Tokenizer:
    """Write a folder as R1-Distill-Llama's is: byte-level BPE, and a tokenizer_config.json that names a class."""
    backend = Tokenizer(models.BPE(unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    letters = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>", "<pad>", "<u>", "<a>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["What is the sum of 12 and 34?\n"] * 3, letters)
    backend.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": architecture, "eos_token": "<end>", "pad_token": "<pad>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    return backend


@pytest.mark.parametrize("architecture", ["LlamaTokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_ids_and_text_are_those_of_the_file(architecture: str, tmp_path: Path) -> None:
    """Against the tokenizers library: transformers' own class of LlamaTokenizerFast loses the spaces of this file."""
    backend = byte_level(tmp_path, architecture)
    loaded, text = load_tokenizer(tmp_path), "What is 1234 + 56?\n\n  é 答"
    ids = backend.encode(text, add_special_tokens=False).ids
    assert loaded.decode(ids) == text
    expected = backend.encode(f"<u>{text}<a><think>", add_special_tokens=False).ids
    assert ChatTemplate(loaded).token_ids((Message("user", text),)).tolist() == expected


def test_a_token_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    backend = byte_level(tmp_path, "PreTrainedTokenizerFast")
    largest = max(backend.encode("<u>sum<a><think>", add_special_tokens=False).ids)
    problems, unusable = [problem("sum")], UnusableRows()
    assert encode_problems(ChatTemplate(load_tokenizer(tmp_path), largest + 1), problems, 99, unusable).prompts
    with pytest.raises(
        DataError, match=rf"a prompt has token {largest} .* vocab_size is {largest}; expected the model's"
    ):
        encode_problems(ChatTemplate(load_tokenizer(tmp_path), largest), problems, 99, unusable)


def test_a_template_of_today_is_the_same_tomorrow(tmp_path: Path) -> None:
    byte_level(tmp_path, "PreTrainedTokenizerFast", "{{ strftime_now('%d %b %Y') }}{{ messages[0]['content'] }}")
    assert ChatTemplate(load_tokenizer(tmp_path)).render((Message("user", "?"),)) == "26 Jul 2024?"
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
    with pytest.raises(DataError, match=r"tokenizer\.json is a Git LFS pointer, not the tokenizer"):
        load_tokenizer(tmp_path)


def test_an_end_of_turn_that_ends_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = "{% for m in messages %}{{ m['content'] }}<a>{% endfor %}"
    byte_level(tmp_path, "PreTrainedTokenizerFast", turns)
    ChatTemplate(load_tokenizer(tmp_path)).check_end_of_turn(tmp_path)
    assert "ends a turn with '<a>' (token 3), and responses end with token 0 alone" in caplog.text
    caplog.clear()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 3]}))
    ChatTemplate(load_tokenizer(tmp_path)).check_end_of_turn(tmp_path)
    text_first = "{% for m in messages %}{{ m['content'] }} <end>{% endfor %}"  # as Llama 2's
    byte_level(tmp_path, "PreTrainedTokenizerFast", text_first)
    ChatTemplate(load_tokenizer(tmp_path)).check_end_of_turn(tmp_path)
    assert not caplog.text
    (tmp_path / "generation_config.json").write_text("{'eos_token_id': 3}")
    with pytest.raises(DataError, match=r"generation_config\.json: not a JSON object \(Expecting"):
        ChatTemplate(load_tokenizer(tmp_path)).check_end_of_turn(tmp_path)
