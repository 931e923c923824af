"""Read the rows of files, folders and sets on the Hugging Face hub, each with its place."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from or1_verify.problems.rows import DataError, RowError, parquet_rows, shown

SUFFIXES = (".jsonl", ".parquet")

PlacedRow = tuple[str, Any]
"""(origin, decoded row, or the RowError of a line that is not JSON). The origin is file:line, file:row (Parquet) or
hub id[split]:row, all from 1."""

_SCRIPTED = "Dataset scripts are no longer supported"  # a part of what datasets says of such a set
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def read_rows(path: Path, split: str | None = None, subset: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a file, of all files of a folder (in the order of their names), or of a set on the hub.

    ``split`` chooses, in a folder, the files that are named after it (train.jsonl, data/train-00000-of-00003.parquet).
    Raises DataError for a file that is missing or cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        for file in files_of(path, split):
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    elif is_hub_id(path):
        yield from hub_rows(str(path), split, subset)
    else:
        raise DataError(f"{path}: no such file; expected a .jsonl or .parquet file of problems, a folder or a hub id")


def is_hub_id(path: Path) -> bool:
    """Return whether it can name a set on the hub: owner/name, and no such file or folder here."""
    return path.suffix not in SUFFIXES and not path.exists() and bool(_HUB_ID.fullmatch(str(path)))


def files_of(folder: Path, split: str | None) -> list[Path]:
    """Return the problem files of a folder, at any depth. Raises DataError when there are none."""
    found = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if split is not None:
        chosen = [file for file in found if re.fullmatch(rf"{re.escape(split)}([-_.].*)?", file.stem)]
        if not chosen:
            names = ", ".join(str(file.relative_to(folder)) for file in found[:8]) or "none"
            raise DataError(
                f"{folder}: no file of split '{split}'; expected {split}.jsonl, {split}.parquet or "
                f"{split}-*.parquet; its problem files: {names}"
            )
        found = chosen
    if not found:
        raise DataError(f"{folder}: holds no .jsonl or .parquet file of problems")
    return found


def hub_rows(name: str, split: str | None, subset: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a set that ``datasets`` can load. Raises DataError with its message, or naming the splits."""
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: no such file or folder here, and a set on the hub needs the package 'datasets': pip install "
            "datasets, or give a local path"
        ) from None
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # network, cache, unknown set or split
        if _SCRIPTED in str(error):
            yield from _downloaded_rows(name, split)
            return
        raise DataError(_unreachable(name, error)) from None
    if isinstance(loaded, dict):
        if len(loaded) != 1:
            raise DataError(f"{name}: has splits {', '.join(loaded)}; expected one of them as 'split'")
        split, loaded = next(iter(loaded.items()))
    for number, row in enumerate(loaded, start=1):
        yield f"{name}[{split}]:{number}", row


def _downloaded_rows(name: str, split: str | None) -> Iterator[PlacedRow]:
    """Yield the rows of a set with a loading script, as LiveCodeBench: ``datasets`` runs none, we read the files."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{suffix}" for suffix in SUFFIXES])
    except Exception as error:  # as above
        raise DataError(_unreachable(name, error)) from None
    for file in files_of(Path(folder), split):
        for origin, row in _file_rows(file):
            yield f"{name}{origin.removeprefix(folder)}", row


def _unreachable(name: str, error: Exception) -> str:
    """Return the message, which names an earlier download: ``datasets`` does not look for it, and it may be partial."""
    from huggingface_hub import snapshot_download

    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") == "1" else ""
    try:
        folder = snapshot_download(name, repo_type="dataset", local_files_only=True)
        instead = f"files of it are in {folder}: give that path if they are all there"
    except Exception:  # none was made
        instead = f"without a network: hf download --repo-type dataset {name} where there is one, and its path"
    return (
        f"{name}: no such file or folder here, and it could not be downloaded from the Hugging Face hub{offline}: "
        f"{error} ({instead})"
    )


def _file_rows(path: Path) -> Iterator[PlacedRow]:
    if path.suffix == ".parquet":
        yield from parquet_rows(path)
    elif path.suffix == ".jsonl":
        yield from _jsonl_rows(path)
    else:
        raise DataError(f"{path}: file name ends in '{path.suffix}'; expected .jsonl or .parquet")


def _jsonl_rows(path: Path) -> Iterator[PlacedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            origin = f"{path}:{number}"
            try:
                row = from_json(line, allow_inf_nan=False)
            except ValueError as error:
                found = shown(line.decode("utf-8", "replace").strip())
                row = RowError(origin, "not a JSON object", f"not a JSON object ({error}), found {found}")
            yield origin, row
