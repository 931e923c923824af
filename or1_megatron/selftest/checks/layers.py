"""Transformer Engine's layers against ours: log-probs, gradient and three optimizer steps of one batch, in bf16."""

from __future__ import annotations

import torch

from or1_megatron.config.schema import ModelConfig, ParallelConfig
from or1_megatron.parallel.mesh import stop_process_group
from or1_megatron.parallel.parity import Deviation, compare, measure
from or1_megatron.selftest.checks.layouts import TOLERANCE, kind_in_words
from or1_megatron.selftest.models import OBJECTIVE, batch_of, one_rank, random_qwen2
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.plans import small_shape
from or1_megatron.sizing.parallel_layouts import LayerKind

LENGTHS = [900, 257, 64, 511, 30, 700]


def layers(context: Context) -> None:
    """Compare; the bounds are those of bf16 in ``or1 check-parity``."""
    apart = difference(context, ("own", "transformer_engine"))
    for kind, bound in TOLERANCE["bfloat16"].items():
        context.require(kind_in_words(kind), getattr(apart, kind), at_most=bound)
    context.measure("the tensor whose gradient differs most", apart.gradient_at)


def difference(context: Context, kinds: tuple[LayerKind, LayerKind]) -> Deviation:
    """Return how far the second kind of layers is from the first."""
    model = random_qwen2(small_shape(context.machine.cuda), context.folder)
    mesh = one_rank()
    numbers = []
    for kind in kinds:
        settings = ModelConfig(hf=model, dtype="bfloat16")
        batch = batch_of(LENGTHS, 1024, 1000)
        layout = ParallelConfig(layers=kind, micro_batch_tokens=1024)
        of_kind = measure(settings, layout, mesh, batch, range(len(LENGTHS)), OBJECTIVE)
        assert of_kind is not None  # this is rank 0
        numbers.append(of_kind)
        torch.cuda.empty_cache()
    stop_process_group()
    return compare(numbers[1], numbers[0])
