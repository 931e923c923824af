"""HF folder to Megatron checkpoint.

The result holds ``__0_N.distcp`` and ``.metadata`` (parameters), ``common.pt`` and ``metadata.json`` (what Megatron's
loader wants), ``hf/`` (all of the HF folder but its weights), ``conversion_record.json`` (what the way back needs) and
``manifest.json``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from or1_megatron.convert.hf_folder import DTYPES, INDEX, HFWeights, carried, carry
from or1_megatron.convert.job import ConvertError, Job
from or1_megatron.convert.megatron_folder import MegatronCheckpoint
from or1_megatron.convert.rows import HFSource, MegatronTensor, Run, targets
from or1_megatron.parallel.shard_files import TensorSlice, WrittenSlice, write_metadata, write_slices
from or1_megatron.runtime.manifest import FileEntry, write_manifest
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.files import check_weight_files
from or1_megatron.weights.table import tied

RECORD: Final = "conversion_record.json"
HF: Final = "hf"
PIECE_BYTES: Final = 64 << 20
"""What is looked at, or held in memory where it must be converted or put together, at a time and thread."""
FILE_BYTES: Final = 1 << 30
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_MEGATRON_FORMAT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part to write and where it comes from."""

    target: MegatronTensor
    source: HFSource
    run: Run

    @property
    def part(self) -> TensorSlice:
        target = self.target
        offset = (*target.index, self.run.row, *(0,) * (len(target.shape) - 1))
        sizes = (*(1,) * len(target.index), self.run.rows, *target.shape[1:])
        return TensorSlice(target.keys[0], target.whole, offset, sizes, 0)

    @property
    def count(self) -> int:
        return self.run.rows * math.prod(self.target.shape[1:])


class _Plan:
    """What is written: pieces, in files of about ``file_bytes``."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
        self.folder, self._dtype = folder, dtype
        self.hf = read_hf_config(folder)
        check_weight_files(folder, self.hf)
        self.weights = HFWeights(folder)
        self.targets = targets(family_of(self.hf), self.hf)
        self.copies = self._copies()
        named = {source.name for target in self.targets for source in target.sources}
        self.dropped = sorted(self.weights.names() - named - self.copies.keys())
        self.files: dict[str, list[_Piece]] = {}
        held = file_bytes
        for piece in self._pieces():
            if held >= file_bytes:
                self.files[f"__0_{len(self.files)}.distcp"] = current = []
                held = 0
            current.append(piece)
            held += self.size_bytes(piece)
        self.sizes = [sum(map(self.size_bytes, pieces)) for pieces in self.files.values()]

    def _pieces(self) -> Iterator[_Piece]:
        for target in self.targets:
            if len({self.weights.entry(source.name).dtype for source in target.sources}) > 1 and self._dtype is None:
                raise ConvertError(
                    f"{self.folder}: {', '.join(source.name for source in target.sources)} are of several dtypes, and "
                    "Megatron holds them as one tensor; choose one with --dtype"
                )
            for source in target.sources:
                of_a_row = math.prod(source.shape[1:]) * self.dtype(source.name).itemsize
                for run in source.runs:
                    for part in run.cut(max(1, PIECE_BYTES // of_a_row)):
                        yield _Piece(target, source, part)

    def _copies(self) -> dict[str, str]:
        """A tied model's files may hold its output layer all the same."""
        if not (tied(self.hf) and _OUTPUT in self.weights):
            return {}
        if not same_rows(self.weights, _OUTPUT, self.weights, _EMBEDDING):
            raise ConvertError(
                f"{self.folder}: config.json ties word embeddings, but {_OUTPUT} is not {_EMBEDDING}; set "
                "tie_word_embeddings to false if the two are meant to differ"
            )
        return {_OUTPUT: _EMBEDDING}

    def dtype(self, name: str) -> torch.dtype:
        return self._dtype or DTYPES[self.weights.entry(name).dtype]

    def size_bytes(self, piece: _Piece) -> int:
        return piece.count * self.dtype(piece.source.name).itemsize

    def tensor(self, piece: _Piece) -> Tensor:
        rows = self.weights.rows(piece.source.name, piece.run.hf_row, piece.run.rows)
        return rows.to(self.dtype(piece.source.name))

    def slices(self, name: str) -> Iterator[tuple[TensorSlice, Tensor]]:
        """What a file is made of; each tensor is good until the next is asked for."""
        for piece in self.files[name]:
            yield piece.part, self.tensor(piece)
            self.weights.release(piece.source.name, piece.run.hf_row, piece.run.rows)

    def identity(self) -> dict[str, Any]:
        """What has to be the same for a conversion to go on."""
        files = [*sorted(self.folder.glob("*.safetensors")), *carried(self.folder)]
        stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
        names = {name: len(pieces) for name, pieces in self.files.items()}
        return {"to": "megatron", "source": stats, "dtype": str(self._dtype), "files": names}

    def record(self) -> dict[str, Any]:
        """What the way back needs, beside hf/."""
        files = [
            {
                "name": file.name,
                "metadata": file.metadata,
                "tensors": [[entry.name, entry.dtype] for entry in file.entries if entry.name not in self.dropped],
            }
            for file in self.weights.files
        ]
        index = self.folder / INDEX
        return {
            "format": 1,
            "source": self.folder.resolve().name,
            "files": files,
            "index": index.read_text() if index.is_file() and not self.dropped else None,
            "copies": self.copies,
        }


