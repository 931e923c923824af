"""Folders of LoRA adapters in peft's format: adapter_config.json and adapter_model.safetensors.

Where peft's names have the base model's class in front, ours do not. A folder that was written here also names the
digest of its base, in the safetensors' metadata, which peft passes over.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.families import ModelError
from or1_megatron.weights.files import base_digest
from or1_megatron.weights.table import HFConfig

_CONFIG: Final = "adapter_config.json"
_TENSORS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
_BASE: Final = "base_digest"
_NAMED: Final = 4


def write_adapters(folder: Path, tensors: Mapping[str, Tensor], base: Path, table: AdapterTable, alpha: float) -> None:
    """Write the adapters of the model in ``base`` to a new folder. Raises OSError, SafetensorError."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": table.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": list(table.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    named = {_PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / _TENSORS, metadata={"format": "pt", _BASE: base_digest(base)})


class AdapterFolder:
    """Reads the tensors of a folder, also of one that peft wrote.

    Args:
        base: the HF folder of the model that the adapters are for.

    Raises:
        ModelError: the folder is no folder of adapters, or those of another base, rank, scale or of other linears; says
            all that differs.
    """

    def __init__(self, folder: Path, base: Path, hf: HFConfig, table: AdapterTable, alpha: float) -> None:
        self._shapes = table.shapes(hf)
        try:
            config = json.loads((folder / _CONFIG).read_text())
            self._file: Any = safe_open(folder / _TENSORS, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"model.lora.adapter = {folder} is no folder of adapters ({error}); expected {_CONFIG} and {_TENSORS}"
            ) from error
        if wrong := list(self._differences(config, base, table, alpha)):
            raise ModelError(f"model.lora.adapter = {folder} does not fit this run: {'; '.join(wrong)}")

    def _differences(self, config: Mapping[str, Any], base: Path, table: AdapterTable, alpha: float) -> Iterator[str]:
        for key, ours in (("peft_type", "LORA"), ("r", table.rank), ("lora_alpha", alpha)):
            if config.get(key) != ours:
                yield f"{_CONFIG} says {key} = {config.get(key)}; expected {ours}"
        if (self._file.metadata() or {}).get(_BASE) not in (None, base_digest(base)):
            yield f"its adapters are of another base than {base} (it was {config.get('base_model_name_or_path')})"
        held = {name.removeprefix(_PREFIX): name for name in sorted(self._file.keys())}
        for names, what in ((table.names - held.keys(), "it lacks"), (held.keys() - table.names, "it has also")):
            if names:
                yield f"{what} {', '.join(sorted(names)[:_NAMED])} ({len(names)} of {len(table.names)} tensors)"
        for name in sorted(table.names & held.keys()):
            if (shape := tuple(self._file.get_slice(held[name]).get_shape())) != self._shapes[name]:
                yield f"{name} has shape {shape}; expected {self._shapes[name]}"
                break
        self._held = held

    def get(self, name: str) -> Tensor:
        """Return a tensor; zeros for the B of a fused tensor without an adapter."""
        return self._file.get_tensor(self._held[name]) if name in self._held else torch.zeros(self._shapes[name])
