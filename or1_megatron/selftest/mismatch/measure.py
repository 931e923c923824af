"""Measures the mismatch: scores the same tokens with engine, policy and transformers, and compares weights and layers.

The reference is transformers in float32, with weights rounded to the run's dtype. The model's noise is the difference
of transformers in bfloat16 from this reference. For a run in float32 the noise is 2^-16 of this difference, as in
``parallel.parity``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
import torch

from or1_megatron.config.schema import HandoffConfig, ModelConfig, ParallelConfig
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.network import build_network, score_rows
from or1_megatron.parallel.parity import cast, load_network, logits_of
from or1_megatron.parallel.policy import unpack_scores
from or1_megatron.rl.batch import pack
from or1_megatron.rollout.engine_group import EngineGroup, result_of
from or1_megatron.runtime import message
from or1_megatron.selftest.mismatch.parts import outputs, parts_of_engine, parts_of_policy
from or1_megatron.sizing.parallel_layouts import batch_layout
from or1_megatron.types import Completion, Float32Array, Int32Array, Prompt, Request, Sample, Sampling
from or1_verify.types import Problem

_TIMES: Final = 5.0
_LEAST: Final = {"float32": (2e-5, 1e-4), "bfloat16": (1e-3, 2e-2)}
"""Limits for (log-probs in nats, outputs of modules relative to their size). A difference is wrong, not noise, if it
exceeds both this limit and _TIMES times the model's noise."""
_MODULES: Final = ("embed_tokens", "norm", "self_attn.o_proj", "linear_attn", "mlp.gate", "mlp")

Scored = tuple[Int32Array, Int32Array, Float32Array]
"""(prompt [p], response [n], log-probs [n] of the response)."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of a comparison: weights, prompts, and how the run samples."""

    folders: Mapping[int, Path]
    """HF folders by version of their weights. The engine starts with the oldest, and gets the newest in a handoff."""
    dtype: Any
    prompts: Sequence[Int32Array]
    sampling: Sampling
    recorded: Sequence[Scored] = ()
    """Responses that the run's engines sampled with the newest weights."""
    retokenised: Sequence[tuple[str, Int32Array, Int32Array]] = ()
    """(problem, the prompt's tokens in the run, the prompt's tokens by the model's tokenizer and chat template)."""
    bos: int | None = None


@dataclass(frozen=True)
class Difference:
    """How log-probs of ``side`` differ from the reference's, for each of the N tokens of all sequences. ``values`` [N]:
    log-probs minus the reference's; ``noise`` [N]: the model's noise; ``places`` [N]: the tokens' positions."""

    side: str
    name: str
    values: Any
    noise: Any
    places: Any
    least: float
    ways: Mapping[str, float]
    """Mean absolute difference from a reference with another temperature or top-p, by a description of the change."""

    @property
    def mean(self) -> float:
        return float(np.abs(self.values).mean())

    @property
    def limit(self) -> float:
        return max(_TIMES * float(self.noise.mean()), self.least)

    @property
    def wrong(self) -> bool:
        return not self.mean <= self.limit