def same_rows(mine: HFWeights, name: str, theirs: HFWeights, other: str) -> bool:
    """Whether two tensors are the same to the bit."""
    shape = mine.entry(name).shape
    if shape != theirs.entry(other).shape or mine.entry(name).dtype != theirs.entry(other).dtype:
        return False
    most = max(1, PIECE_BYTES // max(1, mine.entry(name).size_bytes // shape[0]))
    pieces = Run(0, 0, shape[0]).cut(most)
    return all(identical(mine.rows(name, p.row, p.rows), theirs.rows(other, p.row, p.rows)) for p in pieces)


def identical(a: Tensor, b: Tensor) -> bool:
    """To the bit, so that NaN is NaN and -0 is not 0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def hf_to_megatron(
    hf: Path,
    out: Path,
    console: Console,
    *,
    dtype: torch.dtype | None = None,
    verify: bool = False,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Make the checkpoint ``out`` of the HF folder ``hf``; resumes what was killed.

    Args:
        dtype: of the checkpoint; None: of the source.
        verify: read every tensor again from the disk and compare it.

    Raises:
        ModelError: the HF folder cannot be used.
        ConvertError, DiskFullError: the checkpoint cannot be written.
    """
    plan = _Plan(hf, dtype, file_bytes)
    if plan.dropped:
        console.print(f"not carried over, the model has no use for them: {', '.join(plan.dropped)}")
    with Job(out, plan.identity(), sum(plan.sizes), console) as job:

        def write(name: str, advance: Any) -> None:
            torch.serialization.set_crc32_options(False)  # of this thread; the manifest's digests say more
            written, entry = write_slices(job.aside / name, plan.slices(name), advance)
            job.finished(name, [asdict(entry), [[part.offset, part.length] for part in written]])

        job.write(list(plan.files), plan.sizes, write)
        _complete(job, plan)
        if verify:
            _verify(job, plan)
        job.put_in_place()
    console.print(f"{out}: {sum(plan.sizes):,} bytes of parameters, Megatron torch_dist")


def _complete(job: Job, plan: _Plan) -> None:
    """All that makes a checkpoint of the files."""
    written: list[WrittenSlice] = []
    entries: dict[str, FileEntry] = {}
    for name, pieces in plan.files.items():
        entry, places = job.done[name]
        entries[name] = FileEntry(**entry)
        for piece, (offset, length) in zip(pieces, places, strict=True):
            part = WrittenSlice(piece.part, plan.dtype(piece.source.name), name, offset, length)
            # Under each name that a reader may know it by: the same bytes.
            written += [replace(part, part=replace(part.part, key=key)) for key in piece.target.keys]
    write_metadata(job.aside, written)
    (job.aside / "metadata.json").write_text(json.dumps(_MEGATRON_FORMAT))
    torch.save({"checkpoint_version": 3.0, "iteration": 0}, job.aside / "common.pt")
    carry(carried(plan.folder), job.aside / HF)
    (job.aside / RECORD).write_text(json.dumps(plan.record(), indent=1))
    write_manifest(job.aside, entries)


def _verify(job: Job, plan: _Plan) -> None:
    """Read the checkpoint from the disk and compare every row with the source."""
    forget(job.aside / name for name in plan.files)
    checkpoint = MegatronCheckpoint(job.aside, digests=False)

    with job.progress("verifying", sum(plan.sizes)) as advance:

        def compare(name: str) -> None:
            for piece in plan.files[name]:
                key, index = checkpoint.key_of(piece.target)
                found = checkpoint.rows(key, index, piece.run.row, piece.run.rows)
                if not identical(found, plan.tensor(piece)):
                    raise ConvertError(
                        f"{job.aside / name}: {key}{list(index) or ''} differs from {piece.source.name} of "
                        f"{plan.weights.file_of(piece.source.name)}"
                    )
                advance(plan.size_bytes(piece))

        job.each(plan.files, compare)


def forget(paths: Iterable[Path]) -> None:
    """Have the kernel drop what it keeps of files in memory, so that they are read from the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
