"""HF's side: safetensors files as maps of memory, the files beside them, and what a folder looked like.

A safetensors file is the header's length (8 bytes, little-endian), the header (JSON: name to dtype, shape and range of
bytes; padded with spaces to a multiple of 8), and the bytes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from or1_megatron.weights.families import ModelError

INDEX: Final = "model.safetensors.index.json"
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_MADV_POPULATE_READ: Final = 22  # linux/mman.h
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a safetensors file; ``dtype`` as the format spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file without its bytes: tensors in the order in which they lie."""

    name: str
    metadata: Mapping[str, str] | None
    entries: tuple[TensorInfo, ...]

    def header(self) -> bytes:
        """What the file begins with, as the safetensors library writes it."""
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


class MappedFile:
    """A file's bytes as tensors that are pages of the file: looking at them takes no memory of the process's own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.view = memoryview(self._map)
        self._address = self.tensor(0, 1, torch.uint8).data_ptr()

    def tensor(self, begin: int, count: int, dtype: torch.dtype) -> Tensor:
        """[count] elements at byte ``begin``; not to be written to."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is not writable
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=begin)

    def populate(self, begin: int, length: int) -> None:
        """Have the kernel read what will be looked at, all at once: page by page costs as much as the copy."""
        page = begin - begin % mmap.PAGESIZE
        try:
            self._map.madvise(_MADV_POPULATE_READ, page, begin + length - page)
        except OSError:  # a kernel before 5.14 does not know it
            self._map.madvise(mmap.MADV_WILLNEED, page, begin + length - page)

    def populate_tensor(self, tensor: Tensor) -> None:
        """The same for a contiguous view of what ``tensor`` gave."""
        self.populate(tensor.data_ptr() - self._address, tensor.nbytes)

    def release(self, begin: int, length: int) -> None:
        """What has been looked at need not stay mapped: such pages are the last that a kernel short of memory drops."""
        page = begin - begin % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, page, begin + length - page)


class HFWeights:
    """The tensors of an HF folder whose headers have been checked (``weights.files.check_weight_files``)."""

    def __init__(self, folder: Path) -> None:
        self.files: list[WeightFile] = []
        self._where: dict[str, tuple[MappedFile, int, TensorInfo]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            metadata = header.pop("__metadata__", None)
            mapped = MappedFile(path)
            entries = []
            for name, said in sorted(header.items(), key=lambda item: int(item[1]["data_offsets"][0])):
                entry = TensorInfo(name, said["dtype"], tuple(said["shape"]))
                begin, end = said["data_offsets"]
                if entry.dtype not in DTYPES:
                    raise ModelError(
                        f"{path}: {name} is of dtype {entry.dtype}, of a quantised model perhaps; expected one of "
                        f"{', '.join(DTYPES)}"
                    )
                if end - begin != entry.size_bytes:
                    raise ModelError(f"{path}: {name} has {end - begin} bytes; its shape takes {entry.size_bytes}")
                entries.append(entry)
                self._where[name] = (mapped, 8 + length + begin, entry)
            self.files.append(WeightFile(path.name, metadata, tuple(entries)))

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> set[str]:
        return set(self._where)

    def entry(self, name: str) -> TensorInfo:
        return self._where[name][2]

    def file_of(self, name: str) -> Path:
        return self._where[name][0].path

    def rows(self, name: str, first: int, count: int) -> Tensor:
        """[count, ...] rows, read already."""
        mapped, start, length = self._range(name, first, count)
        mapped.populate(start, length)
        entry = self._where[name][2]
        dtype = DTYPES[entry.dtype]
        return mapped.tensor(start, length // dtype.itemsize, dtype).view(count, *entry.shape[1:])

    def release(self, name: str, first: int, count: int) -> None:
        """The rows are not needed any more; whoever looks at them all the same reads them again."""
        mapped, start, length = self._range(name, first, count)
        mapped.release(start, length)

    def _range(self, name: str, first: int, count: int) -> tuple[MappedFile, int, int]:
        mapped, begin, entry = self._where[name]
        of_a_row = math.prod(entry.shape[1:]) * DTYPES[entry.dtype].itemsize
        return mapped, begin + first * of_a_row, count * of_a_row


def carried(folder: Path) -> list[Path]:
    """What lies beside the weights: configs, tokenizer, chat template, card. Not folders, not hidden files, not the
    weights in another format, nor the index, which is made anew."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.startswith(".") and path.suffix not in _WEIGHTS and path.name != INDEX
    ]


def carry(paths: Sequence[Path], target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in paths:
        shutil.copyfile(path, target / path.name)


def index_json(files: Sequence[WeightFile]) -> str:
    """The index of a folder of several files."""
    total = sum(entry.size_bytes for file in files for entry in file.entries)
    weight_map = {entry.name: file.name for file in files for entry in file.entries}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)


def packed(entries: Sequence[TensorInfo], max_bytes: int) -> list[WeightFile]:
    """Tensors, in order, into files of at most ``max_bytes`` (a larger tensor has one to itself), named as HF does."""
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
