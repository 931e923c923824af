"""Runs micro-batches through the pipeline by Megatron's schedules: forward passes alone, or forward and backward.

Shapes: C counted tokens of a packed row. All packed rows of a batch have equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func, schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from or1_megatron.interfaces import Objective
from or1_megatron.parallel.device_row import DeviceRow, gather_counted
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.parallel.row_loss import objective_loss, score_row
from or1_megatron.runtime.timeline import span


def _module(model: Any) -> PolicyModel:
    while not isinstance(model, PolicyModel):
        model = model.module
    return model


def _run(chunks: Sequence[torch.nn.Module], rows: Sequence[DeviceRow], loss: Any, forward_only: bool) -> list[Any]:
    def forward_step(rows_left: Any, chunk: torch.nn.Module) -> tuple[Tensor, Any]:
        row = next(rows_left)
        return chunk(row.token_ids[None], row.row), partial(loss, row, _module(chunk))

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(rows) if len(chunks) == 1 else [iter(rows) for _ in chunks],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=len(rows),
        seq_length=rows[0].row_tokens,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def forward_backward(
    chunks: Sequence[DistributedDataParallel], rows: Sequence[DeviceRow], objective: Objective, one_pass: bool = False
) -> list[tuple[Mapping[str, Tensor], Tensor]]:
    """Differentiate the objective's mean over all ranks' counted tokens; add the gradient to the gradient buffers.

    Megatron divides by the number of these tokens (``calculate_per_token_loss``). The last stage returns, for each
    micro-batch, (the objective's sums, log-probs and entropies [2, C]); other stages return [].
    """
    outputs = _run(chunks, rows, partial(objective_loss, objective, one_pass), forward_only=False)
    return [(sums, gather_counted(row, scored)) for row, (sums, scored) in zip(rows, outputs, strict=bool(outputs))]


@torch.no_grad()
def forward(chunks: Sequence[torch.nn.Module], rows: Sequence[DeviceRow], temperature: float) -> list[Tensor]:
    """Return log-probs and entropies [2, C] of every micro-batch on the last stage; return [] on other stages."""
    return _run(chunks, rows, partial(score_row, temperature), forward_only=True)


def time_schedules(stage: int, stages: int) -> None:
    """Make schedules record timeline spans of micro-batches and, if not interleaved, of exchanges between stages."""
    for name in ("forward_step", "backward_step"):
        setattr(schedules, name, _timed(getattr(schedules, name), stage=stage))
    to_before = dict.fromkeys(("recv_forward", "send_backward", "send_backward_recv_forward"), stage - 1)
    to_next = dict.fromkeys(("send_forward", "recv_backward", "send_forward_recv_backward"), stage + 1)
    for name, peer in (to_before | to_next).items():
        if 0 <= peer < stages:
            setattr(P2PCommunicator, name, _timed(getattr(P2PCommunicator, name), waits_for=f"stage {peer}"))


def _timed(inner: Callable[..., Any], **args: Any) -> Callable[..., Any]:
    @wraps(inner)
    def timed(*arguments: Any, **options: Any) -> Any:
        with span(inner.__name__, micro_batch=options.get("current_microbatch"), **args):
            result = inner(*arguments, **options)
            torch.cuda.current_stream().synchronize()  # else this would be the host's time, not the GPU's
            return result

    return timed
