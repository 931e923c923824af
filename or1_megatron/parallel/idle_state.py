"""Finds parameters and optimizer state that have changed between two updates, when nothing writes to them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import UntypedStorage

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.parallel.collective_errors import raise_together
from or1_megatron.parallel.offload import Thing, storage_sums
from or1_megatron.parallel.policy import MegatronPolicy

_THINGS: tuple[Thing, ...] = ("parameters", "optimizer")


class StateChanged(AgreedError, PartLost):
    """A rank's parameters or optimizer state are not what they were at the handoff."""


class IdleState:
    """Remembers the sums of a rank's parameters and optimizer state on its device; HostCopy has those on the host."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy
        self._noted: dict[Thing, tuple[list[UntypedStorage], list[int]]] = {}

    def note(self) -> None:
        """Remember the present state."""
        host = self._policy.host
        storages = {thing: host.storages(thing) for thing in _THINGS if thing not in host.away}
        self._noted = {thing: (held, storage_sums(held)) for thing, held in storages.items()}

    def check(self, step: int, last: bool) -> None:
        """Compare the state, on the device or the host, with what it was; collective.

        Args:
            last: what was noted is no longer needed, and may be freed.

        Raises:
            StateChanged: on all ranks; names the ranks and what has changed.
        """
        mesh, host = self._policy.mesh, self._policy.host
        changed = [
            f"rank {mesh.rank}: the {thing}"
            for thing in _THINGS
            if not host.intact(thing) or (thing not in host.away and not self._as_noted(thing))
        ]
        if last:
            self._noted = {}
        found: list[Any] = [changed]
        if mesh.world > 1:
            found = [None] * mesh.world
            dist.all_gather_object(found, changed, group=mesh.control)
        everywhere = [each for one in found for each in one]
        error = StateChanged(
            f"after step {step}, bits changed although nothing wrote to them ({'; '.join(everywhere)}): look at that "
            "machine's memory and GPU (ECC errors)"
        )
        raise_together(mesh, error if everywhere else None)

    def _as_noted(self, thing: Thing) -> bool:
        storages, sums = self._noted.get(thing, ([], []))
        return storage_sums(storages) == sums
