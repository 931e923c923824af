"""Reads problem sets, from files, folders or the Hugging Face hub, into ``Problem`` records.

Reading is strict: a data row that cannot be used is named by file, line and field. ``prompts`` makes token ids of the
problems, and drops problems whose prompts are too long.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pydantic_core import from_json

from or1_verify.problems.layouts import fitting_layouts
from or1_verify.problems.problem import check_ground_truth, read_problem
from or1_verify.problems.rows import DIFFICULTY_TRIES, DataError, RowError, parquet_rows, shown
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Problem, Verifier

SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".jsonl.zst", ".json.gz")

PlacedRow = tuple[str, Any]
"""(origin, data row). The row is decoded, or is the RowError of a line that is not JSON. The origin is file:line,
file:row (Parquet) or hub id[split]:row, counted from 1."""

_SAVED: Final = ("dataset_dict.json", "state.json")  # of datasets' save_to_disk
_ABSENT: Final = object()
log = logging.getLogger(__name__)

_SCRIPTED = "Dataset scripts are no longer supported"  # a part of what datasets says of such a set
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load_problems(
    path: Path,
    split: str | None = None,
    unusable: UnusableRows | None = None,
    subset: str | None = None,
    columns: Mapping[Any, str] = {},
) -> list[Problem]:
    """Read all problems of a file (``SUFFIXES``), of a folder of such files, or of a set on the hub, in their order.

    The columns are of any layout in ``or1_verify.problems.layouts``: Skywork-OR1-RL-Data, {prompt, answer}, AIME, ...
    ``split`` chooses among a folder's or a hub set's splits, such as math and code; ``subset`` is a hub set's
    configuration. Copies of a data row give one problem, and are counted. ``check_ground_truths`` checks the ground
    truths later, because the abilities that occur decide which verifiers are needed.

    Args:
        unusable: collects the data rows that cannot be used, such as a repeated problem with another answer; the caller
            decides about them. None: unusable rows raise DataError.
        columns: names of the columns that hold prompt and answer (``data.train.N.columns``), whatever the layout.

    Raises:
        DataError: a file is missing or cannot be read, a set has no rows, or rows are unusable.
    """
    path = Path(path)
    problems: dict[str, Problem] = {}
    faults = UnusableRows() if unusable is None else unusable
    count = copies = 0
    for origin, raw in read_rows(path, split, subset):
        count += 1
        try:
            chosen = choose_columns(raw, columns, origin) if columns else raw
            if count == 1:
                _say_layout(path, chosen)
            problem = read_problem(chosen, origin, default_source=_set_name(path))
            first = problems.setdefault(problem.id, problem)
            copies += first is not problem
            if first.ground_truth != problem.ground_truth:
                copies -= 1
                raise RowError(
                    origin,
                    "the same problem as an earlier row, with another answer",
                    f"the same problem as {first.origin} (source '{problem.source}' and messages are equal), whose "
                    "answer is another; expected one answer",
                )
        except RowError as error:
            faults.add(error)
    if not count:
        raise DataError(f"{path}: holds no problems; expected at least one row")
    if copies:
        log.warning("%s: %d of %d rows are copies of earlier ones and were folded", path, copies, count)
    if unusable is None:
        faults.refuse()
    return list(problems.values())


def choose_columns(raw: Any, columns: Mapping[Any, str], origin: str) -> Any:
    """Return a data row's {prompt, answer, ability, source}, from the columns named in ``columns``.

    The name ``a.b`` means field b of column a. If the row lacks the column named for ``ability`` or ``source``, that
    name itself is the value, as in ability: code.
    """
    if not isinstance(raw, Mapping):
        return raw
    chosen = {}
    for field, name in columns.items():
        value: Any = raw
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT and field in ("ability", "source"):
            value = name
        if value is _ABSENT:
            missing = f"no column '{name}'"
            raise RowError(origin, missing, f"{missing}, which columns.{field} names; this row has {sorted(raw)}")
        chosen[field] = value
    return chosen


def _say_layout(path: Path, raw: Any) -> None:
    fitting = fitting_layouts(raw) if isinstance(raw, Mapping) else []
    if len(fitting) > 1:
        log.info("%s: read as layout %s; its columns also fit %s", path, fitting[0], ", ".join(fitting[1:]))


def _set_name(path: Path) -> str:
    """Return a file's name without its suffixes. This name is the source of the file's problems that name no source."""
    return next((path.name.removesuffix(suffix) for suffix in SUFFIXES if path.name.endswith(suffix)), path.stem)


def check_ground_truths(
    problems: Sequence[Problem], verifiers: Mapping[str, Verifier], unusable: UnusableRows
) -> list[Problem]:
    """Return the problems whose verifier can use their ground truth; add the others to ``unusable``."""
    usable = []
    for problem in problems:
        try:
            check_ground_truth(problem, verifiers)
            usable.append(problem)
        except RowError as error:
            unusable.add(error)
    return usable


def filter_by_difficulty(problems: Sequence[Problem], model: str, unusable: UnusableRows) -> list[Problem]:
    """Return the problems that ``model`` solved in some but not all of its 16 tries.

    Problems not measured with the model are added to ``unusable``. Raises DataError if all are measured and none stays.
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
    """Yield the data rows of a file, of all files of a folder (in the order of their names), of a folder that
    ``datasets`` saved, or of a set on the hub.

    In a folder, ``split`` chooses the files named after it (train.jsonl, data/train-00000-of-00003.parquet).
    Raises DataError if a file is missing or cannot be read.
    """
    path = Path(path)
    if is_saved(path):
        yield from _saved_rows(path, split)
    elif path.is_dir():
        for file in files_of(path, split):
            yield from _file_rows(file)
    elif path.is_file():
        yield from _file_rows(path)
    elif is_hub_id(path):
        yield from hub_rows(str(path), split, subset)
    else:
        raise DataError(
            f"{path}: no such file; expected a file of problems ({', '.join(SUFFIXES)}), a folder or a hub id"
        )


