"""What a rank's policy holds on its device, moved to the host and back, so that colocated engines find room.

Megatron keeps many tensors as views of few storages: with its distributed optimizer every parameter is a view of one
flat buffer, every ``main_grad`` always is. So what is moved are storages: one is copied out and resized to nothing, and
comes back into the same storage object, so that every view of it is valid again and no name has to be bound anew. While
a storage is away its views must not be read: they point nowhere. :meth:`Offload.require` says so in words, and
:meth:`Offload.readable` gives what they would read.

Megatron's own ``offload_to_cpu`` binds an optimizer's tensors to new memory instead. In fp32 the distributed
optimizer's tensors are views of the parameters, and would part from them: the step would then update copies.
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
"""Host memory is taken in slabs of this size: torch's allocator of page-locked memory rounds up to a power of two,
which for one buffer of all parameters could be nearly twice what they need."""

Thing = Literal["parameters", "gradients", "optimizer"]


class HostCopy:
    """The bytes of storages that are away from the device, and the storages they go back to.

    The slabs, page-locked where there is CUDA, are kept when the storages are back: only the first turn pays for them.
    """

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[Tensor] = []  # uint8
        self._away: list[tuple[UntypedStorage, int]] = []  # with their sizes in bytes
        self._first: dict[int, int] = {}  # of each storage that is away, where in the slabs its bytes begin

    def __bool__(self) -> bool:
        """Whether anything is away."""
        return bool(self._away)

    def take(self, storages: Sequence[UntypedStorage]) -> int:
        """Copy the storages to the host and free them on the device; the bytes moved."""
        sizes = [storage.nbytes() for storage in storages]
        self._grow(sum(sizes))
        torch.cuda.synchronize()  # whatever still writes to them, on any stream
        for on_device, on_host in self._pieces(storages):
            on_host.copy_(on_device, non_blocking=True)
        torch.cuda.synchronize()
        self._away = list(zip(storages, sizes, strict=True))
        ends = itertools.accumulate(sizes)
        self._first = {s._cdata: end - size for s, size, end in zip(storages, sizes, ends, strict=True)}
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()  # what torch merely keeps for itself, the engines cannot have
        return sum(sizes)

    def give_back(self) -> int:
        """Make the storages anew on the device and fill them as they were; the bytes moved."""
        for storage, size in self._away:
            storage.resize_(size)
        storages = [storage for storage, _ in self._away]
        for on_device, on_host in self._pieces(storages):
            on_device.copy_(on_host, non_blocking=True)
        torch.cuda.synchronize()  # the slabs are free to be overwritten when this returns
        self._away, self._first = [], {}
        return sum(storage.nbytes() for storage in storages)

    def read(self, tensor: Tensor) -> Tensor | None:
        """The values of a contiguous tensor whose storage is away (views of the slabs where they can be); else None."""
        first = self._first.get(tensor.untyped_storage()._cdata)
        if first is None:
            return None
        assert tensor.is_contiguous(), f"a tensor of shape {tuple(tensor.shape)} that is not contiguous in its storage"
        pieces = self._range(first + int(tensor.storage_offset()) * tensor.element_size(), tensor.nbytes)
        aligned = len(pieces) == 1 and pieces[0].storage_offset() % tensor.element_size() == 0
        found = pieces[0] if aligned else torch.cat([torch.empty(0, dtype=torch.uint8), *pieces])
        return found.view(tensor.dtype).view(tensor.shape)

    def _range(self, begin: int, count: int) -> list[Tensor]:
        """``count`` bytes from ``begin`` on, slab by slab."""
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
        """(device bytes, host bytes): the storages one behind the other over the slabs, cut where either ends."""
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
    """Moves one rank's parameters, gradients and optimizer state off the device, each by itself, and back.

    Bit-exact but for gradients, which are dropped: they come back as zeros, which is what an update starts from. Each
    method is harmless to call twice, in any order with the others; it returns the bytes that it moved (0: none to).

    Args:
        chunks: this rank's model chunks.
        optimizer: over exactly these; a ChainedOptimizer as Megatron builds it, or a single one.

    Raises:
        ValueError: the buffers are registered with NCCL (``nccl_ub``), which must not be freed under it.
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer, slab_bytes: int = SLAB_BYTES
    ) -> None:
        if any(chunk.ddp_config.nccl_ub for chunk in chunks):
            raise ValueError("offload needs buffers that may be freed, but ddp_config.nccl_ub registers them with NCCL")
        self._chunks = list(chunks)
        self._optimizer = optimizer
        self._parameters = HostCopy(slab_bytes)
        self._state = HostCopy(slab_bytes)
        self._gradients: list[tuple[UntypedStorage, int]] = []  # released, with their sizes in bytes

    @property
    def away(self) -> frozenset[Thing]:
        """What is not on the device now."""
        held: dict[Thing, object] = {
            "parameters": self._parameters,
            "gradients": self._gradients,
            "optimizer": self._state,
        }
        return frozenset(thing for thing, away in held.items() if away)

    def require(self, action: str, *things: Thing) -> None:
        """Refuse an action whose tensors are away, instead of reading memory that is not theirs.

        Raises:
            RuntimeError: one of ``things`` is away.
        """
        missing = [thing for thing in things if thing in self.away]
        if missing:
            raise RuntimeError(f"{action} needs the {' and '.join(missing)}, offloaded to the host: restore first")

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor, or what it holds as a tensor on the host if that is where it is now: to be read, as by a save.

        It must be contiguous, and no gradient: those are nowhere while they are away.
        """
        for host_copy in (self._parameters, self._state):
            found = host_copy.read(tensor)
            if found is not None:
                return found
        return tensor

    def offload(self, *things: Thing) -> int:
        """Several things away, in the order given."""
        moves = {
            "parameters": self.offload_parameters,
            "gradients": self.offload_gradients,
            "optimizer": self.offload_optimizer,
        }
        return sum(moves[thing]() for thing in things)

    def restore(self, *things: Thing) -> int:
        """Several things back, in the order given."""
        moves = {
            "parameters": self.restore_parameters,
            "gradients": self.restore_gradients,
            "optimizer": self.restore_optimizer,
        }
        return sum(moves[thing]() for thing in things)

    # -- parameters ----------------------------------------------------------------------------------------------

    def offload_parameters(self) -> int:
        """Parameters to the host. Collective with ``overlap_param_gather``: a gather still under way ends first."""
        if self._parameters:
            return 0
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return self._parameters.take(self._parameter_storages())

    def restore_parameters(self) -> int:
        """Parameters back to the device."""
        return self._parameters.give_back() if self._parameters else 0

    def _parameter_storages(self) -> list[UntypedStorage]:
        return distinct_storages(p.data for chunk in self._chunks for p in chunk.module.parameters())

    # -- gradients -----------------------------------------------------------------------------------------------

    def offload_gradients(self) -> int:
        """Release the gradient buffers, and every gradient that the optimizer made of them; the bytes freed.

        Nothing is copied: gradients are spent once the optimizer has stepped.
        """
        if self._gradients:
            return 0
        self._optimizer.zero_grad()  # main gradients: views of the buffers, or fp32 copies of bf16 ones
        torch.cuda.synchronize()
        buffers = [buffer for chunk in self._chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        storages = distinct_storages(buffer.grad_data for buffer in buffers)
        self._gradients = [(storage, storage.nbytes()) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        torch.cuda.empty_cache()
        return sum(size for _, size in self._gradients)

    def restore_gradients(self) -> int:
        """Make the gradient buffers anew, all zeros."""
        made = 0
        for storage, size in self._gradients:
            storage.resize_(size)
            _bytes(storage).zero_()
            made += size
        self._gradients = []
        return made

    # -- optimizer -----------------------------------------------------------------------------------------------

    def offload_optimizer(self) -> int:
        """Master weights and moments to the host; without master weights (fp32 training) the moments."""
        return 0 if self._state else self._state.take(self._state_storages())

    def restore_optimizer(self) -> int:
        """Master weights and moments back to the device."""
        return self._state.give_back() if self._state else 0

    def _state_storages(self) -> list[UntypedStorage]:
        """What the optimizer owns: its state, and its parameters save those that are the model's or views of them."""
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        inner = [one.optimizer for one in chained if one.optimizer is not None]
        models = {storage._cdata for storage in self._parameter_storages()}
        return [s for s in distinct_storages(_optimizer_tensors(inner)) if s._cdata not in models]


def _optimizer_tensors(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from (p.data for p in group["params"])
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def _bytes(storage: UntypedStorage) -> Tensor:
    """All of a storage as uint8 [n bytes], sharing its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def distinct_storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The tensors' storages on the training device, each once, in order of appearance."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if tensor.device.type == device_type:
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())
