"""Reads and writes tensor slices in the format of torch's distributed checkpoints, which Megatron's loader reads too.

Each rank writes its slices to one file. ``.metadata``, written when all ranks are done, lists the slices of every whole
tensor and their positions in the files. To fill any slices, a reader reads the slices on disk that overlap them.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import (
    BytesStorageMetadata,
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    LoadPlan,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from or1_megatron.checkpoint.manifest import FileEntry
from or1_verify.errors import UserError

_PIECE_BYTES = 1 << 20  # stays in the processor's cache between digest and write


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A rectangular slice of a whole tensor. The slice is contiguous in a rank's local shard.

    ``whole`` is the whole tensor's shape; ``start`` is the slice's first index in the flat local shard.
    """

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int

    def of(self, shard: Tensor) -> Tensor:
        """Return the slice as a flat view of the shard's tensor."""
        return shard[self.start : self.start + math.prod(self.sizes)]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One flat tensor of this rank's state. ``tensor()`` is called at each use, because the tensor may have moved."""

    tensor: Callable[[], Tensor]
    slices: tuple[TensorSlice, ...]
    is_written_here: bool
    """True on exactly one of the ranks that hold this shard."""
    may_differ: bool
    """Whether the whole tensor's shape depends on the layout (padded vocabulary). Rows that are in no file become 0."""


class StateMismatch(UserError, RuntimeError):
    """The state on disk is of another model. The message names the tensor, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class WrittenSlice:
    """A slice on disk: its file, and its position in the file."""

    part: TensorSlice
    dtype: torch.dtype
    file: str
    offset: int
    """Position of the slice in the file, in bytes."""
    length: int
    """Length of the slice in the file, in bytes."""


class _DigestedFile(io.FileIO):
    """A file that computes its digest while it is written."""

    def __init__(self, path: Path, wrote: Callable[[int], None]) -> None:
        super().__init__(path, "wb")
        self._wrote, self._digest = wrote, hashlib.sha256()
        self.failure: Exception | None = None
        """The first error of a write; torch.save raises another error in its place."""

    def write(self, data: Any) -> int:
        view = left = memoryview(data).cast("B")
        try:
            while left:  # a write may take less than it is given
                count = super().write(left[:_PIECE_BYTES]) or 0
                self._digest.update(left[:count])
                left = left[count:]
                self._wrote(count)
        except Exception as error:
            self.failure = error
            raise
        return len(view)

    def sync(self) -> FileEntry:
        """Flush the file to the disk and return its entry for the manifest."""
        os.fsync(self.fileno())
        return FileEntry(self.tell(), self._digest.hexdigest())


def write_slices(
    path: Path, slices: Iterable[tuple[TensorSlice, Tensor]], wrote: Callable[[int], None] = lambda count: None
) -> tuple[list[WrittenSlice], FileEntry]:
    """Write the slices' tensors (any shape, on any device) to ``path`` and flush the file to disk. Raises OSError.

    Returns (slices, manifest entry). ``wrote`` gets the number of bytes of each write, and may raise an error to stop.
    """
    written = []
    with _DigestedFile(path, wrote) as file:
        try:
            for part, tensor in slices:
                begin = file.tell()
                torch.save(_own_storage(tensor.detach().cpu().view(part.sizes)), file)
                written.append(WrittenSlice(part, tensor.dtype, path.name, begin, file.tell() - begin))
            return written, file.sync()
        except Exception:
            if file.failure is not None:
                raise file.failure from None
            raise


def _own_storage(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if it is a view, because torch.save would write the view's whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_metadata(folder: Path, written: Sequence[WrittenSlice]) -> None:
    """Write ``.metadata``, which joins the files of all ranks, and ``metadata.json`` for Megatron's loader."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for stored in written:
        part, offset = stored.part, torch.Size(stored.part.offset)
        known = tensors.setdefault(
            part.key, TensorStorageMetadata(TensorProperties(stored.dtype), torch.Size(part.whole), [])
        )
        assert isinstance(known, TensorStorageMetadata)
        known.chunks.append(ChunkStorageMetadata(offset, torch.Size(part.sizes)))
        place = _StorageInfo(stored.file, stored.offset, stored.length)
        results.append(WriteResult(MetadataIndex(part.key, offset), stored.length, place))
    FileSystemWriter(folder, sync_files=True).finish(Metadata(tensors), [results])
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def read_shards(folder: Path, shards: Sequence[LocalShard]) -> None:
    """Read the checkpoint ``folder`` into the shards' live tensors.

    Raises:
        StateMismatch: a tensor is missing or incomplete, or has another shape. No tensor has been changed then.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    targets: dict[MetadataIndex, tuple[LocalShard, TensorSlice]] = {}
    items: list[ReadItem] = []
    for shard in shards:
        for part in shard.slices:
            on_disk = metadata.state_dict_metadata.get(part.key)
            if not isinstance(on_disk, TensorStorageMetadata):
                raise StateMismatch(f"{folder} holds no {part.key}: it was saved from another model or optimizer")
            items += _reads(folder, part, on_disk, shard.may_differ)
            targets[MetadataIndex(part.key, torch.Size(part.offset))] = (shard, part)
    assert len(targets) == sum(len(shard.slices) for shard in shards), "two shards of one slice"
    for shard, part in targets.values():
        if shard.may_differ:
            part.of(shard.tensor()).zero_()
    reader.read_data(LoadPlan(items), _Planner(targets))


def _reads(folder: Path, part: TensorSlice, on_disk: TensorStorageMetadata, may_differ: bool) -> list[ReadItem]:
    """Return the reads that fill a slice. With ``may_differ``, the rows that the disk lacks are not read."""
    if tuple(on_disk.size) != part.whole and not may_differ:
        raise StateMismatch(f"{folder}: {part.key} has shape {tuple(on_disk.size)}; this model's is {part.whole}")
    chunk = ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.sizes))
    items = create_read_items_for_chunk_list(part.key, on_disk, [chunk])
    expected = math.prod(
        max(0, min(offset + size, there) - offset)
        for offset, size, there in zip(part.offset, part.sizes, on_disk.size, strict=True)
    )
    if (covered := sum(math.prod(item.lengths) for item in items)) != expected:
        raise StateMismatch(
            f"{folder}: {covered} of the {expected} elements of {part.key} at {part.offset} + {part.sizes} are there"
        )
    return items


class _Planner(DefaultLoadPlanner):
    """Gives torch's reader, for each read, the part of a live tensor to fill."""

    def __init__(self, targets: dict[MetadataIndex, tuple[LocalShard, TensorSlice]]) -> None:
        super().__init__()
        self._targets = targets

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        shard, part = self._targets[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)]
        target = part.of(shard.tensor()).view(part.sizes)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
