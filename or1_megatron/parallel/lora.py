"""LoRA: adapters beside Megatron's linears, which alone are trained (arXiv 2106.09685).

The linear computes W x with its frozen weight, and a hook adds alpha / r * B (A x). Engines and exports get merged
weights, W + alpha / r * B A, which are made rectangle by rectangle where a weight is read.

Shapes: T tokens of this rank, r rank, n HF tensors with an adapter of their own in a fused linear, in and out the sizes
of the rank's part of the linear. Tensor parallelism cuts the factor that lies along the linear's cut axis. Ranks hold
copies of the other factor, whose gradient is partial where each rank sees a part of the tokens or of the sum: under
sequence parallelism, and in experts. Megatron sums it over the ranks because of its mark ``sequence_parallel``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Parameter

from or1_megatron.config.schema import LoraConfig
from or1_megatron.parallel.experts import GroupedProducts
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.parallel.weights import ShardedWeights
from or1_megatron.weights.adapter_folder import AdapterFolder, write_adapters
from or1_megatron.weights.adapters import AdaptedRow, AdapterTable
from or1_megatron.weights.files import base_digest
from or1_megatron.weights.slicing import Cut, cut
from or1_megatron.weights.table import ModelFamily

Place = tuple[slice, ...]


class Adapter(torch.nn.Module):
    """The adapters of one linear: the linear's child ``adapter``.

    Args:
        linear: its weight is this rank's part [out, in].
        of_row: for each row of the weight, which of the linear's HF tensors it belongs to. [out]
    """

    def __init__(self, linear: torch.nn.Module, row: AdaptedRow, rank: int, scale: float, of_row: Tensor) -> None:
        super().__init__()
        weight: Any = linear.weight
        out, width = weight.shape
        self.rank, self.scale, self.parts = rank, scale, row.parts
        self.enabled = True
        self._by_columns = row.linear.cut is Cut.ROW
        self._alone = len(row.linear.hf) == 1
        made = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = Parameter(torch.empty(rank * len(row.parts), width, **made))
        self.lora_B = Parameter(torch.zeros(out, rank, **made))
        self.register_buffer("mask", (of_row[:, None] == torch.tensor(row.parts)).to(**made), persistent=False)
        for factor in (self.lora_A, self.lora_B):
            factor.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]  # False: of experts
        copied: Any = self.lora_B if self._by_columns else self.lora_A
        config: Any = linear.config
        copied.sequence_parallel = config.sequence_parallel

    def by_part(self, b: Tensor) -> Tensor:
        """Return B [out, r] as [out, n * r]: a row is zero but where its own HF tensor's A lies."""
        mask: Any = self.mask
        return b if self._alone else (mask.to(b)[:, :, None] * b[:, None]).flatten(1)

    def add_to(self, linear: torch.nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> Any:
        """Add the adapters' output to that of a dense linear: a forward hook of the linear."""
        if not self.enabled:
            return outputs
        (x, *_), (y, bias) = inputs, outputs
        config: Any = linear.config
        if hasattr(linear, "layer_norm_weight"):  # Transformer Engine's linear that norms its input
            gain: Any = linear.layer_norm_weight
            gain = gain + 1 if config.layernorm_zero_centered_gamma else gain
            x = torch.nn.functional.rms_norm(x, gain.shape, gain, config.layernorm_epsilon)
        if self._by_columns:
            added = reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
        else:
            added = copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
        inner = added[config.sequence_parallel](_product(x, self.lora_A)) * self.scale
        return y + _product(inner, self.by_part(self.lora_B)), bias

    def merged(self, values: Tensor, place: Place, part: int | None, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a rectangle of the weight with alpha / r * B A added, in the weight's dtype.

        Args:
            values: the rectangle, which lies at ``place`` in the rank's part.
            part: the HF tensor that the rectangle is of; None: of all.
            read: returns a parameter's values.
        """
        if part is not None and part not in self.parts:
            return values
        a, b = (read(factor.detach()).float() for factor in (self.lora_A, self.lora_B))
        if part is None:
            b = self.by_part(b)
        else:
            first = self.parts.index(part) * self.rank
            a = a[first : first + self.rank]
        rows, columns = place
        return torch.addmm(values.float(), b[rows], a[:, columns], alpha=self.scale).to(values.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x W^T: [..., in] to [..., out]; the gradient of a parameter W goes to its main_grad."""
    flat = x.reshape(-1, x.shape[-1])
    product: Tensor = GroupedProducts.apply(flat, [len(flat)], weight)
    return product.view(*x.shape[:-1], -1)


class Adapters:
    """All adapters on this rank. They freeze the model's own weights.

    Args:
        base: the model's own weights, which the adapters are merged into where they are read.

    Raises:
        ModelError: a target matches no linear, or the folder to start from does not fit the model.
    """

    def __init__(
        self,
        hf_folder: Path,
        lora: LoraConfig,
        hf: Mapping[str, Any],
        family: ModelFamily,
        chunks: Sequence[PolicyModel],
        base: ShardedWeights,
        mesh: Mesh,
        chunk_layers: Sequence[range],
    ) -> None:
        self._hf_folder, self._alpha = hf_folder, lora.alpha
        self.base = {"folder": str(hf_folder), "digest": base_digest(hf_folder)}
        """The model whose adapters these are; checkpoints hold it."""
        self.table = table = AdapterTable(family, hf, lora.rank, lora.targets)
        linears = {id(m.weight): m for chunk in chunks for m in chunk.modules() if hasattr(m, "weight")}
        held = {row.megatron: linears.get(id(weight)) for row, weight in base.local_rows()}
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_with_gradient)
        self._all: dict[str, Adapter] = {}
        shapes = family.shapes(hf)
        for row in table.adapted:
            linear: Any = held.get(row.linear.megatron)
            if linear is None:
                continue
            labels = [torch.full((shapes[name][0], 1), part) for part, name in enumerate(row.linear.hf)]
            of_row = cut(row.linear.layout.fuse(labels, hf), row.b.cut, mesh.tensor_rank, mesh.tensor)[:, 0]
            linear.adapter = Adapter(linear, row, lora.rank, lora.alpha / lora.rank, of_row)
            self._all[row.linear.megatron] = linear.adapter
            if row.linear.expert is None:  # ``experts`` computes the others
                linear.register_forward_hook(linear.adapter.add_to)
        base.adapters = self._all
        self.weights = ShardedWeights(chunks, table, hf, mesh, chunk_layers)
        """The adapters, under their HF names."""
        self.weights.mark_cut_parameters()
        start = lora.adapter
        self.weights.load_hf(
            NewAdapters(table.shapes(hf)) if start is None else AdapterFolder(start, hf_folder, hf, table, lora.alpha)
        )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Have the model compute as it does without adapters."""
        try:
            for adapter in self._all.values():
                adapter.enabled = False
            yield
        finally:
            for adapter in self._all.values():
                adapter.enabled = True

    def gathered(self) -> dict[str, Tensor]:
        """Gather the tensors of a file of adapters on rank 0's host; empty on other ranks. Collective."""
        return {name: tensor.cpu() for name, tensor in self.weights if tensor is not None and name in self.table.names}

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write what ``gathered`` returns as a folder in peft's format. Raises OSError, SafetensorError."""
        write_adapters(folder, tensors, self._hf_folder, self.table, self._alpha)


class NewAdapters:
    """Initial values as peft's: A uniform within 1 / sqrt(in), B zero. They depend on a tensor's name alone."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def get(self, name: str) -> Tensor:
        values = torch.zeros(self._shapes[name])
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            bound = 1 / math.sqrt(values.shape[1])
            values.uniform_(-bound, bound, generator=generator)
        return values


def _with_gradient(embedding: torch.nn.Module, ids: Any, hidden: Tensor) -> Tensor:
    """Let the layers' input have a gradient: layers that are computed again pass one on only then."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
