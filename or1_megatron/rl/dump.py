"""Dumps of single updates, which ``or1 replay`` repeats at any layout.

step_000012_update_0/
  samples.npz   the batch's samples
  dump.json     objective, results, model and layout, versions; written last
  weights/      HF folder of the parameters before the update (safety.dump_weights)
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from or1_megatron.config.base import ConfigError
from or1_megatron.interfaces import Objective
from or1_megatron.rl.objectives.registry import build, name_of
from or1_megatron.runtime.files import PARTIAL_SUFFIX, naming_disk_full
from or1_megatron.types import Float32Array, Sample, UpdateReport
from or1_verify.errors import UserError

SAMPLES: Final = "samples.npz"
RECORD: Final = "dump.json"
WEIGHTS: Final = "weights"
_FORMAT: Final = 5
_LENGTHS: Final = ".lengths"

Reason = Literal["skipped", "asked", "raised"]


class DumpError(UserError, ValueError):
    """A dump cannot be read; the message names the file, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class UpdateDump:
    """One update: its inputs and its results.

    ``log_probs``: per sample, the policy's log-probs of the counted tokens, by a forward pass on the same weights;
    empty if the update raised, as are weights and results: then ``raised`` is the error.
    ``context``: sections of the resolved configuration (``model``, ``parallel``, ``optimizer``), and ``versions``.
    """

    step: int
    update: int
    """SGD step within the rollout step, from 0."""
    reason: Reason
    objective: Objective
    samples: tuple[Sample, ...]
    token_count: int
    report: UpdateReport
    log_probs: tuple[Float32Array, ...]
    context: Mapping[str, Any]
    raised: str = ""


def first_not_finite(log_probs: Sequence[Float32Array]) -> dict[int, int]:
    """Map each sample with a log-prob that is not finite to its first such token, by the counted tokens."""
    bad = {index: ~np.isfinite(values) for index, values in enumerate(log_probs)}
    return {index: int(is_bad.argmax()) for index, is_bad in bad.items() if is_bad.any()}


def result_record(report: UpdateReport, log_probs: Sequence[Float32Array]) -> dict[str, Any]:
    """Return an update's result, JSON-able, with the first log-prob of each sample that is not finite."""
    return {
        "skipped": report.skipped,
        "grad_norm": _plain(report.grad_norm),
        "learning_rate": _plain(report.learning_rate),
        "sums": {name: _plain(value) for name, value in report.sums.items()},
        "first_not_finite": {str(sample): token for sample, token in first_not_finite(log_probs).items()},
    }


def report_of(record: Mapping[str, Any], token_count: int) -> UpdateReport:
    """Return the report of ``result_record``, without times."""
    return UpdateReport(
        sums={name: float(value) for name, value in record["sums"].items()},
        token_count=token_count,
        grad_norm=float(record["grad_norm"]),
        learning_rate=float(record["learning_rate"]),
        skipped=record["skipped"],
        forward_backward_s=0.0,
        optimizer_s=0.0,
    )


class DumpStore:
    """The dumps of a run, written aside and renamed. Those that were asked for stay, and the newest ``keep`` others."""

    def __init__(self, folder: Path, keep: int, context: Mapping[str, Any]) -> None:
        self.folder, self.keep, self.context = folder, keep, context

    def open(self, step: int, update: int) -> Path:
        """Return an empty folder for a dump; ``close`` puts it in its place. Raises OSError."""
        aside = self.folder / f"step_{step:06d}_update_{update}{PARTIAL_SUFFIX}"
        self.delete_partial()
        with naming_disk_full(aside, "a dump"):
            aside.mkdir(parents=True)
        return aside

    def close(self, aside: Path, dump: UpdateDump) -> Path:
        """Write the rest, put the dump in its place, delete the oldest, and return the folder. Raises OSError."""
        with naming_disk_full(aside, "a dump"):
            write_dump(aside, dump)
        final = aside.with_name(aside.name.removesuffix(PARTIAL_SUFFIX))
        shutil.rmtree(final, ignore_errors=True)  # a resumed run repeats steps
        os.replace(aside, final)
        unasked = [path for path in self.kept() if json.loads((path / RECORD).read_text())["reason"] != "asked"]
        for doomed in unasked[: -self.keep or None]:
            shutil.rmtree(doomed, ignore_errors=True)
        return final

    def delete_partial(self) -> None:
        """Delete unfinished dumps: one that failed, or that of a run that was killed."""
        for left in list(self.folder.glob(f"*{PARTIAL_SUFFIX}")):
            shutil.rmtree(left, ignore_errors=True)

    def kept(self) -> list[Path]:
        """Return all dumps in the order of writing. A run that went back to a checkpoint repeats step numbers."""
        records = sorted(self.folder.glob(f"step_*/{RECORD}"), key=lambda record: record.stat().st_mtime_ns)
        return [record.parent for record in records]