class Comparison:
    """An engine, a policy on one rank, and transformers. ``examine`` sets the following attributes."""

    rows: dict[str, Difference]
    parts: dict[str, dict[str, list[str]]]
    """What is wrong with each part, by side ("engine" or "policy") and part. The part "dtype" has the dtype itself."""
    strayed: str
    """Names the engine's first module whose output differs from the reference's, and how much it differs."""
    head: tuple[float, float, float]
    """Compares the engine's logits with fp32 products of its last hidden states and the head's weight: (factor
    between them, relative error that remains, share of the logits that bf16 can express)."""

    def __init__(self, inputs: Inputs, handle: Any, mesh: Mesh, parallel: ParallelConfig) -> None:
        """``handle``: an ``EngineActor`` of one device, which has loaded the oldest folder."""
        self.inputs, self.handle, self.mesh, self.parallel = inputs, handle, mesh, parallel
        self.version, heat = max(inputs.folders), inputs.sampling.temperature or 1.0
        model = ModelConfig(hf=inputs.folders[self.version], dtype=inputs.dtype)
        self.reference = load_network(model).eval()
        self.rounded = copy.deepcopy(self.reference)
        cast(self.rounded, torch.bfloat16)
        self.share = 2.0**-16 if inputs.dtype == "float32" else 1.0  # of the reference's difference in bfloat16
        self.known: dict[Any, dict[str, Any]] = {}  # what ``row`` has scored with transformers, by tokens
        self.network = build_network(model, parallel, mesh)
        self.control = EngineGroup([handle], 1, HandoffConfig().timeout_s)
        self.sender = WeightSender(self.network.weights, mesh.rank, HandoffConfig(), self.control)
        self.long = np.concatenate(inputs.prompts)[
            : max(map(len, inputs.prompts)) + inputs.sampling.max_response_tokens - 1
        ]
        ways = {"temperature is applied twice": (heat * heat, 1.0), "temperature is not applied": (1.0, 1.0)}
        ways["top-p is applied"] = heat, inputs.sampling.top_p
        self.ways = {"": (heat, 1.0)} | {words: way for words, way in ways.items() if way != (heat, 1.0)}

    def hand_off(self) -> None:
        """Fill the engine's prefix cache, then hand off the policy's weights. The handoff must drop the cache."""
        self.control.score_prompts([self.long])
        self.sender.send(self.version)
        self.control.resume_generation(self.version)

    def sample(self, together: bool) -> list[Scored]:
        """Sample a response to each prompt with the engine: all ``together`` in one batch, or one after another."""
        problem = Problem("0", "mismatch", "math", (), "", {}, "mismatch")
        asked = [Request(Prompt(problem, ids), 0, self.inputs.sampling, n) for n, ids in enumerate(self.inputs.prompts)]
        done: dict[int, Completion] = {}
        for batch in [asked] if together else [[request] for request in asked]:
            result_of(self.handle.submit.remote(message.pack(batch)), 0, "take requests")
            while any(request.seed not in done for request in batch):
                harvest = message.unpack(result_of(self.handle.harvest.remote(1.0), 0, "sample"))
                done |= {completion.seed: completion for completion in harvest.completions}
        return [(ids, done[n].token_ids, done[n].log_probs) for n, ids in enumerate(self.inputs.prompts)]

    def by_policy(self, sequences: Sequence[Scored]) -> list[Scored]:
        samples = [Sample(prompt, made, 0.0, np.ones(made.size, np.bool_)) for prompt, made, _ in sequences]
        batch = pack(samples, batch_layout(self.parallel, self.network.hf))
        scored = score_rows(self.mesh, self.network.chunks, batch.ranks[0], self.inputs.sampling.temperature)
        scores = unpack_scores(batch.ranks, scored or [], batch.sample_count).log_probs
        return [(*one[:2], own) for one, own in zip(sequences, scores, strict=True)]

    def as_prompt(self, end: int, tokens: slice) -> Scored:
        """Score the long prompt up to ``end`` with the engine at temperature 1; return the log-probs of ``tokens``. The
        engine uses its prefix cache to score the last token, but not to score the other tokens."""
        own = self.control.score_prompts([self.long[:end]])[0][0]
        return self.long[: tokens.start], self.long[tokens], own[tokens.start - 1 : tokens.stop - 1]

    def examine(self) -> None:
        last, sampled = len(self.long), self.sample(together=True)
        cached = [self.as_prompt(end, slice(end - 1, end)) for end in np.linspace(last // 2, last, 8).astype(int)]
        prompt = [self.as_prompt(last, slice(1, last - 1))]
        self.rows = {
            "sampled": self.row("engine", "engine, as it samples", sampled),
            "alone": self.row("engine", "engine, each request alone", self.sample(together=False)),
            "prompt": self.row("engine", "engine, scoring a prompt", prompt, heat=1.0),
            "cached": self.row("engine", "engine, on its prefix cache", cached, heat=1.0),
            "policy": self.row("policy", "policy", self.by_policy(sampled)),
        }
        if self.inputs.recorded:
            self.rows["recorded"] = self.row("run", "the run's engines, as recorded", self.inputs.recorded)
        gap = self.rows["sampled"].values - self.rows["policy"].values
        self.rows["gap"] = replace(self.rows["policy"], side="", name="engine minus policy", values=gap)
        names = [name for name, _ in self.reference.named_modules() if name.endswith(_MODULES)]
        folders, given = (self.inputs.folders, self.version), (self.long, [*names, "logits_processor"])
        call = self.handle.__ray_call__.remote(partial(_on_thread, partial(parts_of_engine, *folders, *given)))
        of_engine, outcomes = ray.get(call)
        self.parts = {"engine": of_engine, "policy": parts_of_policy(self.network, *folders)}
        self.strayed, self.head = self.layers(outcomes, names)

    @torch.no_grad()
    def row(self, side: str, name: str, scored: Sequence[Scored], heat: float | None = None) -> Difference:
        """Return how log-probs in ``scored`` differ from the reference's at the run's temperature, or at ``heat``."""
        ways = self.ways if heat is None else {"": (heat, 1.0)}

        def score(network: Any) -> dict[str, Any]:
            parts: dict[str, list[Any]] = {words: [] for words in ways}
            for prompt, made, _ in scored:
                key = network is self.reference, heat, prompt.tobytes(), made.tobytes()
                if key not in self.known:
                    logits = logits_of(network, prompt, made).double().cpu()
                    self.known[key] = {words: _log_probs(logits, made, *way) for words, way in ways.items()}
                for words, values in self.known[key].items():
                    parts[words].append(values)
            return {words: np.concatenate(part) for words, part in parts.items()}

        right, rounded = score(self.reference), score(self.rounded)
        mine = np.concatenate([one[2] for one in scored]).astype(np.float64)
        apart = {words: float(np.abs(mine - right[words]).mean()) for words in ways if words}
        places = np.concatenate([len(prompt) + np.arange(len(made)) for prompt, made, _ in scored])
        noise = np.abs(rounded[""] - right[""]) * self.share
        return Difference(side, name, mine - right[""], noise, places, _LEAST[self.inputs.dtype][0], apart)

    @torch.no_grad()
    def layers(self, mine: Mapping[str, Any], names: Sequence[str]) -> tuple[str, tuple[float, float, float]]:
        """Return values for ``strayed`` and ``head``. ``mine``: outputs of the engine's modules for the long prompt."""
        both = self.reference, self.rounded
        right, rounded = (outputs(each, partial(logits_of, each, self.long[:1], self.long[1:]), names) for each in both)
        strayed = hidden = ""
        for name in (name for name in right if name in mine and mine[name].shape == right[name].shape):
            hidden = name if name.endswith("norm") else hidden
            size = np.linalg.norm(right[name]) / len(right[name]) ** 0.5
            noise = np.linalg.norm(rounded[name] - right[name], axis=1).mean() * self.share / size
            apart = np.linalg.norm(mine[name] - right[name], axis=1) / size
            limit = max(_TIMES * noise, _LEAST[self.inputs.dtype][1])
            if not (strayed or apart.mean() <= limit):
                first = int((~(apart <= limit)).argmax()) * len(self.long) // len(apart)
                strayed = f"{name} differs from token {first} on: {apart.mean():.2g} of its size, noise {noise:.1g}"
        weight = self.reference.get_output_embeddings().weight.detach().cpu().numpy()
        logits = mine["logits_processor"][:, : len(weight)]
        product = mine[hidden][: len(logits)] @ weight.T
        scale = float((logits * product).sum() / (product**2).sum())
        error = float(np.linalg.norm(logits - scale * product) / np.linalg.norm(product))
        coarse = torch.tensor(logits)
        return strayed, (scale, error, float((coarse == coarse.bfloat16().float()).float().mean()))


def _log_probs(logits: torch.Tensor, targets: Int32Array, temperature: float, top_p: float) -> Any:
    """Return log-probs [n] of ``targets`` from ``logits`` [n, V]; if ``top_p`` < 1, renormalised over the nucleus."""
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    ranked = log_p.exp().sort(dim=-1, descending=True).values
    kept = (ranked * ((ranked.cumsum(-1) - ranked) < top_p)).sum(-1) if top_p < 1 else torch.ones(())
    return (log_p.gather(1, torch.from_numpy(targets.astype(np.int64))[:, None])[:, 0] - kept.log()).numpy()


def _on_thread(function: Callable[[Any], Any], actor: Any) -> Any:
    return actor._thread.call(function)
