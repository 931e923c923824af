"""Builds the optimizer (AdamW), clips gradients, skips steps with non-finite loss or gradient, sets learning rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import megatron.core.optimizer as megatron_optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from torch import Tensor

from or1_megatron.config.schema import OptimizerConfig, ParallelConfig

_PIECE_NUMBERS: Final = 1 << 22
"""A step updates at most this many elements at once. Denominators for all parameters at the same time would take 4
bytes per parameter, more memory than the activations in the passes before the step."""


class FusedStepAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101, Algorithm 2) with one ``step`` count per parameter group, like Transformer Engine's.

    torch's AdamW has a count per parameter. Megatron's distributed optimizer needs one per group to load its state at
    another parallel layout.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **_: Any,
    ) -> None:
        """``_`` takes Megatron's other arguments for Transformer Engine's AdamW; the decay is always decoupled."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not group["params"]:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            if params:
                self._step_group(group, params)

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            assert p.grad is not None
            of_parameter = p, p.grad, self.state[p]["exp_avg"], self.state[p]["exp_avg_sq"]
            for piece in zip(*(tensor.view(-1).split(_PIECE_NUMBERS) for tensor in of_parameter), strict=True):
                _step_piece(group, *piece)


def _step_piece(group: Mapping[str, Any], p: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
    """Take AdamW's step on a piece of a parameter: change the piece and its two moments in place."""
    beta1, beta2 = group["betas"]
    first.lerp_(grad, 1 - beta1)
    second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1 = 1 - beta1 ** group["step"]
    correction2 = 1 - beta2 ** group["step"]
    denominator = second.sqrt().div_(correction2**0.5).add_(group["eps"])
    p.mul_(1 - group["lr"] * group["weight_decay"])
    p.addcdiv_(first, denominator, value=-group["lr"] / correction1)


def _use_own_adam() -> None:
    """Make Megatron build our AdamW where neither Transformer Engine nor apex is installed."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    module: Any = megatron_optimizer
    module.Adam = FusedStepAdamW
    module.USING_PYTORCH_OPTIMIZER = False


def build_optimizer(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, parallel: ParallelConfig, dtype: torch.dtype
) -> MegatronOptimizer:
    """Build Megatron's optimizer over the model chunks of this rank.

    Weight decay applies to every parameter, as in the released recipe, which uses torch's AdamW.
    """
    _use_own_adam()
    return megatron_optimizer.get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=0.0,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
        ),
        chunks,
        config_overrides={},
        use_gloo_process_groups=False,
    )


def clip_and_step(optimizer: Any, loss: float) -> tuple[float, bool]:
    """Clip the gradient and take the step; return (gradient norm before clipping, whether the step was skipped).

    The step is skipped if the loss or the gradient norm is not finite.
    """
    optimizer.prepare_grads()
    grad_norm = float(optimizer.get_grad_norm())
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        return grad_norm, True
    for chained in optimizer.chained_optimizers:
        clip = chained.config.clip_grad
        if clip > 0 and grad_norm > clip:
            for parameter in chained.get_parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(clip / (grad_norm + 1e-6))
    optimizer.step_with_ready_grads()
    return grad_norm, False


def learning_rate(config: OptimizerConfig, sgd_step: int) -> float:
    """Return the learning rate of SGD step ``sgd_step`` (from 0).

    The rate rises over ``warmup_steps``, then falls linearly to 0 at ``decay_steps``. If ``decay_steps`` is 0, the rate
    never falls.
    """
    if sgd_step < config.warmup_steps:
        return config.lr * (sgd_step + 1) / config.warmup_steps
    if config.decay_steps == 0:
        return config.lr
    left = config.decay_steps - sgd_step
    return config.lr * max(0.0, left / (config.decay_steps - config.warmup_steps))
