"""What layers keep for the backward pass, measured by autograd's own hooks against the estimate's formula.

Not proven here: Transformer Engine's layers, whose attention and norms keep less than ours, and allocation on a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.mesh import Mesh
from or1_megatron.parallel.model import PolicyModel, transformer_config
from or1_megatron.parallel.packed import pack_row
from or1_megatron.sizing.memory import layer_numbers
from or1_megatron.weights.families import FAMILIES
from or1_megatron.weights.shape import Shape

Kind = Literal["none", "selective", "full"]
HF: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": 61,
    "max_position_embeddings": 1024,
}
TOKENS = 300


def kept_per_token(recompute: Kind, layers: int, mesh: Mesh) -> float:
    """Return the fp32 numbers, of which a model's forward pass saves storages for autograd, per token."""
    hf = {**HF, "num_hidden_layers": layers}
    family = FAMILIES["Qwen2ForCausalLM"]
    config = transformer_config(hf, family, ParallelConfig(recompute=recompute), "float32")
    model = PolicyModel(hf, family, config, mesh, "own", [range(layers)], 0).train()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Any] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights and tensor.dtype == torch.float32:
            saved[storage._cdata] = storage  # held, so that no other storage gets its address
        return tensor

    row = pack_row(torch.tensor([0, TOKENS], dtype=torch.int32), torch.arange(TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randint(0, 61, (1, TOKENS)), row)
    return sum(storage.nbytes() for storage in saved.values()) / 4 / TOKENS


def test_what_layers_keep(mesh: Mesh) -> None:
    """Two layers more keep twice what one layer does. With full recompute that is a layer's input, 64 numbers. Between
    none and selective lie gate, up and their product, 3 * 160 numbers: SwiGLU in one kernel keeps no fourth."""
    measured: dict[Kind, float] = {}
    for kind in ("none", "selective", "full"):
        measured[kind] = (kept_per_token(kind, 4, mesh) - kept_per_token(kind, 2, mesh)) / 2
    shape = Shape.of({**HF, "num_hidden_layers": 4, "tie_word_embeddings": True})
    expected = {kind: layer_numbers(ParallelConfig(), shape, kind, own=True) for kind in measured}
    assert measured["full"] == expected["full"] == 64
    assert measured["none"] - measured["selective"] == expected["none"] - expected["selective"] == 3 * 160
    # More than counted: two norms' statistics, and attention's, one for each head.
    assert measured["selective"] - expected["selective"] == 2 + 4


def test_worked_by_hand() -> None:
    """A 32B's layer over TP 8 with sequence parallelism: 5120 / 8 = 640; (2 * 40 + 2 * 8) * 128 / 8 = 1536; 27648 / 8 =
    3456. 4 * 640 + 1536 = 4096; with 3 * 3456 it is 14,464."""
    shape = Shape(64, 5120, 27648, 40, 8, 128, 152064, 131072, False)
    parallel, kinds = ParallelConfig(ranks=8, tensor=8, sequence=True), ("none", "selective", "full")
    assert [layer_numbers(parallel, shape, kind) for kind in kinds] == [14_464, 4096, 640]
