"""Megatron checkpoint to HF folder: one that ``to_megatron`` wrote, a run's, or one of Megatron-LM's.

The first kind goes back to the files that it came from, byte for byte. The others take config, tokenizer and so on from
an HF folder: a run's configuration says which, for Megatron-LM's the user does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor

from or1_megatron.convert.card import model_card
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
from or1_megatron.convert.job import ConvertError, Job
from or1_megatron.convert.megatron_folder import MegatronCheckpoint
from or1_megatron.convert.rows import HFSource, MegatronTensor, targets
from or1_megatron.convert.run_source import RunOf, run_of
from or1_megatron.convert.to_megatron import HF, PIECE_BYTES, RECORD, forget, identical
from or1_megatron.parallel.export import CARRIED
from or1_megatron.runtime.manifest import sync
from or1_megatron.weights.families import family_of, read_hf_config

SHARD_BYTES: Final = 4 << 30
CARD: Final = "README.md"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive rows of an HF tensor."""

    key: str
    index: tuple[int, ...]
    hf_row: int
    row: int
    rows: int


class _Plan:
    """What is written: files, and for each HF tensor the rows of the checkpoint that it is made of."""

    def __init__(
        self,
        checkpoint: MegatronCheckpoint,
        hf_folder: Path,
        record: Mapping[str, Any] | None,
        dtype: torch.dtype | None,
        shard_bytes: int | None,
    ) -> None:
        self.checkpoint, self.hf_folder = checkpoint, hf_folder
        self.hf = read_hf_config(hf_folder)
        self._places: dict[str, tuple[MegatronTensor, HFSource]] = {}
        for target in targets(family_of(self.hf), self.hf):
            checkpoint.key_of(target)  # all there, before anything is written
            self._places.update({source.name: (target, source) for source in target.sources})
        self.copies: dict[str, str] = dict(record["copies"]) if record is not None else {}
        self.as_source = record is not None and dtype is None and shard_bytes is None
        self.files = self._files(record, dtype, shard_bytes)
        if repeated := sorted({e.name for f in self.files for e in f.entries} ^ {*self._places, *self.copies}):
            raise ConvertError(f"{checkpoint.folder / RECORD} and the model's config disagree about {repeated[0]}")
        self.sizes = [file.size_bytes for file in self.files]

    def _files(
        self, record: Mapping[str, Any] | None, dtype: torch.dtype | None, shard_bytes: int | None
    ) -> list[WeightFile]:
        names = [*self._places, *self.copies]
        if record is None:
            entries = [self._entry(name, dtype or self._dtype(name)) for name in names]
            return packed(entries, shard_bytes or SHARD_BYTES)
        files = [
            WeightFile(
                file["name"],
                file["metadata"],
                tuple(self._entry(name, dtype or DTYPES[said]) for name, said in file["tensors"]),
            )
            for file in record["files"]
        ]
        if shard_bytes is None:
            return files
        of_name = {entry.name: entry for file in files for entry in file.entries}
        return packed([of_name[name] for name in names], shard_bytes)

    def _dtype(self, name: str) -> torch.dtype:
        target, _ = self._places[self.copies.get(name, name)]
        dtype = self.checkpoint.dtype(self.checkpoint.key_of(target)[0])
        if dtype not in NAMES:
            raise ConvertError(
                f"{self.checkpoint.folder}: {target.keys[0]} is of dtype {dtype}; expected {list(NAMES)}"
            )
        return dtype

    def _entry(self, name: str, dtype: torch.dtype) -> TensorInfo:
        _, source = self._places[self.copies.get(name, name)]
        return TensorInfo(name, NAMES[dtype], source.shape)

    def pieces(self, name: str) -> list[_Piece]:
        """A tensor's rows, in order."""
        target, source = self._places[self.copies.get(name, name)]
        key, index = self.checkpoint.key_of(target)
        of_a_row = math.prod(source.shape[1:]) * self.checkpoint.dtype(key).itemsize  # cut as to_megatron cuts
        most = max(1, PIECE_BYTES // of_a_row)
        return [_Piece(key, index, p.hf_row, p.row, p.rows) for run in source.runs for p in run.cut(most)]

    def rows(self, piece: _Piece, dtype: str) -> Tensor:
        """[rows, ...] as they are to be written."""
        found = self.checkpoint.rows(piece.key, piece.index, piece.row, piece.rows)
        return found.to(DTYPES[dtype]).contiguous()

    def identity(self) -> dict[str, Any]:
        """What has to be the same for a conversion to go on."""
        paths = [path for path in sorted(self.checkpoint.folder.iterdir()) if path.is_file()]
        stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}
        config = (self.hf_folder / "config.json").read_text()
        layout = [[file.name, [[e.name, e.dtype] for e in file.entries]] for file in self.files]
        return {"to": "hf", "source": stats, "config": config, "files": layout}


