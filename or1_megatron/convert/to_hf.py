"""Converts a Megatron checkpoint, from ``to_megatron``, a run or Megatron-LM, to an HF folder.

From a checkpoint of ``to_megatron`` the original files are made again, byte for byte. For other checkpoints, config and
tokenizer come from an HF folder. A run's configuration names this folder; for Megatron-LM the user names the folder.
Padding rows of the vocabulary are not read (``rows``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from or1_megatron.checkpoint.manifest import sync
from or1_megatron.config.load import load_as
from or1_megatron.config.schema import Config
from or1_megatron.convert.hf_folder import (
    DTYPES,
    INDEX,
    NAMES,
    TensorInfo,
    WeightFile,
    carried,
    carry,
    index_json,
    packed,
)
from or1_megatron.convert.job import Advance, ConvertError, convert
from or1_megatron.convert.megatron_folder import MegatronCheckpoint
from or1_megatron.convert.rows import HFSource, MegatronTensor, draft_tensor, megatron_tensors
from or1_megatron.convert.to_megatron import HF, RECORD
from or1_megatron.parallel.export import CARRIED, record_dtype
from or1_megatron.runtime.run_folder import RunFolder, step_of
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.files import is_draft
from or1_megatron.weights.stacked_experts import file_shapes, in_files, part_of

SHARD_BYTES: Final = 4 << 30


class ToHF:
    """The ``Conversion`` of a checkpoint to an HF folder.

    Args:
        hf_folder: HF folder from which config, tokenizer and so on are copied.
        record: what ``to_megatron`` recorded of the original files; None if it did not make the checkpoint.
    """

    def __init__(
        self,
        checkpoint: MegatronCheckpoint,
        hf_folder: Path,
        record: Mapping[str, Any] | None,
        dtype: torch.dtype | None,
        shard_bytes: int,
    ) -> None:
        self.checkpoint, self.hf_folder, self._record = checkpoint, hf_folder, record
        self.hf = read_hf_config(hf_folder)
        self._places: dict[str, tuple[MegatronTensor, HFSource]] = {}
        drafts = [(at, tuple(held.size)) for at, held in checkpoint.tensors.items() if is_draft(at, self.hf)]
        self.drafts = [draft_tensor(*draft) for draft in drafts]
        for tensor in (*megatron_tensors(family_of(self.hf), self.hf), *self.drafts):
            checkpoint.locate(tensor)  # check all of them before anything is written
            self._places.update({source.name: (tensor, source) for source in tensor.sources})
        copies: dict[str, str] = dict(record["copies"]) if record is not None else {}
        self._places.update({name: self._places[original] for name, original in copies.items()})
        self._parts = [part for part in map(part_of, self._places) if part]  # of stacks, in the order of experts
        self._shapes = file_shapes({name: source.shape for name, (_, source) in self._places.items()})
        self._as_source = record is not None and dtype is None
        self.files = self._files(dtype, shard_bytes)
        if unmatched := sorted({e.name for file in self.files for e in file.entries} ^ self._shapes.keys()):
            raise ConvertError(f"{checkpoint.folder / RECORD} and the model's config disagree about {unmatched[0]}")
        self._by_name = {file.name: file for file in self.files}
        self.sizes = {file.name: file.size_bytes for file in self.files}

    def _files(self, dtype: torch.dtype | None, shard_bytes: int) -> list[WeightFile]:
        if self._record is None:
            dtypes = {in_files(name): dtype or self._dtype(name) for name in self._places}
            entries = [self._entry(name, of_name) for name, of_name in dtypes.items()]
            return packed(entries, shard_bytes)
        return [
            WeightFile(
                file["name"],
                file["metadata"],
                tuple(self._entry(name, dtype or DTYPES[stored]) for name, stored in file["tensors"]),
            )
            for file in self._record["files"]
        ]

    def _dtype(self, name: str) -> torch.dtype:
        tensor, _ = self._places[name]
        dtype = self.checkpoint.dtype(tensor)
        if dtype not in NAMES:
            raise ConvertError(
                f"{self.checkpoint.folder}: {tensor.keys[0]} is of dtype {dtype}; expected {list(NAMES)}"
            )
        return dtype

    def _entry(self, name: str, dtype: torch.dtype) -> TensorInfo:
        return TensorInfo(name, NAMES[dtype], self._shapes[name])

    def _rows(self, entry: TensorInfo) -> Iterator[Tensor]:
        """Yield a tensor's rows in order, piece by piece, in the dtype to be written."""
        if entry.name not in self._places:
            yield from self._experts(entry)
            return
        tensor, source = self._places[entry.name]
        for run in source.pieces(self.checkpoint.dtype(tensor).itemsize):
            yield self.checkpoint.rows(tensor, run.row, run.rows).to(DTYPES[entry.dtype]).contiguous()

    def _experts(self, entry: TensorInfo) -> Iterator[Tensor]:
        """Yield the entries of a stack of experts' tensors. Each entry is put together from the expert's parts."""
        found = [part for part in self._parts if part.stack == entry.name]
        for _, parts in groupby(found, lambda part: part.expert):
            made = torch.empty(entry.shape[1:], dtype=DTYPES[entry.dtype])
            for part in parts:
                tensor, source = self._places[str(part)]
                (run,) = source.runs
                part.of(made).copy_(self.checkpoint.rows(tensor, run.row, run.rows))
            yield made

    def write(self, path: Path, advance: Advance) -> None:
        file = self._by_name[path.name]
        pieces = (_as_bytes(rows) for entry in file.entries for rows in self._rows(entry))
        with path.open("wb") as out:
            for piece in chain([memoryview(file.header())], pieces):
                advance(out.write(piece))
            out.flush()
            os.fsync(out.fileno())

    def complete(self, folder: Path) -> None:
        beside = carried(self.hf_folder)
        if self._record is None:  # a base model's README and the like do not describe this model
            beside = [path for path in beside if any(path.match(pattern) for pattern in CARRIED)]
        carry(self.hf_folder, beside, folder)
        if self._record is not None and self._record["index"] is not None and self._as_source:
            (folder / INDEX).write_text(self._record["index"])
        elif len(self.files) > 1:
            (folder / INDEX).write_text(index_json(self.files))
        dtypes = {entry.dtype for file in self.files for entry in file.entries}
        if not self._as_source and len(dtypes) == 1:
            record_dtype(folder, DTYPES[dtypes.pop()])
        for path in folder.iterdir():
            sync(path)


