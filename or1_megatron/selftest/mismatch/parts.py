"""Compares the weights and rotary frequencies of engine and policy with those of HF folders, and says what differs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from or1_megatron.types import Float32Array, Int32Array
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.files import weight_files
from or1_megatron.weights.rope import rope_frequencies
from or1_megatron.weights.table import HFConfig, ModelFamily

_EQUAL = 1e-6
"""Relative difference up to which two tensors count as equal."""


def wrong_weights(held: Iterable[tuple[str, Tensor | None]], folders: Mapping[int, Path], right: int) -> Iterator[str]:
    """Yield a phrase for each tensor in ``held`` not of version ``right``. ``folders``: HF folders, by version."""
    files = {version: _opened(folder) for version, folder in folders.items()}
    for name, tensor in held:
        if tensor is None or name not in files[right]:  # experts may be stored in one tensor
            continue
        known = {v: f[name].get_tensor(name).to(tensor.dtype).float() for v, f in files.items() if name in f}
        mine, wanted = tensor.float().cpu(), known.pop(right)
        same = [
            f"is of version {v}, not {right}" for v, other in sorted(known.items()) if _apart(mine, other) <= _EQUAL
        ]
        if not _apart(mine, wanted) <= _EQUAL:
            yield f"{name} {same[-1] if same else _what(name, mine, wanted, folders[right])}"


@cache
def _opened(folder: Path) -> dict[str, Any]:
    files = [safe_open(path, framework="pt") for path in weight_files(folder)]
    return {name: file for file in files for name in file.keys()}  # noqa: SIM118


def _what(name: str, held: Tensor, right: Tensor, folder: Path) -> str:
    if held.std() == 0:
        return f"is {held.flatten()[0]:g} everywhere, as if it were left out"
    if _apart(held, right.bfloat16().float()) <= _EQUAL:
        return "is rounded to bfloat16"
    scale = float((held * right).sum() / right.square().sum())
    if _apart(held, scale * right) <= 1e-2 * abs(scale - 1):
        return f"is {scale:.4g} times what it should be"
    size = ModelFamily.head_dim(read_hf_config(folder))
    theirs, ours = (each.split(size, dim=1 if "o_proj" in name else 0) for each in (held, right))
    places = [next((i for i, head in enumerate(ours) if torch.equal(head, one)), None) for one in theirs]
    if None not in places:
        moved = [str(at) for at, place in enumerate(places) if at != place]
        return f"has its heads {', '.join(moved)} in each other's places"
    return f"differs by {_apart(held, right):.2g} of its size"


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-30)) if one.shape == other.shape else float("inf")


def wrong_rotation(frequencies: Tensor, hf: HFConfig) -> list[str]:
    """Return a phrase if rotary frequencies (in radians per token, one per pair of channels) are not the model's."""
    right, tolerance = rope_frequencies(hf)[0], 8 * torch.finfo(frequencies.dtype).eps + 1e-5
    held = frequencies.float().cpu()
    if held.shape != right.shape or ((held / right - 1).abs() <= tolerance).all():
        return []
    bases = [float(each[1]) ** -len(right) for each in (held, right) if each.any()]
    return [f"is as with a base of {bases[0]:.4g}, not {bases[1]:.4g}" if len(bases) > 1 else "is all zero"]


def held_in_engine(worker: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, values) of the tensors that a vLLM worker of one device computes with.

    On CPU, vLLM packs a linear's weight, so the weight is read from the linear's output for the identity matrix.
    Packed experts are left out, and so are tensors whose values vLLM's loader changes.
    """
    from or1_megatron.handoff.vllm.parameter_check import targets

    trace = worker.weight_transfer_engine._connection._trace
    modules: dict[str, Any] = dict(worker.model_runner.model.named_modules())
    for name, whole in trace.tensors.items():
        for target in targets(whole, trace):
            module = modules[target.module]
            held = module._parameters.get(target.parameter)
            if hasattr(module, "cpu_linear") and target.parameter == "weight" and len(target.shape) == 2:
                identity = torch.eye(target.shape[1], dtype=whole.dtype)
                held = module.cpu_linear(identity, module.weight, None).t().contiguous()
            if held is not None and tuple(held.shape) == target.shape and target.of(held).shape == whole.shape:
                yield name, target.of(held.data)


@torch.no_grad()
def parts_of_engine(
    folders: Mapping[int, Path], right: int, tokens: Int32Array, names: Collection[str], engine: Any
) -> tuple[dict[str, list[str]], dict[str, Float32Array]]:
    """Return what is wrong in a VllmEngine, by part, and the outputs of its modules ``names`` for ``tokens``."""
    worker = engine._engine.model_executor.driver_worker.worker
    model, hf, rotary = worker.model_runner.model, read_hf_config(folders[right]), []
    for module in model.modules():
        if (table := getattr(module, "cos_sin_cache", None)) is not None:
            cos, sin = table[1].float().chunk(2)
            rotary += wrong_rotation(torch.atan2(sin, cos).to(table.dtype), hf)
    weights = list(wrong_weights(held_in_engine(worker), folders, right))
    found = {"dtype": [str(next(model.parameters()).dtype)], "weights": weights, "rotary": rotary}
    return found, outputs(model, lambda: engine._score_afresh(tokens), names)


def parts_of_policy(network: Any, folders: Mapping[int, Path], right: int) -> dict[str, list[str]]:
    """Return what is wrong in a policy (``parallel.network.Network``) by part."""
    tables = [getattr(module, "inverse_frequency", None) for chunk in network.chunks for module in chunk.modules()]
    return {
        "dtype": [str(next(network.chunks[0].parameters()).dtype)],
        "weights": list(wrong_weights(network.weights, folders, right)),
        "rotary": [wrong for table in tables if table is not None for wrong in wrong_rotation(table, network.hf)],
    }


@torch.no_grad()
def outputs(model: torch.nn.Module, run: Callable[[], Any], names: Collection[str]) -> dict[str, Float32Array]:
    """Call ``run`` and return the outputs [T, D] of the modules ``names`` of ``model``, in the order of calls."""
    found: dict[str, Float32Array] = {}

    def keep(name: str, module: Any, given: Any, output: Any) -> None:
        value = output[0] if isinstance(output, tuple) else output  # (result, bias or residual)
        rows = value.detach().float().cpu().reshape(-1, value.shape[-1]).numpy().copy()
        if name not in found or len(rows) > len(found[name]):  # logits: of the prompt, not of the last token alone
            found[name] = rows

    modules = [(name, module) for name, module in model.named_modules() if name in names]
    hooks = [module.register_forward_hook(partial(keep, name)) for name, module in modules]
    run()
    for hook in hooks:
        hook.remove()
    return found
