"""``or1 report RUN...``: runs as one HTML page that needs only a browser."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from or1_megatron.report.page.aggregates import PASS_RATES, histograms, migration
from or1_megatron.report.page.embedding import packet
from or1_megatron.report.page.frame import asset, html_page
from or1_megatron.report.page.recordings import Recording, read_recordings
from or1_megatron.report.page.responses import packets
from or1_megatron.report.page.rollout_table import RolloutTable, join
from or1_megatron.report.page.selection import choose, named, thinned
from or1_megatron.report.page.tokens import TokenTexts, find_token_texts
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.schemas.metrics import METRICS

TEXTS = 200
"""Responses that are chosen to be shown in full."""
LIMIT_BYTES = 50_000_000
ROWS = 250_000
"""The most rows of the table of responses; beyond it, steps are left out."""

_STYLES = ("vendor/uplot/uPlot.min.css", "report.css")
_SCRIPTS = (
    *("format.js", "vendor/uplot/uPlot.iife.min.js", "data.js", "elements.js", "charts.js", "curves.js", "times.js"),
    *("lengths.js", "problems.js", "table.js", "response.js", "rollouts.js", "main.js"),
)
_NAMED_RUNS = 3
"""The most runs whose names the title lists."""

_ROWS_SHARE = 0.6
"""Share of the page for the table of responses; the rest is for texts."""


@dataclass(frozen=True)
class Written:
    """The size of a page. It lists ``rows`` of ``all_rows`` responses, ``texts`` of them in full."""

    size_bytes: int
    rows: int
    all_rows: int
    texts: int
    notes: tuple[str, ...]


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    ids: Sequence[str] = (),
    tokenizer: Path | None = None,
    texts: int = TEXTS,
    limit_bytes: int = LIMIT_BYTES,
    most_rows: int = ROWS,
) -> Written:
    """Draw ``runs`` to ``out``.

    Args:
        ids: responses to show in full beside ``texts`` chosen ones (``selection.named``).
        tokenizer: an HF folder; None: the run's export, else the model that it started from.

    Raises:
        FileNotFoundError: a path is not a run folder.
        ValueError: nothing is recorded yet, or the metrics alone are larger than ``limit_bytes``.
        UnknownRollout: ``ids`` name a response that is not kept.
    """
    recordings = read_recordings(runs)
    table = join([recording.rows for recording in recordings])
    wanted = named(table.columns, table.words["problem"], ids)
    head = _head_packet(recordings, table)
    frame_bytes = len(_page(recordings, head, "", {}).encode())
    if frame_bytes > limit_bytes:
        raise ValueError(f"the curves of {len(recordings)} runs alone take {frame_bytes:,} bytes; name fewer runs")
    notes: list[str] = []
    listed = _listed(table, most_rows, wanted, int(_ROWS_SHARE * (limit_bytes - frame_bytes)))
    if len(listed) < len(table):
        notes.append(
            f"{len(listed):,} of {len(table):,} responses are listed, those of every n-th step, since the page's size "
            "is limited. Histograms and the migration of problems count all of them"
        )
    order = list(dict.fromkeys([*wanted.tolist(), *listed[choose(table.part(listed), texts)].tolist()]))
    room = limit_bytes - frame_bytes - len(_rows_packet(table, listed, order, notes)) - 10_000
    packed, left_out = _fitting(_text_packets(recordings, table, order, tokenizer, notes), order, room)
    if left_out:
        notes.append(f"{left_out:,} of {len(order):,} texts are left out: the page would be over {limit_bytes:,} bytes")
    page = _page(recordings, head, _rows_packet(table, listed, list(packed), notes), packed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page.encode(), "the report")
    said = (*(f"{recording.label}: {note}" for recording in recordings for note in recording.notes), *notes)
    return Written(len(page.encode()), len(listed), len(table), len(packed), said)


def _head_packet(recordings: Sequence[Recording], table: RolloutTable) -> str:
    """Return the packet of all but the responses: what the first paint needs."""
    known = {metric.name: metric for metric in METRICS}
    measured = {name for recording in recordings for row in recording.metrics.values() for name in row}
    names = [name for name in known if name in measured] + sorted(measured - known.keys())
    runs: list[dict[str, Any]] = []
    columns: dict[str, NDArray[Any]] = {}
    for number, recording in enumerate(recordings):
        moved = migration(recording, table.words["problem"])
        if moved is not None:
            bins = moved.pop("bins")
            columns |= {f"bins/{number}/{period}": bins[period] for period in range(len(bins))}
        runs.append(
            {
                "label": recording.label,
                "path": str(recording.path),
                "stages": [[stage.name, stage.first_step, stage.max_response_tokens] for stage in recording.stages],
                "notes": recording.notes,
                "entropy_target": recording.entropy_target,
                "summary": _told(recording.summary),
                "steps": list(recording.metrics),
                "metrics": _series(recording, names),
                "histograms": histograms(recording),
                "migration": moved,
                "responses": len(recording.rows),
            }
        )
    described = [[name, known[name].unit, known[name].meaning] if name in known else [name, "", ""] for name in names]
    return packet({"runs": runs, "metrics": described, "pass_rates": PASS_RATES}, columns)


def _series(recording: Recording, names: Sequence[str]) -> dict[str, Any]:
    """Return by metric [places among the run's steps, values there (six digits; null: not finite)]. A metric that was
    never measured is left out."""
    found: dict[str, Any] = {}
    for name in names:
        there = [(i, row[name]) for i, row in enumerate(recording.metrics.values()) if name in row]
        if there:
            values = [None if value is None else float(f"{value:.6g}") for _, value in there]
            found[name] = [[i for i, _ in there], values]
    return found


def _told(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of summary.json that the page shows."""
    wanted = ("steps", "total_steps", "finished", "seed", "wall_s", "accuracy_before", "accuracy_after", "other_share")
    found = {name: summary.get(name) for name in wanted}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)}