def megatron_to_hf(
    megatron: Path,
    out: Path,
    console: Console,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Make the HF folder ``out`` from the checkpoint ``megatron``.

    Args:
        hf: HF folder with config, tokenizer and so on; None: the folder that the checkpoint or its run names.
        dtype: dtype of the weights; None: the original HF folder's dtype if known, else the checkpoint's.
        shard_bytes: largest size of a file, if the original HF folder's files are not known.

    Raises:
        ModelError: the model is of no known family, or its config lacks a key.
        ConvertError: the checkpoint cannot be read, or the folder cannot be made.
        CheckpointDamaged: a file differs from the manifest's entry.
        CheckpointUnreadable: the disk cannot read a file, or the manifest has another format.
        DiskFullError: the disk became full while the folder was written.
    """
    checkpoint = MegatronCheckpoint(megatron)
    record = _read_record(checkpoint.folder)
    source = hf or (checkpoint.folder / HF if record is not None else _hf_of_run(checkpoint.folder))
    if source is None:
        raise ConvertError(
            f"{checkpoint.folder} does not say what model it is of; name an HF folder of the same architecture "
            "(config.json, tokenizer) with --hf"
        )
    conversion = ToHF(checkpoint, source, record, dtype, shard_bytes)
    convert(conversion, out, console)
    if conversion.hf.get("num_nextn_predict_layers") and not conversion.drafts:
        console.print("left out: the layers that draft tokens, which the checkpoint lacks; a run's export has them")
    total_bytes = sum(conversion.sizes.values())
    console.print(f"{out}: {total_bytes:,} bytes in {len(conversion.files)} safetensors files")


def _hf_of_run(checkpoint: Path) -> Path | None:
    """Return the HF folder that a checkpoint's run started from, or else the run's export; None if neither exists."""
    checkpoint = checkpoint.resolve()  # ``best`` is a link
    run = RunFolder(checkpoint.parents[1])
    if step_of(checkpoint) is None or not run.config.is_file():
        return None
    folders = (load_as(Config, run.config, own=True).model.hf, run.hf)
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _read_record(folder: Path) -> Mapping[str, Any] | None:
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        record: dict[str, Any] = json.loads(path.read_text())
        if record["format"] != 1:
            raise ConvertError(f"{path} is of format {record['format']}; this version of or1_megatron reads format 1")
    except (ValueError, KeyError, TypeError) as error:
        raise ConvertError(f"{path} cannot be read ({error!r})") from error
    return record


def _as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())
