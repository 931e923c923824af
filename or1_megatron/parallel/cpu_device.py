"""Lets Megatron-Core run without CUDA: Megatron's calls of ``torch.cuda`` use the CPU.

Megatron writes ``device="cuda"`` and ``torch.cuda.current_device()`` throughout. On a machine with CUDA this module
does nothing. Elsewhere it maps the CUDA device to the CPU, streams and synchronisation to nothing, and the CUDA random
generator to the CPU's. Only trainer processes import this module; engines never do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from or1_megatron.runtime.host_memory import return_large_blocks

CPU = torch.device("cpu")
_installed = False


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces the CUDA device by the CPU in every torch call."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **(kwargs or {}))


class _NoStream:
    """Stands for a CUDA stream, event or context on the CPU, where work is done as soon as a call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: object = None) -> _NoStream:
        return self

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exc: object) -> None: ...


def _answering(value: Callable[[], Any]) -> Callable[..., Any]:
    """Return a new function that returns ``value()``, because torch's compiler tells functions apart by identity."""
    return lambda *args, **kwargs: value()


_CUDA_NAME = {"torch.FloatTensor": "torch.cuda.FloatTensor", "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor"}
_true_type = torch.Tensor.type


def _type_as_if_on_cuda(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``Tensor.type``. Without ``dtype``, return the CUDA type's name, which Megatron's optimizer expects."""
    if dtype is not None:
        return _true_type(tensor, dtype, *args, **kwargs)
    name = _true_type(tensor)
    return _CUDA_NAME.get(name, name)


def _uncompiled(function: Any = None, **options: Any) -> Any:
    """Stand for ``torch.compile``, as a function or as a decorator with options, and compile nothing."""
    return (lambda decorated: decorated) if function is None else function


def _set_cpu_rng_state(new_state: torch.Tensor, device: Any = None, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _get_cpu_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _patch_torch_cuda() -> None:
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats", "ipc_collect"):
        setattr(cuda, name, _answering(lambda: None))
    cuda.Stream = cuda.stream = cuda.device = _NoStream
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, _answering(_NoStream))
    cuda.current_device = lambda: CPU
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(cuda, name, _answering(lambda: 0))
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = _get_cpu_rng_state
    cuda.set_rng_state = cuda.random.set_rng_state = _set_cpu_rng_state


def _patch_tensor() -> None:
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *args, **kwargs: self
    tensor.type = _type_as_if_on_cuda
    module: Any = torch.nn.Module
    module.cuda = lambda self, *args, **kwargs: self


def _on_cpu_already(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert the experts' token counts to numpy if ``as_numpy``. Megatron's own function converts only GPU tensors."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _gather(
    even: Callable[..., torch.Tensor],
    mine: torch.Tensor,
    group: Any,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> torch.Tensor:
    """Concatenate all ranks' tensors [t, ...] on every rank, also if t differs by rank (gloo needs equal sizes).

    Megatron calls this function when tensor-parallel ranks that share an expert gather the expert's tokens.
    """
    if output_split_sizes is None or len(set(output_split_sizes)) == 1:
        return even(mine, group, output_split_sizes, use_global_buffer)
    parts = [mine.new_empty(size, *mine.shape[1:]) for size in output_split_sizes]
    parts[group.rank()] = mine.contiguous()
    for rank, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=rank)
    return torch.cat(parts)


def install_without_cuda() -> None:
    """Make Megatron run on the CPU in this process if there is no CUDA device. A second call does nothing."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    return_large_blocks()
    # Megatron compiles small functions. On CPU that takes a C++ compiler and a minute and gains nothing, and the
    # import of the compiler takes seconds.
    vars(torch)["compile"] = _uncompiled
    _patch_torch_cuda()
    _patch_tensor()
    _CudaMeansCpu().__enter__()
    import megatron.core.tensor_parallel.mappings as megatron_mappings
    import megatron.core.tensor_parallel.random as megatron_random
    import megatron.core.transformer.moe.token_dispatcher as megatron_dispatcher

    megatron_mappings._gather_along_first_dim = partial(_gather, megatron_mappings._gather_along_first_dim)
    megatron_dispatcher.maybe_move_tensor_to_cpu = _on_cpu_already
    megatron_random._set_cuda_rng_state = _set_cpu_rng_state
    megatron_random._get_cuda_rng_state = _get_cpu_rng_state
    _installed = True


def device() -> torch.device:
    """Return the device that this process trains on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU
