"""Reads a Megatron ``torch_dist`` checkpoint, ours or Megatron-LM's, by mmap; accepts a padded vocabulary.

Each chunk of a tensor is stored in torch.save's format. torch loads a chunk as a fake tensor, which tells where the
chunk's bytes lie in the file."""

from __future__ import annotations

import json
import math
import mmap
import pickle
import threading
import warnings
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import _create_file_view

from or1_megatron.checkpoint.manifest import MANIFEST, check_manifest
from or1_megatron.convert.job import ConvertError
from or1_megatron.convert.rows import MegatronTensor

_NEWEST: Final = "latest_checkpointed_iteration.txt"
_PADDED: Final = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Tensors that may end in padding rows of the vocabulary."""


class MegatronCheckpoint:
    """Reads rows of a checkpoint's tensors. Several threads may use one object.

    The constructor and all methods raise:
        ConvertError: the folder is not a torch_dist checkpoint, or a file is missing, truncated or unreadable.
        CheckpointDamaged: a file differs from the manifest's entry.
        CheckpointUnreadable: a file cannot be read for the check, or the manifest has another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = resolve(folder)
        try:
            metadata = FileSystemReader(self.folder).read_metadata()
        except (OSError, EOFError, ValueError, AttributeError, ImportError, pickle.UnpicklingError) as error:
            raise ConvertError(f"{self.folder / '.metadata'} cannot be read ({error!r})") from error
        stored = metadata.state_dict_metadata.items()
        self.tensors = {key: tensor for key, tensor in stored if isinstance(tensor, TensorStorageMetadata)}
        storage = metadata.storage_data or {}
        self._stored = {(index.fqn, tuple(index.offset or ())): stored_at for index, stored_at in storage.items()}
        for key, tensor in self.tensors.items():
            for chunk in tensor.chunks:
                stored_at = self._stored.get((key, tuple(chunk.offsets)))
                if stored_at is None:
                    raise ConvertError(f"{self.folder}: .metadata does not say where {key} at {chunk.offsets} lies")
                if getattr(stored_at, "transform_descriptors", None):
                    raise ConvertError(f"{self.folder}: {key} is stored compressed; expected plain tensors")
        if (self.folder / MANIFEST).is_file():
            check_manifest(self.folder)
        self._entries: dict[str, dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors: dict[tuple[str, tuple[int, ...]], Tensor] = {}
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
        """Return ``count`` rows of a tensor, [count, ...], without a copy if the rows lie in one chunk."""
        key, index = self.locate(tensor)
        rest = tuple(self.tensors[key].size)[len(index) + 1 :]
        sizes = (*(1,) * len(index), count, *rest)
        wanted = ChunkStorageMetadata(torch.Size((*index, first, *(0,) * len(rest))), torch.Size(sizes))
        held = replace(self.tensors[key], chunks=self._chunks_of(key, index))
        made = None
        covered = 0
        for read in create_read_items_for_chunk_list(key, held, [wanted]):
            assert read.storage_index.index is not None
            chunk = self._tensor(key, held.chunks[read.storage_index.index])
            part = chunk[_slices(read.storage_offsets, read.lengths)]
            if part.shape == sizes:
                return part.reshape(count, *rest)
            if made is None:
                made = torch.empty(sizes, dtype=part.dtype)
            made[_slices(read.dest_offsets, read.lengths)] = part
            covered += part.numel()
        if made is None or covered != made.numel():
            raise ConvertError(
                f"{self.folder}: {covered} of the {math.prod(sizes)} elements of {key}{list(index) or ''}, rows "
                f"{first} to {first + count}, are there"
            )
        return made.view(count, *rest)

    def _chunks_of(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """Return the chunks that hold parts of entry ``index`` of stack ``key``; a stack's first call groups them."""
        with self._lock:
            if key not in self._entries:
                by_entry: defaultdict[tuple[int, ...], list[ChunkStorageMetadata]] = defaultdict(list)
                for chunk in self.tensors[key].chunks:
                    bounds = list(zip(chunk.offsets, chunk.sizes, strict=True))[: len(index)]
                    for entry in product(*(range(offset, offset + size) for offset, size in bounds)):
                        by_entry[entry].append(chunk)
                self._entries[key] = by_entry
            return self._entries[key][index]

    def _tensor(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        at = key, tuple(chunk.offsets)
        with self._lock:
            if at not in self._tensors:
                self._tensors[at] = self._mapped(key, chunk)
            return self._tensors[at]

    def _mapped(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        at = self._stored[key, tuple(chunk.offsets)]
        path = self.folder / at.relative_path
        try:
            with path.open("rb") as file:
                if path not in self._maps:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                with FakeTensorMode():
                    blob: Any = _create_file_view(file, at.offset, at.length)
                    stored = torch.load(blob, weights_only=True)
            storage = stored.untyped_storage()
            begin, count = at.offset + storage._checkpoint_offset, storage.nbytes() // stored.dtype.itemsize
            with warnings.catch_warnings(action="ignore"):  # the memory is read-only
                flat = torch.frombuffer(self._maps[path], dtype=stored.dtype, count=count, offset=begin)
        except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ConvertError(f"{path} is cut, damaged or missing: {key} cannot be read ({error})") from error
        if stored.shape != chunk.sizes:
            raise ConvertError(
                f"{path}: {key} has a chunk of shape {tuple(stored.shape)}; .metadata says {tuple(chunk.sizes)}"
            )
        return flat.as_strided(stored.shape, stored.stride(), stored.storage_offset())


def _slices(offsets: torch.Size, lengths: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))


def resolve(folder: Path) -> Path:
    """Return ``folder`` if it is a checkpoint, else the checkpoint that its latest_checkpointed_iteration.txt names."""
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