def megatron_to_hf(
    megatron: Path,
    out: Path,
    console: Console,
    *,
    hf: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int | None = None,
    verify: bool = False,
) -> None:
    """Make the HF folder ``out`` of a checkpoint; resumes what was killed.

    Args:
        hf: whose config, tokenizer and so on belong to the model; None: as the checkpoint, or its run, says.
        dtype: of the weights; None: as the HF folder had them, or as the checkpoint has them.
        shard_bytes: of a file at most; None: as the HF folder was divided, or 4 GiB.
        verify: read every tensor again from the disk and compare it.

    Raises:
        ModelError: the model is of no known family, or its config lacks something.
        ConvertError, CheckpointDamaged, DiskFullError: the checkpoint cannot be read, or the folder not be written.
    """
    checkpoint = MegatronCheckpoint(megatron)
    record = _record(checkpoint.folder)
    run = None if record is not None else run_of(checkpoint.folder)
    source = hf or (checkpoint.folder / HF if record is not None else run.base if run is not None else None)
    if source is None:
        raise ConvertError(
            f"{checkpoint.folder} does not say what model it is of; name an HF folder of the same architecture "
            "(config.json, tokenizer) with --hf"
        )
    plan = _Plan(checkpoint, source, record, dtype, shard_bytes)
    with Job(out, plan.identity(), sum(plan.sizes), console) as job:
        names = [file.name for file in plan.files]
        job.write(names, plan.sizes, lambda name, advance: _write(job, plan, name, advance))
        _complete(job, plan, record, run)
        if verify:
            _verify(job, plan)
        job.put_in_place()
    console.print(f"{out}: {sum(plan.sizes):,} bytes in {len(plan.files)} safetensors files")


def _record(folder: Path) -> Mapping[str, Any] | None:
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


def _write(job: Job, plan: _Plan, name: str, advance: Callable[[int], None]) -> None:
    (file,) = (file for file in plan.files if file.name == name)
    path = job.aside / name
    with path.open("wb", buffering=0) as out:
        _append(out.fileno(), memoryview(file.header()), advance)
        for entry in file.entries:
            for piece in plan.pieces(entry.name):
                _append(out.fileno(), as_bytes(plan.rows(piece, entry.dtype)), advance)
        os.fsync(out.fileno())
    job.finished(name, None)


def as_bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy has buffers


def _append(descriptor: int, view: memoryview, advance: Callable[[int], None]) -> None:
    while view:
        count = os.write(descriptor, view[: 4 << 20])
        view = view[count:]
        advance(count)


def _complete(job: Job, plan: _Plan, record: Mapping[str, Any] | None, run: RunOf | None) -> None:
    """All that makes an HF folder of the files."""
    beside = carried(plan.hf_folder)
    if record is None:  # a base model's own notes are not about this one
        beside = [path for path in beside if any(path.match(pattern) for pattern in CARRIED)]
    carry(beside, job.aside)
    if record is not None and record["index"] is not None and plan.as_source:
        (job.aside / INDEX).write_text(record["index"])
    elif len(plan.files) > 1:
        (job.aside / INDEX).write_text(index_json(plan.files))
    if not plan.as_source:
        _set_dtype(job.aside / "config.json", plan.files)
    if run is not None:
        (job.aside / CARD).write_text(model_card(run))
    for path in job.aside.iterdir():
        sync(path)


def _set_dtype(path: Path, files: Sequence[WeightFile]) -> None:
    """Have config.json say what dtype the weights are of; it stays as it is where it says so."""
    dtypes = {entry.dtype for file in files for entry in file.entries}
    config = json.loads(path.read_text())
    said = {key: config[key] for key in ("torch_dtype", "dtype") if key in config}
    wanted = str(DTYPES[dtypes.pop()]).removeprefix("torch.") if len(dtypes) == 1 else None
    if wanted is not None and set(said.values()) - {wanted}:
        path.write_text(json.dumps({**config, **dict.fromkeys(said, wanted)}, indent=2) + "\n")


def _verify(job: Job, plan: _Plan) -> None:
    """Read the files from the disk, with the safetensors library, and compare every row with the checkpoint's."""
    forget(job.aside / file.name for file in plan.files)
    with job.progress("verifying", sum(plan.sizes)) as advance:

        def compare(file: WeightFile) -> None:
            path = job.aside / file.name
            try:
                with safe_open(path, framework="pt") as found:
                    for entry in file.entries:
                        tensor = found.get_slice(entry.name)
                        for piece in plan.pieces(entry.name):
                            rows = tensor[piece.hf_row : piece.hf_row + piece.rows]
                            if not identical(rows, plan.rows(piece, entry.dtype)):
                                raise ConvertError(f"{path}: {entry.name} differs from the checkpoint's {piece.key}")
                            advance(rows.nbytes)
            except (SafetensorError, OSError) as error:
                raise ConvertError(f"{path} cannot be read again ({error})") from error

        job.each(plan.files, compare)
