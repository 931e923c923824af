"""Boxes of tensors on disk, in the format of torch's distributed checkpoints, which Megatron's loader reads too.

Each rank writes one file of its boxes, one behind the other. ``.metadata``, written when all have, says of every whole
tensor of which boxes it is made, and where they lie. A reader asks for any boxes: those on disk that overlap are read.
"""

from __future__ import annotations

import hashlib
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

from or1_megatron.errors import UserError
from or1_megatron.parallel.boxes import Box, Holding
from or1_megatron.runtime.manifest import FileEntry

_PIECE_BYTES = 1 << 20


class StateMismatch(UserError, RuntimeError):
    """The state on disk is not that of this model; names the tensor, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class WrittenBox:
    """A box on disk."""

    box: Box
    dtype: torch.dtype
    file: str
    offset: int
    """bytes"""
    length: int
    """bytes"""


class _DigestedFile:
    """A file whose digest is known when it is written. As much of a file as torch.save needs."""

    def __init__(self, path: Path, wrote: Callable[[int], None]) -> None:
        self._file = path.open("wb", buffering=0)
        self._wrote = wrote
        self._digest = hashlib.sha256()
        self.position = 0
        self.failure: Exception | None = None
        """What torch.save makes another error of."""

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        left = view
        try:
            while left:  # in pieces that stay in the processor's cache between digest and write, which may cut short
                count = self._file.write(left[:_PIECE_BYTES])
                self._digest.update(left[:count])
                left = left[count:]
                self._wrote(count)
        except Exception as error:
            self.failure = error
            raise
        self.position += len(view)
        return len(view)

    def flush(self) -> None:
        pass

    def sync(self) -> FileEntry:
        """Bring the file to the disk; what a manifest says of it."""
        os.fsync(self._file.fileno())
        return FileEntry(self.position, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


def write_boxes(
    path: Path, boxes: Iterable[tuple[Box, Tensor]], wrote: Callable[[int], None] = lambda count: None
) -> tuple[list[WrittenBox], FileEntry]:
    """Write the boxes' tensors (any shape, on any device) to ``path`` and sync it. Raises OSError.

    ``wrote`` is told of every few bytes; what it raises ends the writing.
    """
    file = _DigestedFile(path, wrote)
    written = []
    try:
        for box, tensor in boxes:
            begin = file.position
            torch.save(_own_storage(tensor.detach().cpu().view(box.sizes)), file)  # type: ignore[arg-type]
            written.append(WrittenBox(box, tensor.dtype, path.name, begin, file.position - begin))
        return written, file.sync()
    except Exception:
        if file.failure is not None:
            raise file.failure from None
        raise
    finally:
        file.close()


def _own_storage(tensor: Tensor) -> Tensor:
    """torch.save writes a tensor's whole storage: a view becomes a copy."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def write_metadata(folder: Path, written: Sequence[WrittenBox]) -> None:
    """Write ``.metadata``, which makes one state of the ranks' files."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    results = []
    for part in written:
        box, offset = part.box, torch.Size(part.box.offset)
        known = tensors.setdefault(
            box.key, TensorStorageMetadata(TensorProperties(part.dtype), torch.Size(box.whole), [])
        )
        assert isinstance(known, TensorStorageMetadata)
        known.chunks.append(ChunkStorageMetadata(offset, torch.Size(box.sizes)))
        place = _StorageInfo(part.file, part.offset, part.length)
        results.append(WriteResult(MetadataIndex(box.key, offset), part.length, place))
    FileSystemWriter(folder, sync_files=True).finish(Metadata(tensors), [results])


def read_holdings(folder: Path, holdings: Sequence[Holding]) -> None:
    """Fill the holdings' live tensors.

    Raises:
        StateMismatch: a tensor is not there, has another shape, or is not there whole. Nothing has been changed then.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    targets: dict[MetadataIndex, tuple[Holding, Box]] = {}
    items: list[ReadItem] = []
    for holding in holdings:
        for box in holding.boxes:
            found = metadata.state_dict_metadata.get(box.key)
            if not isinstance(found, TensorStorageMetadata):
                raise StateMismatch(f"{folder} holds no {box.key}: it was saved from another model or optimizer")
            items += _reads(folder, box, found, holding.may_differ)
            targets[MetadataIndex(box.key, torch.Size(box.offset))] = (holding, box)
    assert len(targets) == sum(len(holding.boxes) for holding in holdings), "two holdings of one box"
    planner = _Planner(targets)
    for holding, box in targets.values():
        if holding.may_differ:
            planner.view(holding, box).zero_()
    reader.read_data(LoadPlan(items), planner)


def _reads(folder: Path, box: Box, found: TensorStorageMetadata, may_differ: bool) -> list[ReadItem]:
    """What has to be read for a box; rows that only one side has (``may_differ``) are left out."""
    if tuple(found.size) != box.whole and not may_differ:
        raise StateMismatch(f"{folder}: {box.key} has shape {tuple(found.size)}; this model's is {box.whole}")
    chunk = ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.sizes))
    items = create_read_items_for_chunk_list(box.key, found, [chunk])
    expected = math.prod(
        max(0, min(offset + size, there) - offset)
        for offset, size, there in zip(box.offset, box.sizes, found.size, strict=True)
    )
    if (covered := sum(math.prod(item.lengths) for item in items)) != expected:
        raise StateMismatch(
            f"{folder}: {covered} of the {expected} elements of {box.key} at {box.offset} + {box.sizes} are there"
        )
    return items


class _Planner(DefaultLoadPlanner):
    """Tells the reader where a box that it has read belongs."""

    def __init__(self, targets: dict[MetadataIndex, tuple[Holding, Box]]) -> None:
        super().__init__()
        self._targets = targets

    @staticmethod
    def view(holding: Holding, box: Box) -> Tensor:
        return holding.tensor()[box.start : box.start + box.count].view(box.sizes)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self.view(*self._targets[MetadataIndex(read_item.dest_index.fqn, read_item.dest_index.offset)])
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass
