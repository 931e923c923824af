"""Reads an HF folder for conversion: safetensors files mapped into memory, and the files beside them.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON: name to dtype, shape and the range
of bytes), and the tensors' bytes (https://huggingface.co/docs/safetensors). The library pads the header with spaces to
a multiple of 8.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from or1_megatron.weights.files import DTYPES, INDEX, open_weights, weight_files
from or1_megatron.weights.stacked_experts import part_of

NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype (in safetensors' spelling) and shape of a tensor to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The header of a safetensors file to be written; ``entries`` are in the order of the tensors' bytes."""

    name: str
    metadata: Mapping[str, str] | None
    entries: tuple[TensorInfo, ...]

    def header(self) -> bytes:
        """Return the header's bytes, as the safetensors library writes them."""
        fields: dict[str, Any] = {} if self.metadata is None else {"__metadata__": dict(self.metadata)}
        begin = 0
        for entry in self.entries:
            end = begin + entry.size_bytes
            fields[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @property
    def size_bytes(self) -> int:
        return len(self.header()) + sum(entry.size_bytes for entry in self.entries)


class HFWeights:
    """Reads rows of an HF folder's tensors. Check the folder first with ``weights.files.check_weight_files``."""

    def __init__(self, folder: Path) -> None:
        self.files = {path: open_weights(path) for path in weight_files(folder)}
        self._tensors = {name: file.get_slice(name) for file in self.files.values() for name in file.keys()}  # noqa: SIM118
        self.dtypes: dict[str, str] = {name: tensor.get_dtype() for name, tensor in self._tensors.items()}
        self.shapes = {name: tuple(tensor.get_shape()) for name, tensor in self._tensors.items()}

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """Return ``count`` rows of the tensor ``name``, from row ``first`` on, [count, ...], without a copy."""
        if part := part_of(name):
            return part.of(self.rows(part.stack, part.expert, 1)[0])[first : first + count].contiguous()
        rows: Tensor = self._tensors[name][first : first + count]
        return rows


def metadata_of(path: Path) -> dict[str, str] | None:
    """Return the metadata of a complete safetensors file, in the file's order; the library would reorder the keys."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return header.get("__metadata__")


def carried(folder: Path) -> list[Path]:
    """Return the files of an HF folder except its weights: configs, tokenizer, chat templates, model card.

    Other folders, hidden files, weights in any format and the index (which is written anew) are left out.
    """
    return [
        path
        for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")])
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHTS and path.name != INDEX
    ]


def carry(folder: Path, paths: Sequence[Path], target: Path) -> None:
    """Copy files of ``folder`` to the same relative paths in the folder ``target``."""
    for path in paths:
        copy = target / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def index_json(files: Sequence[WeightFile]) -> str:
    """Return the text of the index file of an HF folder with several weight files."""
    total = sum(entry.size_bytes for file in files for entry in file.entries)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)


def packed(entries: Sequence[TensorInfo], max_bytes: int) -> list[WeightFile]:
    """Divide tensors, in order, into safetensors files of at most ``max_bytes``, with HF's file names.

    A tensor larger than ``max_bytes`` has a file to itself.
    """
    groups: list[list[TensorInfo]] = [[]]
    held = 0
    for entry in entries:
        if groups[-1] and held + entry.size_bytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(entry)
        held += entry.size_bytes
    count = len(groups)
    return [
        WeightFile(
            "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors",
            {"format": "pt"},
            tuple(sorted(group, key=lambda entry: (-DTYPES[entry.dtype].itemsize, entry.name))),
        )
        for i, group in enumerate(groups)
    ]