def write_dump(folder: Path, dump: UpdateDump) -> None:
    """Write ``samples.npz`` and ``dump.json`` into an existing folder. Raises OSError."""
    with (folder / SAMPLES).open("wb") as file:
        np.savez(file, **_arrays(dump))  # type: ignore[arg-type]  # numpy's stub takes them for its own options
        file.flush()
        os.fsync(file.fileno())
    assert is_dataclass(dump.objective) and not isinstance(dump.objective, type)
    record = {
        "format": _FORMAT,
        "step": dump.step,
        "update": dump.update,
        "reason": dump.reason,
        "raised": dump.raised,
        "objective": {"name": name_of(dump.objective), "fields": asdict(dump.objective)},
        "token_count": dump.token_count,
        "seen": result_record(dump.report, dump.log_probs),
        "context": dict(dump.context),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def read_dump(folder: Path) -> UpdateDump:
    """Read what ``write_dump`` wrote.

    Raises DumpError when it is not a dump, has another format, or its objective is not known.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise DumpError(
            f"{path}: no such file; expected a dump folder, as in <run>/dumps/step_000012_update_0"
        ) from None
    except ValueError as error:
        raise DumpError(f"{path}: not readable as JSON: {error}") from None
    if record.get("format") != _FORMAT:
        raise DumpError(
            f"{path}: format {record.get('format')}, expected {_FORMAT}; replay it with the version that wrote it"
        )
    try:
        objective = build(record["objective"]["name"], {}, record["objective"]["fields"])
    except ConfigError as error:
        raise DumpError(f"{path}: {error}; replay it with the version that wrote it") from None
    try:
        with np.load(folder / SAMPLES, allow_pickle=False) as arrays:
            columns = _columns(arrays)
        log_probs = columns.pop("log_probs", [])
        samples = [Sample(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DumpError(f"{folder / SAMPLES}: not readable: {error}") from None
    return UpdateDump(
        step=record["step"],
        update=record["update"],
        reason=record["reason"],
        objective=objective,
        samples=tuple(samples),
        token_count=record["token_count"],
        report=report_of(record["seen"], record["token_count"]),
        log_probs=tuple(log_probs),
        context=record["context"],
        raised=record["raised"],
    )


def _plain(value: float) -> float | str:
    """Turn nan and infinity, which JSON lacks, into words that float() reads."""
    return value if math.isfinite(value) else str(value)


def _arrays(dump: UpdateDump) -> dict[str, np.ndarray[Any, Any]]:
    """Return the samples' fields that are not None, by name: numbers as one array, arrays end to end with lengths."""
    columns = {name: [getattr(sample, name) for sample in dump.samples] for name in Sample.__slots__}
    columns["log_probs"] = list(dump.log_probs)
    arrays = {}
    for name, values in columns.items():
        if values and isinstance(values[0], np.ndarray):
            arrays[name] = np.concatenate(values)
            arrays[name + _LENGTHS] = np.array([value.size for value in values], dtype=np.int64)
        elif values and values[0] is not None:
            arrays[name] = np.array(values)
    return arrays


def _columns(arrays: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the values of each sample that ``_arrays`` put together, by the field's name."""
    columns = {}
    for name in (name for name in arrays if not name.endswith(_LENGTHS)):
        lengths = arrays.get(name + _LENGTHS)
        columns[name] = arrays[name].tolist() if lengths is None else np.split(arrays[name], lengths.cumsum()[:-1])
    return columns
