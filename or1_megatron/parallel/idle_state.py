"""Finds parameters and optimizer state that have changed between two updates, when nothing writes to them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import UntypedStorage

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.parallel.collective_errors import raise_together
from or1_megatron.parallel.offload import Thing, storage_sums
from or1_megatron.parallel.policy import MegatronPolicy


class StateChanged(AgreedError, PartLost):
    """A rank's parameters or optimizer state are not what the last update left."""


class IdleState:
    """Remembers the sums of a rank's parameters and optimizer state on its device. ``HostCopy`` does so on the host."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy
        self._noted: dict[Thing, tuple[list[UntypedStorage], list[int]]] = {}

    def note(self) -> None:
        """Remember the present state."""
        host = self._policy.host
        things: list[Thing] = [thing for thing in ("parameters", "optimizer") if thing not in host.away]
        storages = {thing: host.storages(thing) for thing in things}
        self._noted = {thing: (held, storage_sums(held)) for thing, held in storages.items()}

    def check(self, step: int) -> None:
        """Compare the state with what was noted, and forget it; collective. All of it must be on the device.

        Raises:
            StateChanged: on all ranks; names the ranks and what has changed.
        """
        mesh = self._policy.mesh
        changed = [
            f"rank {mesh.rank}: the {thing}"
            for thing, (storages, sums) in self._noted.items()
            if storage_sums(storages) != sums
        ]
        self._noted = {}
        found: list[Any] = [changed]
        if mesh.world > 1:
            found = [None] * mesh.world
            dist.all_gather_object(found, changed, group=mesh.control)
        everywhere = [each for one in found for each in one]
        error = StateChanged(
            f"after step {step} bits have changed while nothing wrote to them ({'; '.join(everywhere)}): look at that "
            "machine's memory and GPU (ECC errors)"
        )
        raise_together(mesh, error if everywhere else None)
