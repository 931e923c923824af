"""The policy at several layouts against transformers and torch's own AdamW, in fp32.

Not proven here: bf16, context and interleaved parallelism, NCCL, Transformer Engine, sizes beyond a few layers.
"""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def reference(tiny_qwen2: Path) -> Reference:
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    with torch.no_grad():
        scored = score(model)
    found = Reference([s[0] for s in scored], [s[1] for s in scored], [], [], {})
    for _ in range(3):
        optimizer.zero_grad()
        log_probs, entropies, advantages = (torch.cat(x) for x in zip(*score(model), strict=True))
        loss, _ = problem.WeightedLogProb()(log_probs, entropies, log_probs, advantages)
        loss = loss / len(log_probs)
        loss.backward()
        found.losses.append(loss.item())
        found.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    found.parameters = {name: p.detach() for name, p in model.named_parameters()}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_transformers(name: str, reference: Reference, tiny_qwen2: Path, tmp_path: Path) -> None:
    """Log-probs, entropies, loss, gradient norm, and the exported parameters after three AdamW steps."""
    from transformers import Qwen2ForCausalLM

    layout, exported = LAYOUTS[name], tmp_path / "hf"
    found = ranks.run_json(
        "parity_worker.py", layout["ranks"], tmp_path / "out.json", str(tiny_qwen2), json.dumps(layout), str(exported)
    )
    if layout.get("micro_batch_tokens"):
        assert found["micro_batches"] > 1
    for mine, theirs in [(found["log_probs"], reference.log_probs), (found["entropies"], reference.entropies)]:
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(one), other, rtol=0, atol=1e-5)
    assert found["losses"] == pytest.approx(reference.losses, abs=1e-5)
    assert found["grad_norms"] == pytest.approx(reference.grad_norms, rel=1e-4)
    model = Qwen2ForCausalLM.from_pretrained(exported, dtype=torch.float32)
    for parameter_name, parameter in model.named_parameters():
        # Adam divides by the gradient's size: where that is rounding noise, a step of lr = 1e-3 may point anywhere
        wrong = (parameter - reference.parameters[parameter_name]).abs() > 1e-5
        assert wrong.float().mean() < 0.01, f"{parameter_name} at {name}"
