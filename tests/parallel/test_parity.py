"""The policy at several layouts against transformers and torch's own AdamW, in fp32.

Not proven here: bf16, context and interleaved parallelism, NCCL, Transformer Engine, sizes beyond a few layers.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import problem
import pytest
import ranks
import torch

LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"ranks": 1},
    "1, rows of 48": {"ranks": 1, "micro_batch_tokens": 48},
    "TP2": {"ranks": 2, "tensor": 2, "micro_batch_tokens": 64},
    "TP2 SP": {"ranks": 2, "tensor": 2, "sequence": True, "distributed_optimizer": False, "micro_batch_tokens": 64},
    "PP2": {"ranks": 2, "pipeline": 2, "micro_batch_tokens": 48},
    "DP2": {"ranks": 2, "micro_batch_tokens": 64},
    "TP2 PP2 SP": {"ranks": 4, "tensor": 2, "pipeline": 2, "sequence": True, "micro_batch_tokens": 48},
}


@dataclass
class Reference:
    gradient: dict[str, torch.Tensor]
    start: dict[str, torch.Tensor]
    log_probs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    losses: list[float]
    grad_norms: list[float]
    parameters: dict[str, torch.Tensor]


def score(model: Any) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per sample (log-probs, entropies, advantages) of its counted tokens, one unpacked sequence at a time."""
    results = []
    for sample in problem.samples():
        ids = torch.from_numpy(np.concatenate((sample.prompt_ids, sample.response_ids)).astype(np.int64))
        log_p = torch.log_softmax(model(ids[None]).logits[0].float() / problem.TEMPERATURE, dim=-1)
        predicting = slice(len(sample.prompt_ids) - 1, len(ids) - 1)
        mask = torch.from_numpy(sample.loss_mask)
        chosen = log_p[predicting].gather(1, ids[len(sample.prompt_ids) :, None])[:, 0][mask]
        entropy = -(log_p.exp() * log_p).sum(-1)[predicting][mask]
        results.append((chosen, entropy, torch.full_like(chosen, sample.advantage)))
    return results


@functools.cache
def reference_of(folder: Path) -> Reference:
    """What transformers and torch's AdamW make of the same batch and steps."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    with torch.no_grad():
        scored = score(model)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = Reference({}, start, [s[0] for s in scored], [s[1] for s in scored], [], [], {})
    for _ in range(3):
        optimizer.zero_grad()
        log_probs, entropies, advantages = (torch.cat(x) for x in zip(*score(model), strict=True))
        loss, _ = problem.WeightedLogProb()(log_probs, entropies, log_probs, advantages)
        loss = loss / len(log_probs)
        loss.backward()
        found.gradient = found.gradient or {name: p.grad.clone() for name, p in model.named_parameters()}
        found.losses.append(loss.item())
        found.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    found.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return found


def check(layout: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """Log-probs, entropies, every element of the gradient, and losses, norms and parameters over three AdamW steps."""
    from transformers import Qwen2ForCausalLM

    reference, exported = reference_of(folder), tmp_path / "hf"
    arguments = (str(folder), json.dumps(layout), str(exported))
    found = ranks.run_json("parity_worker.py", layout["ranks"], tmp_path / "out.json", *arguments)
    if layout.get("micro_batch_tokens"):
        assert found["micro_batches"] > 1
    for mine, theirs in [(found["log_probs"], reference.log_probs), (found["entropies"], reference.entropies)]:
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(one), other, rtol=0, atol=1e-5)
    assert found["losses"] == pytest.approx(reference.losses, abs=1e-5)
    assert found["grad_norms"] == pytest.approx(reference.grad_norms, rel=1e-4)

    stepped = Qwen2ForCausalLM.from_pretrained(tmp_path / "gradient", dtype=torch.float32)
    for name, parameter in stepped.named_parameters():
        g = reference.gradient[name]
        torch.testing.assert_close(reference.start[name] - parameter, g / (g.abs() + 1), rtol=1e-4, atol=1e-6)
    trained = Qwen2ForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for name, parameter in trained.named_parameters():
        # Adam divides by the gradient's size: where that is rounding noise, a step of lr = 1e-3 may point anywhere
        wrong = (parameter - reference.parameters[name]).abs() > 1e-5
        assert wrong.float().mean() < 0.01, name


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_transformers(name: str, tiny_qwen2: Path, tmp_path: Path) -> None:
    check(LAYOUTS[name], tiny_qwen2, tmp_path)


@pytest.mark.parametrize("name", ["TP2", "PP2"])
def test_tied_embeddings_equal_transformers(name: str, tied_qwen2: Path, tmp_path: Path) -> None:
    """One tensor, two uses: under PP its two copies share their gradient."""
    check(LAYOUTS[name], tied_qwen2, tmp_path)