def _listed(table: RolloutTable, most_rows: int, wanted: NDArray[np.int64], most_bytes: int) -> NDArray[np.int64]:
    """Return the rows of the page's table: all, or as many as fit into ``most_bytes``."""
    while True:
        listed = thinned(table.columns, most_rows, wanted)
        size = len(_rows_packet(table, listed, [], []))
        if size <= most_bytes or most_rows <= 1:
            return listed
        most_rows = max(1, int(min(most_rows, len(listed)) * min(0.9, most_bytes / size)))


def _rows_packet(table: RolloutTable, listed: NDArray[np.int64], texts: Sequence[int], notes: Sequence[str]) -> str:
    text_of = np.full(len(table), -1, np.int32)
    text_of[np.array(texts, np.int64)] = np.arange(len(texts))
    part = table.part(listed)
    columns: dict[str, NDArray[Any]] = {
        "run": part["run"].astype(np.uint16),
        **{name: part[name].astype(np.uint16) for name in ("stage", "source", "status")},
        **{name: part[name].astype(np.int32) for name in ("step", "problem", "sample", "tokens", "prompt_tokens")},
        **{name: part[name].astype(np.uint8) for name in ("truncated", "kept")},
        **{name: part[name] for name in ("reward", "advantage", "seconds", "log_prob", "difference", "entropy")},
        "text": text_of[listed],
    }
    return packet({"words": table.words, "notes": list(notes), "all": len(table)}, columns)


def _text_packets(
    recordings: Sequence[Recording], table: RolloutTable, order: Sequence[int], tokenizer: Path | None, notes: list[str]
) -> dict[int, str]:
    found: dict[int, str] = {}
    rows = np.array(order, np.int64)
    for number, recording in enumerate(recordings):
        mine = rows[table["run"][rows] == number]
        if not mine.size:
            continue
        tokens, why = _tokenizer_of(recording, tokenizer)
        if tokens is None:
            notes.append(
                f"{recording.label}: its tokens have no text, since no tokenizer was found ({why}); name its folder "
                "with --tokenizer"
            )
        packed = packets(recording.rows, table["row"][mine].tolist(), tokens)
        found |= {int(row): packed[int(table["row"][row])] for row in mine}
    return found


def _tokenizer_of(recording: Recording, given: Path | None) -> tuple[TokenTexts | None, str]:
    if given is not None:
        return TokenTexts(given), ""
    candidates = [RunFolder(recording.path).hf] + ([] if recording.model is None else [recording.model])
    return find_token_texts(candidates)


def _fitting(packed: Mapping[int, str], order: Sequence[int], room: int) -> tuple[dict[int, str], int]:
    """Return (the texts that fit into ``room`` bytes, in order of choice, and how many are left out)."""
    found: dict[int, str] = {}
    for row in order:
        size = len(packed[row]) + 80  # with its element
        if size <= room:
            found[row] = packed[row]
            room -= size
    return found, len(order) - len(found)


def _page(recordings: Sequence[Recording], head: str, rows: str, texts: Mapping[int, str]) -> str:
    named = [recording.label for recording in recordings]
    title = ", ".join(named) if len(named) <= _NAMED_RUNS else f"{len(named)} runs"
    body = asset("report.html").replace("{{title}}", escape(title))
    data = [_held("head", head), _held("rows", rows)]
    late = [_held(f"text-{place}", text) for place, text in enumerate(texts.values())]
    return html_page(f"or1 report: {title}", body + "".join(data), styles=_STYLES, scripts=_SCRIPTS, late="".join(late))


def _held(name: str, content: str) -> str:
    return f'<script type="text/plain" id="data-{name}">{content}</script>\n'
