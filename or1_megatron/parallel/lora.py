"""LoRA: trains only adapters, which it adds to Megatron's linears (arXiv 2106.09685).

A linear computes W x with its frozen weight, and a hook adds alpha / r * B (A x). Engines and exports get merged
weights, W + alpha / r * B A, made rectangle by rectangle where a weight is read.

Tensor parallelism cuts one of A and B, the factor with the linear's cut axis. Every rank holds a copy of the other
factor. With sequence parallelism and in experts, each rank computes only a part of the copied factor's gradient. The
mark ``sequence_parallel`` makes Megatron sum these parts over the ranks.

Shapes: T tokens on this process; r the adapters' rank; n the number of a fused linear's HF tensors that have adapters;
in and out, the sizes of this process's part of the linear.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.nn import Parameter

from or1_megatron.config.schema import ModelConfig
from or1_megatron.parallel.experts import GroupedProducts
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.model import PolicyModel
from or1_megatron.parallel.weights import ShardedWeights
from or1_megatron.weights.adapters import AdaptedRow, AdapterTable
from or1_megatron.weights.families import family_of
from or1_megatron.weights.files import base_digest
from or1_megatron.weights.slicing import Cut, cut


class Adapter(torch.nn.Module):
    """The adapters of one linear; the linear holds this module as its child ``adapter``.

    Args:
        linear: a Megatron linear, whose weight is this rank's part [out, in].
        of_row: [out] for each row of the weight, the index (among the linear's HF tensors) of the tensor with the row.
    """

    enabled: ClassVar[bool] = True
    """Whether all adapters of this process are used; ``policy.score_base`` switches them off while it scores."""

    def __init__(self, linear: Any, row: AdaptedRow, rank: int, scale: float, of_row: Tensor) -> None:
        super().__init__()
        weight = linear.weight
        out, width = weight.shape
        self.scale, self._alone, self._by_columns = scale, len(row.linear.hf) == 1, row.linear.cut is Cut.ROW
        self.lora_A = Parameter(weight.new_empty(rank * len(row.parts), width))
        self.lora_B = Parameter(weight.new_zeros(out, rank))
        self._mask = (of_row[:, None] == torch.tensor(row.parts)).to(weight)  # [out, n]
        for factor in (self.lora_A, self.lora_B):
            factor.allreduce = weight.allreduce  # type: ignore[attr-defined]  # False: experts have own gradient groups
        copied: Any = self.lora_B if self._by_columns else self.lora_A
        copied.sequence_parallel = linear.config.sequence_parallel

    def by_part(self, b: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return rows of B [out, r] as [rows, n * r]: r columns per HF tensor, zero but for the row's own tensor."""
        return b[rows] if self._alone else (self._mask.to(b)[rows, :, None] * b[rows, None]).flatten(1)

    def add_to(self, linear: Any, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Add the adapters' output to the linear's. This is the forward hook of linears outside of experts."""
        if not self.enabled:
            return outputs
        (x, *_), (y, bias), config = inputs, outputs, linear.config
        if hasattr(linear, "layer_norm_weight"):  # Transformer Engine's linear that norms its input
            gain = linear.layer_norm_weight + int(config.layernorm_zero_centered_gamma)
            x = torch.nn.functional.rms_norm(x, gain.shape, gain, config.layernorm_epsilon)
        if self._by_columns:
            whole = reduce_from_tensor_model_parallel_region, reduce_scatter_to_sequence_parallel_region
        else:
            whole = copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
        inner = whole[config.sequence_parallel](_product(x, self.lora_A)) * self.scale
        return y + _product(inner, self.by_part(self.lora_B)), bias

    def merged(self, values: Tensor, place: tuple[slice, ...], read: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``values``, the rectangle of the weight at ``place``, plus alpha / r * B A, in the same dtype."""
        a, b = (read(factor.detach()).float() for factor in (self.lora_A, self.lora_B))
        rows, columns = place
        return torch.addmm(values.float(), self.by_part(b, rows), a[:, columns], alpha=self.scale).to(values.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Map x [..., in] to x W^T [..., out]; the gradient of a parameter W goes to its main_grad."""
    flat = x.reshape(-1, x.shape[-1])
    product: Tensor = GroupedProducts.apply(flat, [len(flat)], weight)
    return product.view(*x.shape[:-1], -1)


class Adapters:
    """Makes this rank's adapters, by ``model.lora``; freezes the model. Its ShardedWeights then return merged weights.

    Raises:
        ModelError: a target matches no linear, or the folder to start from does not fit the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        hf: Mapping[str, Any],
        chunks: Sequence[PolicyModel],
        base: ShardedWeights,
        mesh: Mesh,
        chunk_layers: Sequence[range],
    ) -> None:
        assert model.lora is not None
        self._lora, self._hf_folder, family = model.lora, model.hf, family_of(hf)
        self.base = {"folder": str(model.hf), "digest": base_digest(model.hf)}
        """Folder and digest of the model that the adapters are for."""
        self.table = AdapterTable(family, hf, model.lora.rank, model.lora.targets)
        shapes, scale = family.shapes(hf), model.lora.alpha / model.lora.rank
        modules: dict[int, Any] = {id(m.weight): m for c in chunks for m in c.modules() if hasattr(m, "weight")}
        linears = {row.megatron: modules[id(weight)] for row, weight in base.local_rows() if id(weight) in modules}
        for chunk in chunks:
            chunk.requires_grad_(False)
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_with_gradient)
        for row in (row for row in self.table.adapted if row.linear.megatron in linears):
            linear = linears[row.linear.megatron]
            labels = [torch.full((shapes[name][0], 1), part) for part, name in enumerate(row.linear.hf)]
            of_row = cut(row.linear.layout.fuse(labels, hf), row.b.cut, mesh.tensor_rank, mesh.tensor)[:, 0]
            linear.adapter = base.adapters[row.linear.megatron] = Adapter(linear, row, self.table.rank, scale, of_row)
            if row.linear.expert is None:  # ``experts`` computes the others
                linear.register_forward_hook(linear.adapter.add_to)
        self.weights = ShardedWeights(chunks, self.table, hf, mesh, chunk_layers)
        """The adapters, under their HF names."""
        self.weights.mark_cut_parameters()
        folder = model.lora.adapter
        self.weights.load_hf(self.new if folder is None else self.table.read(folder, model.hf, model.lora.alpha))

    def new(self, name: str) -> Tensor:
        """Return peft's initial values: for a factor A, uniform in +-1 / sqrt(in); for B, 0. ``name`` is the seed."""
        values = torch.zeros(self.table.shapes({})[name])
        bound = 1 / math.sqrt(values.shape[1])
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return values.uniform_(-bound, bound, generator=generator) if ".lora_A." in name else values

    def writer(self) -> Callable[[Path], None]:
        """Gather the adapters on rank 0; return a function that on rank 0 writes them to a new folder. Collective."""
        tensors = {name: tensor.cpu() for name, tensor in self.weights if tensor is not None}
        tensors = {name: tensor for name, tensor in tensors.items() if name in self.table.names}
        return lambda folder: self.table.write(folder, tensors, self._hf_folder, self._lora.alpha)


def _with_gradient(embedding: Any, ids: Any, hidden: Tensor) -> Tensor:
    """Make the layers' input require a gradient; otherwise layers that are recomputed would get no gradients."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden
