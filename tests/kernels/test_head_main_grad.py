"""The output weight's gradient in Megatron's main_grad, under Megatron's own DistributedDataParallel, on one rank.

Two micro-batches, both forward passes before both backward passes, as a pipeline's last stage may have them. Not proven
here: reduction over several ranks, and pipelines (tests/parallel).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from head_cases import random_case
from torch import Tensor

from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.kernels.head_weight_gradient import WeightGradient
from or1_megatron.selftest.checks.kernels import HeadCase, oracle

ROWS, WIDTH = 96, 24
SHARD = VocabularyShard(0, ROWS)


@pytest.fixture(scope="module")
def ddp() -> Iterator[Callable[..., Any]]:
    """Wraps a module in Megatron's DistributedDataParallel, with buckets of one parameter."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from or1_megatron.config.schema import ParallelConfig
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group

    start_process_group(60)
    build_mesh(ParallelConfig(), seed=1)

    def wrap(module: torch.nn.Module, overlap: bool) -> Any:
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=1)
        config = TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=1, calculate_per_token_loss=True
        )
        return DistributedDataParallel(config=config, ddp_config=settings, module=module)

    yield wrap
    stop_process_group()


class Model(torch.nn.Module):
    """Embedding, a matrix, the head: the least that has all three kinds of gradient."""

    def __init__(self, embedding: Tensor, matrix: Tensor, output: Tensor | None) -> None:
        super().__init__()
        self.embedding = torch.nn.Parameter(embedding.clone())
        self.matrix = torch.nn.Parameter(matrix.clone())
        self.output = self.embedding if output is None else torch.nn.Parameter(output.clone())
        if output is None:
            self.output.zero_out_wgrad = True  # as Megatron marks a tied embedding on one stage

    def forward(self, case: HeadCase) -> Tensor:
        return torch.nn.functional.embedding(case.targets.flip(0), self.embedding) @ self.matrix


def loss_of(model: Any, case: HeadCase, mode: str) -> Tensor:
    def pointwise(log_probs: Tensor, entropies: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
        return log_probs @ case.a[part] + entropies @ case.c[part], {}

    arguments = (model(case), model.module.output, case.targets, case.temperature, SHARD)
    if mode == "one_pass":
        return one_pass_loss(*arguments, pointwise, budget_bytes=case.budget_bytes)[0]
    return pointwise(*log_probs_and_entropies(*arguments, budget_bytes=case.budget_bytes), slice(None))[0]


def expected(parameters: list[Tensor], tied: bool, cases: list[HeadCase]) -> list[Tensor]:
    """Gradients in float64 by plain autograd; the tied one is the sum of both uses."""
    leaves = [parameter.detach().double().requires_grad_() for parameter in parameters]
    embedding, matrix, output = leaves if not tied else (*leaves, leaves[0])
    for case in cases:
        hidden = torch.nn.functional.embedding(case.targets.flip(0), embedding) @ matrix
        log_p = torch.log_softmax(hidden @ output.t() / case.temperature, dim=-1)
        log_probs, entropies = log_p.gather(1, case.targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
        (log_probs @ case.a.double() + entropies @ case.c.double()).backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_main_grad_holds_every_gradient(ddp: Any, mode: str, overlap: bool, tied: bool) -> None:
    cases = [random_case(tokens, ROWS, temperature=0.6) for tokens in (21, 13)]
    generator = torch.Generator().manual_seed(5)
    shapes = ((ROWS, WIDTH), (WIDTH, WIDTH), (ROWS, WIDTH))
    tensors = [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]
    model = ddp(Model(tensors[0], tensors[1], None if tied else tensors[2]), overlap)
    for _ in range(2):  # the second step starts from a clean buffer and flags
        model.zero_grad_buffer()
        with torch.no_grad():
            loss_of(model, cases[0], mode)
        assert all(not parameter.main_grad.any() for parameter in model.module.parameters())
        losses = [loss_of(model, case, mode) for case in cases]
        with model.no_sync():
            losses[0].backward()
        losses[1].backward()
        model.finish_grad_sync()  # with overlap: fails if any bucket was never started
        assert all(parameter.grad is None for parameter in model.module.parameters())
        true = expected(list(model.module.parameters()), tied, cases)
        for parameter, gradient in zip(model.module.parameters(), true, strict=True):
            assert (parameter.main_grad - gradient).norm() <= 1e-5 * gradient.norm()


def with_main_grad(case: HeadCase) -> Tensor:
    weight: Any = case.weight.clone().requires_grad_()
    weight.main_grad = torch.ones(weight.shape)
    weight.grad_added_to_main_grad = False
    return weight


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_bfloat16_weight_is_summed_in_fp32(mode: str) -> None:
    """On top of what is there, and far closer than bf16 (4e-3) could hold it; the stand-in takes no memory."""
    case = random_case(37, ROWS, dtype=torch.bfloat16)
    weight: Any = with_main_grad(case)
    hidden = case.hidden.clone().requires_grad_()
    model: Any = lambda _: hidden  # noqa: E731
    model.module = type("Holder", (), {"output": weight})
    loss_of(model, case, mode).backward()
    true = oracle(case).of_weight
    assert (weight.main_grad - 1 - true).norm() <= 1e-5 * true.norm()
    assert weight.grad_added_to_main_grad
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.data_ptr() == weight.main_grad.data_ptr()


def test_another_gradient_than_announced_is_refused() -> None:
    case = random_case(5, ROWS)
    weight = with_main_grad(case)

    def loss(upstream: float) -> Tensor:
        arguments = (case.hidden, weight, case.targets, 1.0, SHARD)
        return one_pass_loss(*arguments, lambda p, h, part: (p @ case.a[part], {}), upstream=upstream)[0]

    with pytest.raises(RuntimeError, match=r"arrived as 0\.5, but .* for upstream=1\.0"):
        (0.5 * loss(1.0)).backward()
    weight.main_grad.zero_()  # type: ignore[attr-defined]
    (0.5 * loss(0.5)).backward()
    case_without = random_case(5, ROWS, entropy=False)
    true = 0.5 * oracle(case_without).of_weight
    assert (weight.main_grad - true).norm() <= 1e-5 * true.norm()  # type: ignore[attr-defined]
    again = loss(0.5)
    (0.5 * again).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        (0.5 * again).backward()


def test_a_main_grad_that_is_not_fp32_is_left_alone() -> None:
    weight: Any = torch.zeros(4, 2, dtype=torch.bfloat16)
    weight.main_grad = torch.zeros(4, 2, dtype=torch.bfloat16)
    gradient = WeightGradient(weight)
    assert not gradient.in_main_grad
    assert gradient.sum.dtype == torch.float32
