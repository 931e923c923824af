"""Reads a Megatron ``torch_dist`` checkpoint, ours or Megatron-LM's, for conversion: its files mapped into memory.

Each chunk of a tensor is stored as by torch.save. Loaded as a fake tensor, a chunk tells where its bytes lie in the
file."""

from __future__ import annotations

import json
import math
import pickle
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view

from or1_megatron.checkpoint.manifest import MANIFEST, check_manifest
from or1_megatron.convert.hf_folder import MappedFile
from or1_megatron.convert.job import ConvertError
from or1_megatron.convert.rows import MegatronTensor

_NEWEST: Final = "latest_checkpointed_iteration.txt"
_PADDED: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors that may end in padding rows of the vocabulary."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A rectangular part of a tensor, and the bytes of a file that hold it."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class MegatronCheckpoint:
    """Reads rows of a checkpoint's tensors. Several threads may use one object.

    The constructor and all methods raise:
        ConvertError: the folder is not a torch_dist checkpoint, or a file is missing, cut or unreadable.
        CheckpointDamaged: a file differs from the manifest's entry.
    """

    def __init__(self, folder: Path, digests: bool = True) -> None:
        """``digests``: check the files against the manifest, if any; not needed if all rows are compared anyway."""
        self.folder = resolve(folder)
        try:
            metadata = FileSystemReader(self.folder).read_metadata()
        except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise ConvertError(f"{self.folder / '.metadata'} cannot be read ({error!r})") from error
        stored = metadata.state_dict_metadata.items()
        self.tensors = {key: tensor for key, tensor in stored if isinstance(tensor, TensorStorageMetadata)}
        self._chunks: dict[str, list[_Chunk]] = defaultdict(list)
        self._by_entry: dict[tuple[str, tuple[int, ...]], list[_Chunk]] = {}
        storage = metadata.storage_data or {}
        where = {(index.fqn, tuple(index.offset or ())): stored_at for index, stored_at in storage.items()}
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                stored_at = where.get((key, tuple(chunk.offsets)))
                if stored_at is None:
                    raise ConvertError(f"{self.folder}: .metadata does not say where {key} at {chunk.offsets} lies")
                if getattr(stored_at, "transform_descriptors", None):
                    raise ConvertError(f"{self.folder}: {key} is stored compressed; expected plain tensors")
                shape = tuple(chunk.offsets), tuple(chunk.sizes)
                self._chunks[key].append(_Chunk(*shape, stored_at.relative_path, stored_at.offset, stored_at.length))
        if digests and (self.folder / MANIFEST).is_file():
            check_manifest(self.folder)
        self._maps: dict[str, MappedFile] = {}
        self._tensors: dict[tuple[str, int], Tensor] = {}
        self._lock = threading.Lock()

    def locate(self, tensor: MegatronTensor) -> tuple[str, tuple[int, ...]]:
        """Return (the name of the stack that holds a tensor in this checkpoint, the tensor's index in the stack).

        Raises:
            ConvertError: the checkpoint has none of the tensor's names, or another shape.
        """
        for key in tensor.keys:
            if key in self.tensors:
                self._check_shape(key, tensor.whole)
                return key, tensor.index
        for key in map(tensor.unstacked, tensor.keys):
            if key in self.tensors:
                self._check_shape(key, tensor.whole[1:])
                return key, tensor.index[1:]
        adapters = any(".lora_A." in key for key in self.tensors)
        why = (
            "holds LoRA's adapters alone: take an export of the run"
            if adapters
            else "is of another model, or not whole"
        )
        raise ConvertError(f"{self.folder} lacks {tensor.keys[0]}: it {why}")

    def _check_shape(self, key: str, wanted: tuple[int, ...]) -> None:
        shape = tuple(self.tensors[key].size)
        same = shape == wanted
        if key in _PADDED:
            same = len(shape) == 2 and shape[0] >= wanted[0] and shape[1] == wanted[1]
        if not same:
            raise ConvertError(f"{self.folder}: {key} has shape {shape}; the model's config implies {wanted}")

    def dtype(self, tensor: MegatronTensor) -> torch.dtype:
        return self.tensors[self.locate(tensor)[0]].properties.dtype

    def rows(self, tensor: MegatronTensor, first: int, count: int) -> Tensor:
        """Return ``count`` rows of a tensor, [count, ...]: without a copy if they lie in one chunk."""
        key, index = self.locate(tensor)
        rest = tuple(self.tensors[key].size)[len(index) + 1 :]
        rows = None
        covered = 0
        for chunk in self._chunks_of(key, index):
            parts = self._overlap(chunk, len(index), first, count)
            if parts is None:
                continue
            here, there = parts
            whole, file = self._tensor(key, chunk)
            part = whole[tuple(i - o for i, o in zip(index, chunk.offset, strict=False))][here]
            if part.shape == (count, *rest):
                if part.is_contiguous():
                    file.populate(part)
                return part
            if rows is None:
                rows = torch.empty((count, *rest), dtype=part.dtype)
            rows[there] = part
            covered += part.numel()
        if rows is None or covered != rows.numel():
            wanted = count * math.prod(rest)
            raise ConvertError(
                f"{self.folder}: {covered} of the {wanted} elements of {key}{list(index) or ''}, rows {first} to "
                f"{first + count}, are there"
            )
        return rows

    def _chunks_of(self, key: str, index: tuple[int, ...]) -> list[_Chunk]:
        """Return the chunks that hold parts of entry ``index`` of the stack ``key``."""
        with self._lock:
            if (key, index) not in self._by_entry:
                depth = len(index)
                for chunk in self._chunks[key]:
                    entries: list[tuple[int, ...]] = [()]
                    for offset, size in zip(chunk.offset[:depth], chunk.sizes[:depth], strict=True):
                        entries = [(*entry, offset + i) for entry in entries for i in range(size)]
                    for entry in entries:
                        self._by_entry.setdefault((key, entry), []).append(chunk)
            return self._by_entry.get((key, index), [])

    @staticmethod
    def _overlap(
        chunk: _Chunk, depth: int, first: int, count: int
    ) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return where a chunk and the wanted rows overlap, as slices of (chunk's entry, result); None if nowhere.

        ``depth``: number of the stack's axes (layers, experts) before the axis of rows.
        """
        row, rows = chunk.offset[depth], chunk.sizes[depth]
        low, high = max(first, row), min(first + count, row + rows)
        if low >= high:
            return None
        rest = [
            slice(offset, offset + size)
            for offset, size in zip(chunk.offset[depth + 1 :], chunk.sizes[depth + 1 :], strict=True)
        ]
        return (slice(low - row, high - row), *[slice(None)] * len(rest)), (slice(low - first, high - first), *rest)

    def _tensor(self, key: str, chunk: _Chunk) -> tuple[Tensor, MappedFile]:
        """Return (a chunk as a tensor mapped from its file, the file)."""
        with self._lock:
            if chunk.file not in self._maps:
                path = self.folder / chunk.file
                try:
                    self._maps[chunk.file] = MappedFile(path)
                except (OSError, ValueError) as error:
                    raise ConvertError(f"{path} cannot be read ({error})") from error
            file = self._maps[chunk.file]
            if (chunk.file, chunk.begin) not in self._tensors:
                self._tensors[chunk.file, chunk.begin] = self._mapped(key, chunk, file)
            return self._tensors[chunk.file, chunk.begin], file

    def _mapped(self, key: str, chunk: _Chunk, file: MappedFile) -> Tensor:
        path, end = self.folder / chunk.file, chunk.begin + chunk.length
        if end > file.size_bytes:
            raise ConvertError(f"{path} is cut: {file.size_bytes} bytes, of which {key} takes those up to {end}")
        try:
            with FakeTensorMode(), path.open("rb") as whole:
                blob: Any = _create_file_view(whole, chunk.begin, chunk.length)
                stored = torch.load(blob, weights_only=True)
            storage = stored.untyped_storage()
            begin = chunk.begin + storage._checkpoint_offset
            flat = file.tensor(begin, storage.nbytes() // stored.dtype.itemsize, stored.dtype)
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConvertError(f"{path} is damaged or missing: {key} cannot be read ({error})") from error
        if tuple(stored.shape) != chunk.sizes:
            raise ConvertError(
                f"{path}: {key} has a chunk of shape {tuple(stored.shape)}; .metadata says {chunk.sizes}"
            )
        return flat.as_strided(chunk.sizes, stored.stride(), stored.storage_offset())


def resolve(folder: Path) -> Path:
    """Return ``folder`` if it is a checkpoint, or the newest checkpoint in it, which Megatron-LM names in a file."""
    if not folder.is_dir():
        raise ConvertError(f"checkpoint {folder} does not exist")
    newest = folder / _NEWEST
    if not (folder / ".metadata").is_file() and newest.is_file():
        named = newest.read_text().strip()
        return resolve(folder / (f"iter_{int(named):07d}" if named.isdigit() else named))
    if not (folder / ".metadata").is_file():
        raise ConvertError(f"{folder} has no .metadata; expected a Megatron checkpoint in the format torch_dist")
    about = folder / "metadata.json"
    if about.is_file() and (kind := json.loads(about.read_text()).get("sharded_backend")) != "torch_dist":
        raise ConvertError(f"{about} says sharded_backend {kind}; expected torch_dist")
    return folder
