"""Router replay (R3, arXiv 2510.11370): tokens are computed by the experts that the engine chose for them.

Only the choice is replayed. The weights of the chosen experts are the policy's own, from its router's logits, and the
gradient goes through these weights. Megatron's ``RouterReplay`` is not used: all layers of a process share its mode
(forward or backward), but a pipeline's schedule mixes both passes. Our ``_Replay`` has the same method and finds the
experts in the packed row that the layer computes.

Shapes: t tokens of a packed row on this rank (T / CP, and T / CP / TP under sequence parallelism), L layers with
experts (of the model, or of one rank), k experts of a token, E experts of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from or1_megatron.parallel.context_parallel import held_positions
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.packed import PackedRow
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Batch, MicroBatch, OwnExperts, RoutedExperts
from or1_megatron.weights.table import Experts


@dataclass(frozen=True)
class ExpertsPart:
    """Says which of a batch's recorded expert ids one rank uses: the ids for the rank's tokens and layers."""

    data_rank: int
    context: tuple[int, int]  # (rank, ranks) of context parallelism
    sequence: tuple[int, int]  # the same for sequence parallelism
    layers: tuple[int, ...]
    """This rank's layers with experts, as indices into the model's list of layers with experts."""
    mixture: Experts

    def cut(self, row: MicroBatch) -> OwnExperts:
        """Return the expert ids for this rank's tokens and layers in ``row``, a packed row of the rank's replica.

        Tokens that no engine has computed (padding, and the last token of each sequence) get experts round robin. These
        tokens do not affect any counted token.
        """
        assert row.routed_experts is not None
        positions = np.arange(row.token_ids.size)
        if self.context[1] > 1:
            positions = held_positions(row.cu_seqlens.tolist(), *self.context).numpy()
        positions = positions.reshape(self.sequence[1], -1)[self.sequence[0]]
        in_turn = (positions[:, None] * self.mixture.chosen + np.arange(self.mixture.chosen)) % self.mixture.count
        smallest = np.uint8 if self.mixture.count <= 256 else np.uint16
        found: RoutedExperts = np.repeat(in_turn[:, None].astype(smallest), len(self.layers), axis=1)
        for start, experts in zip(row.cu_seqlens.tolist(), row.routed_experts, strict=False):  # padding has none
            mine = (positions >= start) & (positions < start + len(experts))
            found[mine] = experts[np.ix_(positions[mine] - start, self.layers)]
        return found, row.loss_mask[positions]


def bring_experts(mesh: Mesh, parts: Sequence[ExpertsPart], batch: Batch | None) -> list[OwnExperts]:
    """Return, for each of this rank's packed rows, the expert ids for the rank's tokens and layers; collective.

    Args:
        parts: every rank's ExpertsPart.
        batch: the whole batch, on rank 0 only. Rank 0 sends the other ranks their parts, one rank after another.
    """
    if mesh.rank > 0:
        received: list[Any] = [None]
        dist.recv_object_list(received, 0, mesh.control)
        return list(unpack(received[0]))
    assert batch is not None
    for rank, part in enumerate(parts[1:], start=1):
        dist.send_object_list([pack([part.cut(row) for row in batch.ranks[part.data_rank]])], rank, mesh.control)
    return [parts[0].cut(row) for row in batch.ranks[parts[0].data_rank]]


def replay_in(chunks: Iterable[torch.nn.Module]) -> None:
    """Make each MoE layer of this rank use the packed row's recorded expert ids. Without ids, the router chooses.

    ``chunks`` must give the layers in the order of ``ExpertsPart.layers``.
    """
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers if isinstance(layer.mlp, MoELayer)]  # type: ignore[union-attr]
    for index, layer in enumerate(layers):
        replay = _Replay(index)
        layer.mlp.router.router_replay = replay
        layer.register_forward_pre_hook(replay.begin, with_kwargs=True)


class _Replay:
    """Chooses one layer's experts: Megatron's routing calls ``get_replay_topk`` instead of its own top-k."""

    layer_number: int | None = None  # Megatron sets it

    def __init__(self, index: int) -> None:
        self._index, self._again = index, False
        self._row: PackedRow | None = None
        self._waiting: deque[PackedRow] = deque()

    def begin(self, layer: Any, args: Any, named: Mapping[str, Any]) -> None:
        """Keep the packed row that the layer will compute. A recomputation of the whole layer calls this hook too."""
        self._row, self._again = named["packed_seq_params"], layer.training and layer.mlp.moe_layer_recompute

    def get_replay_topk(
        self, scores: Tensor, chosen: int, groups: Any, chosen_groups: Any, own_choice: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return (scores, ids) [t, k] of the experts that compute each token, from the router's ``scores`` [t, E].

        If only experts are recomputed, the backward pass calls this method again for each packed row. The layer may
        have computed further rows by then, so a queue keeps the rows. Backward passes run in the order of forward ones.
        """
        row = self._row
        assert row is not None
        if self._again and torch.is_grad_enabled():
            row = self._waiting.popleft()
        elif self._again:
            self._waiting.append(row)
        if row.experts is None:
            found: tuple[Tensor, Tensor] = own_choice(scores, chosen, groups, chosen_groups)
            return found
        experts = row.experts[:, self._index].long()
        with torch.no_grad():
            own = own_choice(scores, chosen, groups, chosen_groups)[1]
            others = (own.sort(dim=1).values != experts.sort(dim=1).values).any(dim=1)
            row.rerouted[self._index] = (others & row.counted).sum()
        return scores.gather(1, experts), experts


def rerouted(rows: Iterable[PackedRow], part: ExpertsPart | None) -> dict[str, float]:
    """Return {"rerouted": n / layers}; {} if no experts were replayed.

    ``n``: number of counted tokens for which the policy would have chosen other experts, summed over this rank's
    layers. ``layers``: number of layers with experts in the whole model.
    """
    counts = [count for row in rows for count in row.rerouted.values()]
    return {"rerouted": float(torch.stack(counts).sum()) / len(part.mixture.layers)} if counts and part else {}
