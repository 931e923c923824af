"""Finds weights that differ between data-parallel replicas, which hold copies of the same parameters.

A flipped bit in one rank's copy of a weight does not change the other copies. The replicas drift apart, but the step's
metrics hardly show it, because they are means over replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.parallel.lockstep import raise_together
from or1_megatron.parallel.policy import MegatronPolicy

_NAMED = 5
_PIECE_BYTES = 16 << 20


class ReplicasDiffer(AgreedError, PartLost):
    """A parameter is not the same on all data-parallel ranks."""


def bit_sum(data: Tensor) -> Tensor:
    """Return the sum modulo 2**64 of a contiguous tensor's memory, read as 64-bit integers.

    The sum is an int64 scalar on the tensor's device. Any single flipped bit changes the sum. If the tensor's size or
    offset is no multiple of 8 bytes, the memory is read as bytes instead, piece by piece, because torch copies bytes to
    int64 before it adds them.
    """
    size, place = data.nbytes, data.storage_offset() * data.element_size()
    if size % 8 == place % 8 == 0:
        return data.view(-1).view(torch.int64).sum()
    pieces = data.view(-1).view(torch.uint8).split(_PIECE_BYTES)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def bit_sums(policy: MegatronPolicy) -> dict[str, int]:
    """Return the ``bit_sum`` of each parameter of this rank, by "CHUNK.NAME" (chunk number, Megatron's name)."""
    names, sums = [], []
    for number, chunk in enumerate(policy.networks):
        for name, parameter in chunk.named_parameters():
            names.append(f"{number}.{name}")
            sums.append(bit_sum(parameter.detach()))
    return dict(zip(names, torch.stack(sums).tolist(), strict=True)) if sums else {}


def check_replicas(policy: MegatronPolicy, step: int) -> None:
    """Compare the parameters of all data-parallel replicas; collective.

    Raises:
        ReplicasDiffer: on all ranks. The message names the parameters and the ranks that differ from the majority.
    """
    mesh = policy.mesh
    if mesh.data * mesh.context == 1:
        return
    place = (mesh.tensor_rank, mesh.pipeline_rank, mesh.expert_rank)
    raise_together(mesh, _difference(mesh.of_every_rank((mesh.rank, place, bit_sums(policy))), step))


def _difference(everyone: list[tuple[int, tuple[int, ...], Mapping[str, int]]], step: int) -> ReplicasDiffer | None:
    copies: dict[tuple[tuple[int, ...], str], dict[int, list[int]]] = {}
    for rank, place, sums in everyone:
        for name, value in sums.items():
            held = place if ".experts." in name else place[:2]  # expert ranks give different experts one name
            copies.setdefault((held, name), {}).setdefault(value, []).append(rank)
    wrong = []
    for (_, name), ranks_of in copies.items():
        if len(ranks_of) > 1:
            most = max(ranks_of.values(), key=len)
            other = sorted(rank for ranks in ranks_of.values() if ranks is not most for rank in ranks)
            wrong.append(f"{name} (rank {', '.join(map(str, other))} against {', '.join(map(str, most))})")
    if not wrong:
        return None
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return ReplicasDiffer(
        f"step {step}: {len(wrong)} parameters are not the same on all data-parallel ranks: "
        f"{'; '.join(wrong[:_NAMED])}{more}. A rank computed or remembers something wrong: look at its machine's "
        "memory and GPU (ECC errors)"
    )
