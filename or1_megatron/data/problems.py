"""Problem sets: the rows of files, folders and sets on the Hugging Face hub, and the ``Problem`` records made of them.

Reading is strict: a row that cannot be used is named by file, line and field.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from or1_verify.problems.problem import check_ground_truth, read_problem
from or1_verify.problems.rows import DIFFICULTY_TRIES, DataError, RowError, parquet_rows, shown
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Problem, Verifier

SUFFIXES = (".jsonl", ".parquet")

PlacedRow = tuple[str, Any]
"""(origin, decoded row, or the RowError of a line that is not JSON). The origin is file:line, file:row (Parquet) or
hub id[split]:row, all from 1."""

_SCRIPTED = "Dataset scripts are no longer supported"  # a part of what datasets says of such a set
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_problems(
    path: Path, split: str | None = None, unusable: UnusableRows | None = None, subset: str | None = None
) -> list[Problem]:
    """Read all problems of a ``.jsonl`` or ``.parquet`` file, a folder of them, or a set on the hub, in their order.

    The layout is any of ``or1_verify.problems.layouts``: Skywork-OR1-RL-Data, {prompt, answer}, AIME, ... ``split``
    chooses among a folder's or a hub set's splits, such as math and code; ``subset`` is a hub set's configuration. That
    a ground truth can be read is left to ``check_ground_truths``, since the abilities that occur say which verifiers
    are needed.

    Args:
        unusable: takes the rows that cannot be used, a second row of the same problem among them; the caller settles
            them. None: they are refused.

    Raises:
        DataError: a file that is missing or cannot be read, a set without rows, or unusable rows.
    """
    path = Path(path)
    problems: list[Problem] = []
    origin_of: dict[str, str] = {}
    faults = UnusableRows() if unusable is None else unusable
    count = 0
    for origin, raw in read_rows(path, split, subset):
        count += 1
        try:
            problem = read_problem(raw, origin, default_source=path.stem)
            if problem.id in origin_of:
                raise RowError(
                    origin,
                    "the same problem as an earlier row",
                    f"the same problem as {origin_of[problem.id]} (source '{problem.source}' and messages are equal); "
                    "expected each problem once: delete one, or raise the source's repeat",
                )
        except RowError as error:
            faults.add(error)
        else:
            origin_of[problem.id] = origin
            problems.append(problem)
    if not count:
        raise DataError(f"{path}: holds no problems; expected at least one row")
    if unusable is None:
        faults.refuse()
    return problems


def check_ground_truths(
    problems: Sequence[Problem], verifiers: Mapping[str, Verifier], unusable: UnusableRows
) -> list[Problem]:
    """Return the problems whose ability has a verifier that can use their ground truth; the others are ``unusable``."""
    usable = []
    for problem in problems:
        try:
            check_ground_truth(problem, verifiers)
            usable.append(problem)
        except RowError as error:
            unusable.add(error)
    return usable


def filter_by_difficulty(problems: Sequence[Problem], model: str, unusable: UnusableRows) -> list[Problem]:
    """Return the problems that ``model`` neither always solved nor never (failures other than 0 and 16).

    A problem at which that model was not measured is ``unusable``. Raises DataError when nothing is left otherwise.
    """
    kept, before = [], len(unusable)
    for problem in problems:
        if model not in problem.difficulty:
            measured = ", ".join(sorted(problem.difficulty)) or "none"
            unusable.add(
                RowError(
                    problem.origin,
                    f"no model_difficulty of '{model}'",
                    f"field 'extra_info.model_difficulty': no entry for '{model}' (measured: {measured}); expected its "
                    f"failures in {DIFFICULTY_TRIES} tries; drop data.difficulty_model or name a measured model",
                )
            )
        elif problem.difficulty[model] not in (0, DIFFICULTY_TRIES):
            kept.append(problem)
    if not kept and len(unusable) == before:
        raise DataError(
            f"difficulty filter for '{model}' leaves none of {len(problems)} problems: at each it failed 0 or "
            f"{DIFFICULTY_TRIES} of {DIFFICULTY_TRIES} tries"
        )
    return kept


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
    files = sorted(file for file in folder.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if split is None:
        if not files:
            raise DataError(f"{folder}: holds no .jsonl or .parquet file of problems")
        return files
    chosen = [file for file in files if re.fullmatch(rf"{re.escape(split)}([-_.].*)?", file.stem)]
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "none"
        raise DataError(
            f"{folder}: no file of split '{split}'; expected {split}.jsonl, {split}.parquet or "
            f"{split}-*.parquet; its problem files: {names}"
        )
    return chosen


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
                text = shown(line.decode("utf-8", "replace").strip())
                row = RowError(origin, "not a JSON object", f"not a JSON object ({error}), found {text}")
            yield origin, row
