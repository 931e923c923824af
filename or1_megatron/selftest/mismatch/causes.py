"""Decides which cause of a log-prob mismatch ``or1 doctor mismatch`` names: weights, KV cache, temperature, noise, ...

Each cause is a function that gets the measurements (``Comparison``) and yields pairs (side, sentence). ``verdict``
calls the causes in order: first causes in single parts, then causes that show in log-probs. It reports only the first
cause that it finds for a side (prompts, engine, policy, run), because this cause explains the later causes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from or1_megatron.selftest.mismatch.measure import Comparison

Found = Iterator[tuple[str, str]]


def prompts(m: Comparison) -> Found:
    for problem, used, made in m.inputs.retokenised:
        if not np.array_equal(used, made):
            what = f"{made.size} others by the model's tokenizer and chat template"
            yield "prompts", f"prompts: that of problem {problem} has {used.size} tokens in the run, and {what}"
    if any(list(ids[:2]) == [m.inputs.bos] * 2 for ids in m.inputs.prompts):
        yield (
            "prompts",
            f"prompts: one begins with two BOS (token {m.inputs.bos}), of the template and of the tokenizer",
        )


def parts(m: Comparison) -> Found:
    for side, found in m.parts.items():
        if found["dtype"] != [f"torch.{m.inputs.dtype}"]:
            yield side, f"dtype: the {side} computes in {found['dtype'][0]}, and model.dtype is {m.inputs.dtype}"
        elif wrong := found["weights"]:
            what = "router" if ".gate.weight" in wrong[0] else "weights"
            yield side, f"{what}: the {side}'s {wrong[0]}" + (f"; so are {len(wrong) - 1} more" if wrong[1:] else "")
        elif wrong := found["rotary"]:
            yield side, f"positions: the {side}'s rotation {wrong[0]}; no handoff brings rotary buffers"


def kv_cache(m: Comparison) -> Found:
    if m.rows["cached"].wrong and not m.rows["prompt"].wrong:
        what = f"{m.rows['cached'].mean:.2g} nats off with cached keys and values, and right with new ones"
        yield "engine", f"KV cache: the engine is {what}: the cached ones are of other weights, or damaged"


def layers(m: Comparison) -> Found:
    if m.strayed:
        yield "engine", f"layers: with right weights, the output of the engine's {m.strayed}"


def head(m: Comparison) -> Found:
    scale, error, coarse = m.head
    if abs(scale - 1) > 1e-2:
        yield "engine", f"head: the engine's logits are {scale:.4g} times the product of its head and hidden states"
    if m.inputs.dtype == "float32" and error > 1e-4:
        kind = "rounded to bfloat16" if coarse > 0.99 else "not computed in float32"
        yield "engine", f"head: the engine's logits are {kind}, {error:.2g} of their size apart from fp32 products"


def sampling(m: Comparison) -> Found:
    for row in m.rows.values():
        for words, apart in row.ways.items():
            if row.side and row.mean > row.least and apart < row.mean / 3:
                yield row.side, f"sampling: {words} in the log-probs of {row.name}"


def batch(m: Comparison) -> Found:
    if m.rows["sampled"].wrong != m.rows["alone"].wrong:
        together, alone = m.rows["sampled"].mean, m.rows["alone"].mean
        yield "engine", f"batch: the engine is {together:.2g} nats off together with other requests, {alone:.2g} alone"


def other(m: Comparison) -> Found:
    for row in m.rows.values():
        if row.wrong and row.side:
            yield row.side, f"unknown: {row.name} is {row.mean:.2g} nats off; {row.limit:.2g} would be noise"


CAUSES: Final[tuple[Callable[[Comparison], Found], ...]] = (
    prompts, parts, kv_cache, layers, head, sampling, batch, other,
)  # fmt: skip


def verdict(m: Comparison) -> list[str]:
    """Return a sentence for each side that is at fault. If no side is, return one that begins with "noise"."""
    found: dict[str, str] = {}
    for cause in CAUSES:
        for side, sentence in cause(m):
            found.setdefault(side, sentence)
    gap, noise = m.rows["gap"].mean, m.rows["gap"].noise.mean()
    return list(found.values()) or [
        f"noise of {m.inputs.dtype}: engine and policy differ by {gap:.2g} nats per token on average, as expected: the "
        f"model's own rounding is {noise:.2g} at these lengths"
    ]
