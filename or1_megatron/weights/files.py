"""Checks the weight files of an HF folder against its config by their headers alone: no tensor is loaded.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON: name to dtype, shape and the
range of bytes), and the bytes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from or1_megatron.weights.families import ModelError, family_of
from or1_megatron.weights.table import HFConfig, tied

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file."""

    dtype: str
    """As the format spells it: BF16, F32, ..."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a safetensors file."""

    metadata: Mapping[str, str] | None
    tensors: Mapping[str, StoredTensor]
    size_bytes: int
    """Where the tensors' bytes begin in the file."""


def check_weight_files(folder: Path, hf: HFConfig) -> None:
    """Check that every tensor that the config implies is there, whole, with its shape, and no other.

    Raises:
        ModelError: names the file, or the tensor with what was found and what was expected; also for a model of an
            unknown architecture.
    """
    family = family_of(hf)
    wanted = family.shapes(hf)
    stored = {
        name: (path, tensor.shape)
        for path in _weight_files(folder)
        for name, tensor in read_header(path).tensors.items()
    }
    for name, shape in wanted.items():
        if name not in stored:
            missing = len(wanted.keys() - stored.keys())
            raise ModelError(f"{folder}: its safetensors lack {name} ({missing} of {len(wanted)} tensors are missing)")
        if stored[name][1] != shape:
            raise ModelError(f"{stored[name][0]}: {name} has shape {stored[name][1]}; config.json implies {shape}")
    # A tied model's files may hold the output layer too, and old files hold RoPE's frequencies.
    extra = {"lm_head.weight"} if tied(hf) else set()
    unknown = sorted(name for name in stored.keys() - wanted.keys() - extra if not name.endswith("inv_freq"))
    if unknown:
        raise ModelError(f"{stored[unknown[0]][0]}: {unknown[0]} is no tensor of a {family.architecture}")


def _weight_files(folder: Path) -> list[Path]:
    """Return a folder's safetensors files, after a check that those its index names are there."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} cannot be read ({error!r}); expected a JSON object with weight_map") from error
        if missing := [name for name in named if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder / missing[0]} is missing ({len(missing)} of {len(named)} files that {_INDEX} names): "
                "the download may be incomplete"
            )
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file; expected the model's weights in that format")
    return paths


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        ModelError: the header cannot be read, or the file is shorter or longer than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ModelError(f"{path} is no safetensors file, or cut: {size} bytes, of which {length} for the header")
        text = file.read(length)
    try:
        content = json.loads(text)
        metadata = content.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
            for name, entry in content.items()
        }
        end = max((tensor.end for tensor in tensors.values()), default=0)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{path} is no safetensors file: its header cannot be read ({error!r})") from error
    expected = _LENGTH_BYTES + length + end
    if size != expected:
        how = "cut: the download may be incomplete" if size < expected else "longer than its header says"
        raise ModelError(f"{path} has {size} bytes, but its header implies {expected}; it is {how}")
    return Header(metadata, tensors, _LENGTH_BYTES + length)
