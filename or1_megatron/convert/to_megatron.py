"""Converts an HF folder to a Megatron ``torch_dist`` checkpoint.

The checkpoint holds ``__0_N.distcp`` and ``.metadata`` (parameters), ``common.pt`` and ``metadata.json`` (for
Megatron's loader), ``hf/`` (the HF folder without its weights), ``conversion_record.json`` (for ``to_hf``) and
``manifest.json``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from torch import Tensor

from or1_megatron.checkpoint.manifest import FileEntry, write_manifest
from or1_megatron.checkpoint.shard_files import TensorSlice, WrittenSlice, write_metadata, write_slices
from or1_megatron.convert.hf_folder import DTYPES, INDEX, HFWeights, carried, carry, metadata_of
from or1_megatron.convert.job import Advance, ConvertError, convert
from or1_megatron.convert.rows import HFSource, MegatronTensor, Run, draft_tensor, megatron_tensors
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.files import check_weight_files, is_draft
from or1_megatron.weights.stacked_experts import in_files
from or1_megatron.weights.table import tied

RECORD: Final = "conversion_record.json"
HF: Final = "hf"
FILE_BYTES: Final = 1 << 30
_OUTPUT, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice of a Megatron tensor, and the rows of the HF tensor that are copied into it."""

    tensor: MegatronTensor
    source: HFSource
    run: Run

    @property
    def slice(self) -> TensorSlice:
        tensor = self.tensor
        offset = (*tensor.index, self.run.row, *(0,) * (len(tensor.shape) - 1))
        sizes = (*(1,) * len(tensor.index), self.run.rows, *tensor.shape[1:])
        return TensorSlice(tensor.keys[0], tensor.whole, offset, sizes, 0)


class ToMegatron:
    """The ``Conversion`` of an HF folder to a checkpoint in files of about ``file_bytes``."""

    def __init__(self, folder: Path, dtype: torch.dtype | None, file_bytes: int) -> None:
        self.folder, self._dtype = folder, dtype
        self.hf = read_hf_config(folder)
        check_weight_files(folder, self.hf)
        self.weights = HFWeights(folder)
        self.tensors = megatron_tensors(family_of(self.hf), self.hf)
        stored = self.weights.shapes
        self.tensors += [draft_tensor(name, shape) for name, shape in stored.items() if is_draft(name, self.hf)]
        # The files of a model with tied embeddings may hold the output layer, too.
        self.copies = {_OUTPUT: _EMBEDDING} if tied(self.hf) and _OUTPUT in stored else {}
        named = {source.name for tensor in self.tensors for source in tensor.sources}
        self.dropped = sorted(stored.keys() - set(map(in_files, named)) - self.copies.keys())
        self.files: dict[str, list[_Piece]] = {}
        held = file_bytes
        for piece in self._pieces():
            if held >= file_bytes:
                self.files[f"__0_{len(self.files)}.distcp"] = current = []
                held = 0
            current.append(piece)
            held += self._size_bytes(piece)
        self.sizes = {name: sum(map(self._size_bytes, pieces)) for name, pieces in self.files.items()}
        self._written: dict[str, tuple[list[WrittenSlice], FileEntry]] = {}

    def _pieces(self) -> Iterator[_Piece]:
        for tensor in self.tensors:
            if len({self._dtype_of(source) for source in tensor.sources}) > 1:
                raise ConvertError(
                    f"{self.folder}: {', '.join(source.name for source in tensor.sources)} are of several dtypes, and "
                    "Megatron holds them as one tensor; choose one with --dtype"
                )
            for source in tensor.sources:
                for run in source.pieces(self._dtype_of(source).itemsize):
                    yield _Piece(tensor, source, run)

    def _dtype_of(self, source: HFSource) -> torch.dtype:
        return self._dtype or DTYPES[self.weights.dtypes[in_files(source.name)]]

    def _size_bytes(self, piece: _Piece) -> int:
        return piece.run.rows * math.prod(piece.tensor.shape[1:]) * self._dtype_of(piece.source).itemsize

    def _tensor(self, piece: _Piece) -> Tensor:
        rows = self.weights.rows(piece.source.name, piece.run.hf_row, piece.run.rows)
        return rows.to(self._dtype_of(piece.source))

    def write(self, path: Path, advance: Advance) -> None:
        torch.serialization.set_crc32_options(False)  # of this thread; the manifest's digests check more
        slices = ((piece.slice, self._tensor(piece)) for piece in self.files[path.name])
        self._written[path.name] = write_slices(path, slices, advance)

    def complete(self, folder: Path) -> None:
        listed = [
            replace(stored, part=replace(stored.part, key=key))
            for name, pieces in self.files.items()
            for piece, stored in zip(pieces, self._written[name][0], strict=True)
            for key in piece.tensor.keys  # the same bytes under each name that a reader may use
        ]
        write_metadata(folder, listed)
        torch.save({"checkpoint_version": 3.0, "iteration": 0}, folder / "common.pt")
        carry(self.folder, carried(self.folder), folder / HF)
        (folder / RECORD).write_text(json.dumps(self._record(), indent=1))
        write_manifest(folder, {name: entry for name, (_, entry) in self._written.items()})

    def _record(self) -> dict[str, Any]:
        """Return the record that, with ``hf/``, lets ``to_hf`` write the same files again."""
        files = [
            {
                "name": path.name,
                "metadata": metadata_of(path),
                "tensors": [
                    [name, self.weights.dtypes[name]] for name in file.offset_keys() if name not in self.dropped
                ],
            }
            for path, file in self.weights.files.items()
        ]
        index = self.folder / INDEX
        return {
            "format": 1,
            "files": files,
            "index": index.read_text() if index.is_file() and not self.dropped else None,
            "copies": self.copies,
        }


def hf_to_megatron(
    hf: Path,
    out: Path,
    console: Console,
    *,
    dtype: torch.dtype | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Make the checkpoint ``out`` from the HF folder ``hf``.

    Args:
        dtype: dtype of the checkpoint; None: the dtype of the HF folder.

    Raises:
        ModelError: the HF folder cannot be used.
        ConvertError: the checkpoint cannot be made.
        DiskFullError: the disk became full while the checkpoint was written.
    """
    conversion = ToMegatron(hf, dtype, file_bytes)
    if conversion.dropped:
        console.print(f"left out, since the model does not use them: {', '.join(conversion.dropped)}")
    convert(conversion, out, console)
    console.print(f"{out}: {sum(conversion.sizes.values()):,} bytes of parameters, Megatron torch_dist")
