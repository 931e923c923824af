"""Moves a policy's parameters, gradients and optimizer state to the host and back: makes room for colocated engines.

Megatron keeps many tensors as views of few storages: every ``main_grad`` is a view of a flat buffer and, with the
distributed optimizer, every parameter too. So this module moves whole storages. It copies a storage to the host and
resizes the storage to nothing. Later the bytes return to the same storage object, and all views are valid again.
While a storage is away, its views must not be read: :meth:`Offload.require` raises an error, and
:meth:`Offload.readable` gives the values from the host.

Megatron's own ``offload_to_cpu`` binds an optimizer's tensors to new memory instead. In fp32 the distributed
optimizer's tensors are views of the parameters; if they were bound to other memory, the step would update copies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, UntypedStorage

SLAB_BYTES = 256 << 20
"""Host memory is allocated in slabs of this size. torch rounds page-locked memory up to a power of two, so a single
buffer for all parameters could take nearly twice their bytes."""

Part = Literal["parameters", "gradients", "optimizer"]


class HostCopy:
    """Holds the bytes of storages that are away from the device.

    The host memory (slabs, page-locked with CUDA) stays allocated when the storages are back, for the next time. With
    ``drop`` no bytes are kept, and the storages come back as zeros.
    """

    def __init__(self, slab_bytes: int = SLAB_BYTES, drop: bool = False) -> None:
        self._slab_bytes, self._drop = slab_bytes, drop
        self._slabs: list[Tensor] = []  # uint8
        self._away: list[tuple[UntypedStorage, int]] = []  # with their sizes in bytes
        self._first: dict[int, int] = {}  # by storage that is away: where its bytes begin in the slabs

    def __bool__(self) -> bool:
        """Return whether any storage is away from the device."""
        return bool(self._away)

    def take(self, storages: Sequence[UntypedStorage]) -> int:
        """Copy the storages to the host and free them on the device; return the number of bytes moved."""
        sizes = [storage.nbytes() for storage in storages]
        torch.cuda.synchronize()  # until no stream writes to them any more
        if not self._drop:
            self._grow(sum(sizes))
            for on_device, on_host in self._pieces(storages):
                on_host.copy_(on_device, non_blocking=True)
            torch.cuda.synchronize()
            ends = itertools.accumulate(sizes)
            self._first = {s._cdata: end - size for s, size, end in zip(storages, sizes, ends, strict=True)}
        self._away = list(zip(storages, sizes, strict=True))
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()  # the engines cannot use what torch keeps in its cache
        return sum(sizes)

    def give_back(self) -> int:
        """Allocate the storages on the device again and restore their bytes; return the number of bytes moved."""
        storages = [storage for storage, _ in self._away]
        for storage, size in self._away:
            storage.resize_(size)
            if self._drop:
                _bytes(storage).zero_()
        if not self._drop:
            for on_device, on_host in self._pieces(storages):
                on_device.copy_(on_host, non_blocking=True)
            torch.cuda.synchronize()  # the slabs may be overwritten when this returns
        self._away, self._first = [], {}
        return sum(storage.nbytes() for storage in storages)

    def read(self, tensor: Tensor) -> Tensor | None:
        """Return a contiguous tensor's values from the host, if possible as a view; None if the tensor is not away."""
        first = self._first.get(tensor.untyped_storage()._cdata)
        if first is None:
            return None
        assert tensor.is_contiguous(), f"a tensor of shape {tuple(tensor.shape)} that is not contiguous in its storage"
        pieces = self._range(first + int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes)
        aligned = len(pieces) == 1 and pieces[0].storage_offset() % tensor.element_size() == 0
        values = pieces[0] if aligned else torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
        return values.view(tensor.dtype).view(tensor.shape)

    def _range(self, begin: int, count: int) -> list[Tensor]:
        """Return the slabs' bytes from ``begin`` to ``begin + count``, as one tensor per slab."""
        pieces = []
        for slab in self._slabs:
            piece = slab[max(begin, 0) : max(begin + count, 0)]
            pieces += [piece] if piece.numel() else []
            begin -= slab.numel()
        return pieces

    def _grow(self, total: int) -> None:
        missing = total - sum(slab.numel() for slab in self._slabs)
        while missing > 0:
            size = min(missing, self._slab_bytes)
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
            missing -= size

    def _pieces(self, storages: Sequence[UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (uint8 piece of a storage, the piece's place in a slab). A piece ends where storage or slab ends."""
        slabs = iter(self._slabs)
        free = torch.empty(0, dtype=torch.uint8)
        for storage in storages:
            left = _bytes(storage)
            while left.numel():
                if not free.numel():
                    free = next(slabs)
                n = min(left.numel(), free.numel())
                yield left[:n], free[:n]
                left, free = left[n:], free[n:]


class Offload:
    """Moves one rank's parameters, gradients and optimizer state to the host and back, together or separately.

    Parameters and optimizer state return bit for bit. Gradients are not needed after the optimizer's step, so they are
    dropped and return as zeros. Offloading a part that is away does nothing, and restoring a part that is on the device
    does nothing.

    Args:
        chunks: this rank's model chunks.
        optimizer: the optimizer of exactly these chunks, Megatron's ChainedOptimizer or a single optimizer.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, slab_bytes: int = SLAB_BYTES
    ) -> None:
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._parameters, self._state = HostCopy(slab_bytes), HostCopy(slab_bytes)
        parts = self._parameters, HostCopy(drop=True), self._state
        self._held: dict[Part, HostCopy] = dict(zip(("parameters", "gradients", "optimizer"), parts, strict=True))

    @property
    def away(self) -> frozenset[Part]:
        """The parts that are not on the device now."""
        return frozenset(part for part, away in self._held.items() if away)

    def require(self, action: str, *parts: Part) -> None:
        """Raise an error if a part that ``action`` needs is away, because the action would read freed memory.

        Raises:
            RuntimeError: one of ``parts`` is away.
        """
        missing = [part for part in parts if part in self.away]
        if missing:
            raise RuntimeError(f"{action} needs the {' and '.join(missing)}, offloaded to the host: restore first")

    def readable(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself or, while it is away, a host tensor with the same values. Do not change the result.

        The tensor must be contiguous and not a gradient, because gradients have no values while they are away.
        """
        values = self._parameters.read(tensor)
        values = self._state.read(tensor) if values is None else values
        return tensor if values is None else values

    def offload(self, *parts: Part) -> int:
        """Move parts off the device, in the given order; return the number of bytes moved. Skip parts that are away.

        The part "optimizer" has the master weights and moments; fp32 training has no master weights, only moments.
        """
        moved = 0
        for part in parts:
            if part in self.away:
                continue
            if part == "gradients":
                self._optimizer.zero_grad()  # main gradients: views of the buffers, or fp32 copies of bf16 ones
            moved += self._held[part].take(self.storages(part))
        return moved

    def restore(self, *parts: Part) -> int:
        """Bring parts back to the device, in the given order; return the number of bytes moved."""
        return sum(self._held[part].give_back() for part in parts)

    def storages(self, part: Part) -> list[UntypedStorage]:
        """Return the storages of a part, which must be on the device."""
        if part == "parameters":
            return distinct_storages(p.data for chunk in self._chunks for p in chunk.module.parameters())
        if part == "gradients":
            buffers = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
            return distinct_storages(buffer.grad_data for buffer in buffers)
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        inner = [one.optimizer for one in chained if one.optimizer is not None]
        models = {storage._cdata for storage in self.storages("parameters")}  # left out, views included
        return [s for s in distinct_storages(_optimizer_tensors(inner)) if s._cdata not in models]


def _optimizer_tensors(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (p.data for p in group["params"])
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(storage: UntypedStorage) -> Tensor:
    """Return the bytes of a whole storage as a uint8 tensor [bytes] that shares the storage's memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the distinct storages of the tensors that are on the training device, in order of appearance."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    storages: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device_type:
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
    return list(storages.values())
