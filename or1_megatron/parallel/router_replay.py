"""Router replay (R3, arXiv 2510.11370): tokens are computed by the experts that the engine chose for them.

Only the choice is replayed. The weights of the chosen experts are the policy's own, from its router's logits, and their
gradient goes through them. Megatron's ``RouterReplay`` is not used: it is switched for all layers of a process at once
between forward and backward passes, which a pipeline's schedule mixes. Our object takes its place behind the same call,
and gets the experts with the row that the layer computes.

Shapes: T row tokens, t of them on this rank (T / CP, and T / CP / TP under sequence parallelism), L layers with experts
(of the whole model, of one rank), k experts of a token, E experts of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from or1_megatron.parallel.context_parallel import held_positions
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.types import Int64Array, MicroBatch, RoutedExperts
from or1_megatron.weights.table import Experts


@dataclass
class RowExperts:
    """The experts that compute this rank's tokens of one row."""

    chosen: Tensor  # [t, L, k]
    counted: Tensor  # [t] bool: the tokens whose predictions enter the loss
    rerouted: Tensor
    """[L]: how many counted tokens the policy would have sent to other experts, once a layer has computed the row."""


@dataclass(frozen=True)
class ExpertsPart:
    """Which part of a batch's routed experts one rank computes with."""

    data_rank: int
    context: tuple[int, int]
    """(rank, ranks) of context parallelism; below of sequence parallelism."""
    sequence: tuple[int, int]
    layers: tuple[int, ...]
    """Numbers of this rank's layers among the model's layers with experts."""
    mixture: Experts

    def cut(self, rows: Sequence[MicroBatch]) -> list[RoutedExperts] | None:
        """Return this rank's [t, L, k] of each row of its data-parallel rank; None if the rows have no experts."""
        return [self._of_row(row, row.routed_experts) for row in rows if row.routed_experts is not None] or None

    def _of_row(self, row: MicroBatch, routed: Sequence[RoutedExperts]) -> RoutedExperts:
        """Tokens that no engine has computed get any experts, in turn: padding, and the last token of each sequence.
        Nothing that counts depends on them."""
        positions, chosen = self._positions(row), self.mixture.chosen
        in_turn = (positions[:, None] * chosen + np.arange(chosen)) % self.mixture.count
        smallest = np.uint8 if self.mixture.count <= 256 else np.uint16
        found: RoutedExperts = np.repeat(in_turn[:, None].astype(smallest), len(self.layers), axis=1)
        for start, experts in zip(row.cu_seqlens.tolist(), routed, strict=False):  # the row's padding has none
            mine = (positions >= start) & (positions < start + len(experts))
            found[mine] = experts[np.ix_(positions[mine] - start, self.layers)]
        return found

    def _positions(self, row: MicroBatch) -> Int64Array:
        """Return the positions [t] of this rank's tokens in a row."""
        rank, ranks = self.context
        if ranks > 1:
            positions: Int64Array = held_positions(row.cu_seqlens.tolist(), rank, ranks).numpy()
        else:
            positions = np.arange(row.token_ids.size)
        rank, ranks = self.sequence
        return positions.reshape(ranks, -1)[rank]

    def on_device(self, row: MicroBatch, experts: RoutedExperts, device: torch.device) -> RowExperts:
        """Return what ``cut`` gave for a row, for the layers."""
        counted = torch.from_numpy(row.loss_mask[self._positions(row)])
        chosen = torch.from_numpy(experts.astype(np.int16))  # torch indexes with no unsigned 16-bit numbers
        return RowExperts(chosen.to(device), counted.to(device), torch.zeros(len(self.layers), device=device))


def experts_part(mesh: Mesh, mixture: Experts, layers: Iterable[int], sequence: bool) -> ExpertsPart:
    """Return this rank's part: ``layers`` are the numbers in the model of all its layers."""
    return ExpertsPart(
        data_rank=mesh.data_rank,
        context=(mesh.context_rank, mesh.context),
        sequence=(mesh.tensor_rank, mesh.tensor) if sequence else (0, 1),
        layers=tuple(mixture.layers.index(layer) for layer in layers if layer in mixture.layers),
        mixture=mixture,
    )


def replay_in(chunks: Iterable[torch.nn.Module]) -> None:
    """Let this rank's layers with experts, in the order of ``ExpertsPart.layers``, compute with a row's experts."""
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]  # type: ignore[union-attr]
    for index, layer in enumerate(layers):
        replay = _Replay(index)
        layer.mlp.router.router_replay = replay
        layer.register_forward_pre_hook(replay.begin, with_kwargs=True)


class _Replay:
    """A router's choice. Megatron's routing calls ``get_replay_topk`` where it would choose."""

    layer_number: int | None = None  # Megatron sets it

    def __init__(self, index: int) -> None:
        self._index = index
        self._row: RowExperts | None = None
        self._again = False
        self._waiting: deque[RowExperts | None] = deque()

    def begin(self, layer: Any, args: Any, named: Mapping[str, Any]) -> None:
        """Take the row that a layer is about to compute; recomputed as a whole, it comes here again."""
        self._row = named["packed_seq_params"].experts
        self._again = layer.training and layer.mlp.moe_layer_recompute

    def get_replay_topk(
        self,
        scores: Tensor,  # [t, E]
        chosen: int,
        groups: int | None,
        chosen_groups: int | None,
        own_choice: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers [t, k] of the experts that compute the tokens.

        Where experts alone are recomputed, a second call for each row comes in the backward pass, when the layer may
        have computed further rows; rows go backward in the order in which they went forward.
        """
        row = self._row
        if self._again and torch.is_grad_enabled():
            row = self._waiting.popleft()
        elif self._again:
            self._waiting.append(row)
        if row is None:
            return own_choice(scores, chosen, groups, chosen_groups)
        experts = row.chosen[:, self._index].long()
        with torch.no_grad():
            own = own_choice(scores, chosen, groups, chosen_groups)[1]
            others = (own.sort(dim=1).values != experts.sort(dim=1).values).any(dim=1)
            row.rerouted[self._index] = (others & row.counted).sum()
        return scores.gather(1, experts), experts


def rerouted(rows: Iterable[RowExperts | None], part: ExpertsPart | None) -> dict[str, float]:
    """Return this rank's part of the sum ``rerouted``: counted tokens x layers, over the model's layers with experts,
    whose experts the policy would have chosen otherwise; {} if no experts were given."""
    given = [row for row in rows if row is not None]
    if not given or part is None:
        return {}
    return {"rerouted": float(torch.stack([row.rerouted.sum() for row in given]).sum()) / len(part.mixture.layers)}
