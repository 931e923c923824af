"""Session fixtures: a tiny random Qwen2 with a tokenizer, Ray, and two real vLLM engines that serve the model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import PATIENCE_S, wait_until

RUN_ID = f"tests-{os.getpid()}"  # each of pytest's workers has its own Ray and engines
WORDS = [
    "<pad>",
    "<end>",
    "<user>",
    "<think>",
    "</think>",
    "\\boxed{",
    "}",
    *map(str, range(20)),
    "+",
    "=",
    "so ",
    "no ",
    "x",
]
END = WORDS.index("<end>")
MAX_MODEL_TOKENS = 128


@dataclass(frozen=True)
class TinyModel:
    """A tiny model: ``folder`` is an HF folder for engines, ``oracle`` transformers' fp32 model of the same weights."""

    folder: Path
    oracle: Any

    def log_probs(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> np.ndarray:
        """Return the oracle's log-prob of each response token, [n], with the temperature applied."""
        rows = self._distributions(prompt, response, temperature)
        return rows[np.arange(len(response)), response]

    def entropy(self, prompt: list[int], response: list[int], temperature: float = 1.0) -> float:
        """Return the mean entropy, in nats, of the oracle's distributions of the response's tokens."""
        rows = self._distributions(prompt, response, temperature)
        return float(-(np.exp(rows) * rows).sum(axis=1).mean())

    def _distributions(self, prompt: list[int], response: list[int], temperature: float) -> np.ndarray:
        import torch

        with torch.no_grad():
            logits = self.oracle(torch.tensor([prompt + response])).logits[0].double() / temperature
        return torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1].numpy()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    import torch
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|so |no |\d+|."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    # </think> is special here, as in some models: the verifier must see it all the same.
    backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in WORDS[:5]])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<end>", clean_up_tokenization_spaces=False
    ).save_pretrained(folder)
    torch.manual_seed(7)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=None,
        initializer_range=0.15,
    )
    oracle = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if name.endswith("bias"):  # zero at initialisation, which would hide swapped biases of q, k and v
                parameter.normal_(std=0.3)
    oracle.save_pretrained(folder)
    return TinyModel(folder, oracle)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    from or1_megatron.rollout import cluster

    cluster.start_ray(None, RUN_ID)
    yield
    cluster.stop_ray()


def rollout_config(**changes: Any) -> Any:
    from or1_megatron.config.schema import RolloutConfig

    values = {"engines": 2, "max_concurrent": 32, "kv_cache_bytes": 16 << 20}
    return RolloutConfig(**{**values, **changes})


@pytest.fixture(scope="session")
def engine_pool(tiny_model: TinyModel, ray_cluster: None) -> Iterator[Any]:
    """Yield two engines with the tiny model's weights; a test that changes the weights must restore them."""
    from or1_megatron.rollout.engine_pool import EnginePool

    pool = EnginePool(rollout_config(), tiny_model.folder, "float32", MAX_MODEL_TOKENS, RUN_ID, on_cpu=True)
    pool.wait_ready()
    yield pool
    pool.close()


def prompt(ids: list[int], name: str = "p", answer: str = "7") -> Any:
    from or1_megatron.types import Prompt
    from or1_verify.types import Message, Problem

    problem = Problem(name, "test", "math", (Message("user", "?"),), answer, {}, f"test.jsonl:{name}")
    return Prompt(problem, np.array(ids, dtype=np.int32))


PROMPTS = [[2, 7, 9], [2, 27, 11, 28, 13, 3], [2, 8, 8, 8, 27, 20, 28, 3]]


def requests(sampling: Any, seed: int = 0, prompts: list[list[int]] = PROMPTS, each: int = 1) -> list[Any]:
    """Return ``each`` requests to every prompt, each with a seed of its own."""
    from or1_megatron.types import Request

    return [
        Request(prompt(ids, name=str(index)), sample, sampling, seed + index * 1000 + sample)
        for index, ids in enumerate(prompts)
        for sample in range(each)
    ]


def decode(handle: Any, requests: list[Any]) -> list[Any]:
    """Run requests on one engine actor and return their completions in order; drop completions of other requests."""
    import ray

    from or1_megatron.runtime.message import pack, unpack

    ray.get(handle.submit.remote(pack(requests)), timeout=PATIENCE_S)
    by_seed: dict[int, Any] = {}

    def complete() -> bool:
        harvest = unpack(ray.get(handle.harvest.remote(1.0), timeout=PATIENCE_S))
        by_seed.update({completion.seed: completion for completion in harvest.completions})
        return all(request.seed in by_seed for request in requests)

    wait_until(complete, f"{len(requests)} completions")
    return [by_seed[request.seed] for request in requests]


def answer(request: Any, engine: int, *versions: int) -> Any:
    """Return a completion with a token per weights version in ``versions`` (default: 0), whose id is the version."""
    from or1_megatron.types import Completion, VersionSpan

    ids = np.array(versions or [0], np.int32)
    starts = np.flatnonzero(np.diff(ids, prepend=-1)).tolist()
    spans = tuple(VersionSpan(int(ids[start]), start) for start in starts)
    problem, zeros = request.prompt.problem.id, np.zeros(ids.size, np.float32)
    return Completion(problem, request.sample_index, ids, zeros, "", "stop", spans, engine, request.seed, 0.0, 0.0)
