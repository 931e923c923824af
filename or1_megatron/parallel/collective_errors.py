"""Errors that rank 0 finds and all ranks raise, so that no rank waits for another."""

from __future__ import annotations

import torch.distributed as dist

from or1_megatron.errors import AgreedError
from or1_megatron.parallel.mesh import Mesh


def raise_together(mesh: Mesh, error: AgreedError | None) -> None:
    """Raise rank 0's error, if it has one, on every rank; collective. What other ranks pass is ignored."""
    errors = [error]
    if mesh.world > 1:
        dist.broadcast_object_list(errors, src=0, group=mesh.control)
    if errors[0] is not None:
        raise errors[0]