def is_saved(path: Path) -> bool:
    """Return whether a path is a folder that ``datasets`` saved (``save_to_disk``)."""
    return any((path / name).is_file() for name in _SAVED)


def is_hub_id(path: Path) -> bool:
    """Return whether a path can name a set on the hub: it is owner/name, and no such file or folder exists."""
    return not _is_problem_file(path) and not path.exists() and bool(_HUB_ID.fullmatch(str(path)))


def files_of(folder: Path, split: str | None) -> list[Path]:
    """Return a folder's problem files, at any depth, or only those of ``split``. Raises DataError if there are none."""
    files = sorted(file for file in folder.rglob("*") if _is_problem_file(file) and file.is_file())
    if split is None:
        if not files:
            raise DataError(f"{folder}: holds no file of problems ({', '.join(SUFFIXES)})")
        return files
    chosen = [file for file in files if re.fullmatch(rf"{re.escape(split)}([-_.].*)?", _set_name(file))]
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:8]) or "none"
        raise DataError(
            f"{folder}: no file of split '{split}'; expected {split}.jsonl, {split}.parquet or "
            f"{split}-*.parquet; its problem files: {names}"
        )
    return chosen


def hub_rows(name: str, split: str | None, subset: str | None = None) -> Iterator[PlacedRow]:
    """Yield the rows of a hub set. Raises DataError if it cannot be loaded or ``split`` names none of its splits."""
    datasets = _datasets_package(name)
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # network, cache, unknown set or split
        if _SCRIPTED in str(error):
            yield from _downloaded_rows(name, split)
            return
        raise DataError(_unreachable(name, error)) from None
    yield from _loaded_rows(name, loaded, split)


def _datasets_package(of: object) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{of}: no file of problems; a set on the hub, or a folder of save_to_disk, needs the package 'datasets': "
            "pip install datasets"
        ) from None
    return datasets


def _loaded_rows(name: str, loaded: Any, split: str | None) -> Iterator[PlacedRow]:
    if isinstance(loaded, dict):
        if len(loaded) != 1 and split not in loaded:
            raise DataError(f"{name}: has splits {', '.join(loaded)}; expected one of them as 'split'")
        split = split or next(iter(loaded))
        loaded = loaded[split]
    for number, row in enumerate(loaded, start=1):
        yield f"{name}[{split}]:{number}" if split else f"{name}:{number}", row


def _saved_rows(folder: Path, split: str | None) -> Iterator[PlacedRow]:
    """Yield the rows of a folder that ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote."""
    datasets = _datasets_package(folder)
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # of many kinds
        raise DataError(f"{folder}: cannot be read as a folder of save_to_disk ({error})") from None
    yield from _loaded_rows(str(folder), loaded, split)


def _downloaded_rows(name: str, split: str | None) -> Iterator[PlacedRow]:
    """Yield the rows of a hub set with a loading script (LiveCodeBench). ``datasets`` does not run such scripts."""
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(name, repo_type="dataset", allow_patterns=[f"*{suffix}" for suffix in SUFFIXES])
    except Exception as error:  # as above
        raise DataError(_unreachable(name, error)) from None
    for file in files_of(Path(folder), split):
        for origin, row in _file_rows(file):
            yield f"{name}{origin.removeprefix(folder)}", row


def _unreachable(name: str, error: Exception) -> str:
    """Return the error text for a hub set that cannot be loaded; it names an earlier, perhaps partial, download."""
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


def _is_problem_file(path: Path) -> bool:
    return path.name.endswith(SUFFIXES)


def _file_rows(path: Path) -> Iterator[PlacedRow]:
    if not _is_problem_file(path):
        raise DataError(f"{path}: file name ends in '{path.suffix}'; expected {', '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        yield from parquet_rows(path)
        return
    with pa.input_stream(str(path), compression="detect") as file:
        try:
            if (start := file.read(2)) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(f"{path}: its text is UTF-16; expected UTF-8: iconv -f UTF-16 -t UTF-8")
            if start[:1] == b"[":
                for number, row in enumerate(from_json(start + file.read(), allow_inf_nan=True), start=1):
                    columns = {str(at): item for at, item in enumerate(row)} if isinstance(row, list) else row
                    yield f"{path}:{number}", columns
                return
        except ValueError as error:
            raise DataError(
                f"{path}: not a JSON list ({error}); expected a list of objects, or an object a line"
            ) from None
    with pa.input_stream(str(path), compression="detect") as file:
        yield from _jsonl_rows(path, io.TextIOWrapper(file, "utf-8-sig", "surrogateescape", "\n"))


def _jsonl_rows(path: Path, lines: Iterable[str]) -> Iterator[PlacedRow]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        origin = f"{path}:{number}"
        try:
            row = from_json(line.encode("utf-8", "surrogateescape"), allow_inf_nan=False)
        except ValueError as error:
            text = shown(line.strip())
            row = RowError(origin, "not a JSON object", f"not a JSON object ({error}), found {text}")
        yield origin, row
