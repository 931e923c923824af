"""The quickstart's tokenizer: one token per number, sign and phrase; saved as a folder that AutoTokenizer loads.

Nothing is learned, so the folder depends on this file alone. The chat template opens the reasoning, as that of
DeepSeek-R1-Distill does: a generation prompt ends with the assistant's header and `<think>\\n`. `<think>` and
`</think>` are ordinary tokens, not special ones, so that decoding for the verifier keeps them.

    python examples/quickstart/tokenizer.py --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tokenizers import AddedToken
from transformers import Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the folder of an example is not a package
from task import MAX_VALUE

PAD, END, UNKNOWN = "<|pad|>", "<|end|>", "<|unknown|>"
ROLE_HEADERS = ("<|system|>", "<|user|>", "<|assistant|>")
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
SIGNS = ("\n", " ", "+", "-", "*", "=", "(", ")", ".", "?", "\\boxed{", "}")
PHRASES = (
    *("Compute ", "Step by step: ", "Easy: ", "Hmm, "),  # the question, then the three habits' first tokens
    *("Now ", "Next ", "Then "),
    *(", so ", ", leaving ", ", giving ", ", hence "),
    *("maybe ", "perhaps ", "wait, ", "no, ", "again ", "about "),
)
VOCABULARY_MULTIPLE = 8  # the embedding's rows divide over tensor-parallel ranks without padding
MODEL_MAX_LENGTH = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}<|system|>{{ message['content'] }}"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}"
    "{% elif message['role'] == 'assistant' %}"
    "<|assistant|>{{ message['content'].split('</think>')[-1] }}<|end|>"
    "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)


def vocabulary() -> list[str]:
    """Every token in the order of its id, filled up with reserved ones to a multiple of VOCABULARY_MULTIPLE."""
    special = [PAD, END, UNKNOWN, *ROLE_HEADERS]
    tokens = [*special, THINK_OPEN, THINK_CLOSE, *map(str, range(MAX_VALUE + 1)), *SIGNS, *PHRASES]
    missing = -len(tokens) % VOCABULARY_MULTIPLE
    return tokens + [f"<|reserved_{index}|>" for index in range(missing)]


def build_tokenizer() -> Qwen2Tokenizer:
    """The tokenizer in memory. Text splits into the longest token that starts at each place, left to right.

    AutoTokenizer gives every folder whose config.json says "qwen2" to Qwen2Tokenizer, and that class replaces the
    saved pre-tokenizer and decoder by its own. So this is one of that class from the start, without merges, and
    every token is an added one: those are split off first and kept as they are, whoever loads the folder. A
    character that no token holds is dropped.
    """
    tokens = vocabulary()
    ids = {token: index for index, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=ids,
        merges=[],
        unk_token=UNKNOWN,
        pad_token=PAD,
        eos_token=END,
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    special = [token for token in tokens if token.startswith("<|")]
    plain = [token for token in tokens if not token.startswith("<|")]
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's tokenizer folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    options = parser.parse_args()
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
