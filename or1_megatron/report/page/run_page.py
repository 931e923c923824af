"""Writes the page of ``or1 report RUN...``: runs as one HTML file that needs only a browser."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from importlib.resources import files
from itertools import repeat
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from or1_megatron.report.page.behaviour import measure
from or1_megatron.report.page.encoding import packet
from or1_megatron.report.page.responses import TOKENIZER, TokenTexts, packets
from or1_megatron.report.page.rollout_table import WORDS, join
from or1_megatron.report.page.run_records import PageRun, read_page_runs
from or1_megatron.report.page.selection import choose, named, pairs
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.rollout_store import HELD_OUT
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.schemas.metrics import METRICS, Metric

TEXTS = 200
"""Default number of responses that are chosen to be shown in full."""

_WEB = files("or1_megatron.report.page") / "web"
_STYLES = ("look.css", "vendor/uplot/uPlot.min.css", "report.css")
_SCRIPTS = (
    *("format.js", "vendor/uplot/uPlot.iife.min.js", "data.js", "elements.js", "charts.js", "curves.js", "times.js"),
    *("lengths.js", "problems.js", "table.js", "response.js", "rollouts.js", "behaviour.js", "setup.js", "live.js"),
    "main.js",
)
_NUMBERS = {
    "uint8": ("truncated", "kept"),
    "uint16": ("run",),
    "int32": ("step", "sample", "tokens", "prompt_tokens"),
    "float32": ("reward", "advantage", "seconds", "log_prob", "difference", "entropy"),
}
"""Columns of the page's table of responses, by their type in the page."""


@dataclass(frozen=True)
class Written:
    """Facts about a page that was written: it lists ``rows`` responses, and shows ``texts`` of these in full."""

    size_bytes: int
    rows: int
    texts: int
    notes: tuple[str, ...]


def write_report(
    runs: Sequence[Path],
    out: Path,
    *,
    ids: Sequence[str] = (),
    tokenizer: Path | None = None,
    texts: int = TEXTS,
) -> Written:
    """Write the page of ``runs`` to ``out``.

    Args:
        ids: responses to show in full (``selection.named``), in addition to ``texts`` chosen responses.
        tokenizer: HF folder with the tokenizer; None: the run's export, else the model that the run started from.

    Raises:
        FileNotFoundError: a path is not a run folder.
        ValueError: no run has recorded anything yet.
        UnknownRollout: ``ids`` name a response that no run has kept.
    """
    steps = {int(step) for name in ids for step in name.split("/")[1:2] if step.isdigit()}
    records = read_page_runs(runs, steps)
    table = join([record.rows for record in records])
    wanted = named(table, ids)
    notes: list[str] = []
    others = dict.fromkeys([*pairs(table, texts // 4), *choose(table, texts)])
    chosen = list(dict.fromkeys([*wanted, *list(others)[:texts]]))
    packed = text_packets(records, table.loc[chosen], tokenizer, notes)
    more = {"notes": notes, "behaviour": behaviours(records, table, tokenizer)}
    head, rows = head_packet(records, {}), rows_packet(table, chosen, more)
    named_runs = [record.label for record in records]
    page = html(named_runs, {"head": head, "rows": rows}, [packed[row] for row in chosen]).encode()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, page, "the report")
    said = (*(f"{record.label}: {note}" for record in records for note in record.notes), *notes)
    return Written(len(page), len(table), len(chosen), said)


def head_packet(records: Sequence[PageRun], more: Mapping[str, Any], most: int = 0) -> bytes:
    """Return the packet that the browser needs first: all data except the responses. ``more``: further fields of the
    packet's header. ``most``: limit on a curve's points; above this limit only the lowest and the highest value of
    neighbouring steps stay. 0: all points stay."""
    known = {metric.name: metric for metric in METRICS}
    measured = {name for record in records for row in record.metrics.values() for name in row} - {"step"}
    names = [name for name in known if name in measured] + sorted(measured - known.keys())
    runs = [
        {
            "label": record.label,
            "path": str(record.path),
            "notes": record.notes,
            **record.facts,
            "steps": list(record.metrics),
            "metrics": _series(record, names, most),
        }
        for record in records
    ]
    found = [known.get(re.sub(r"@\d+$", "@<k>", name), Metric(name, "", "")) for name in names]
    described = [[name, metric.unit, metric.meaning] for name, metric in zip(names, found, strict=True)]
    return packet({"runs": runs, "metrics": described, **more}, {}, 1 if most else 6)


def _series(record: PageRun, names: Sequence[str], most: int) -> dict[str, Any]:
    """Return {metric: [step indices, values]} for the measured metrics. Values have six digits; None stands for a value
    that is not finite. A curve that leaves out points has a third element, the number of measured points."""
    series: dict[str, Any] = {}
    rows = [list(map(row.get, names, repeat(np.inf))) for row in record.metrics.values()]  # inf: not measured
    for name, found in zip(names, np.array(rows, np.float64).reshape(len(rows), len(names)).T.copy(), strict=True):
        there = np.flatnonzero(found != np.inf)
        whole = not most or name.startswith(("time/", "alarm/", "rollout/response_tokens"))  # the page adds them up
        per = 1 if whole else -(-2 * len(there) // most)
        drawn = there if per < 3 else there[_extremes(found[there], per)]
        values = [None if value != value else float(f"{value:.6g}") for value in found[drawn].tolist()]
        if values:
            series[name] = [drawn.tolist(), values, *([] if drawn is there else [len(there)])]
    return series


def _extremes(values: NDArray[np.float64], per: int) -> NDArray[np.intp]:
    """Return the indices of the lowest and the highest value in each part of ``per`` values. Nan counts as lowest."""
    padded = np.pad(np.nan_to_num(values, nan=-np.inf), (0, -len(values) % per), "edge").reshape(-1, per)
    return np.unique(per * np.arange(len(padded)) + [padded.argmin(axis=1), padded.argmax(axis=1)])


def behaviours(records: Sequence[PageRun], table: pd.DataFrame, tokenizer: Path | None) -> list[Any]:
    """Return, for each run, what ``behaviour.measure`` finds in the files of the training responses in ``table``."""
    found = []
    for number, record in enumerate(records):
        numbers = table.loc[(table["run"] == number) & (table["stage"] != HELD_OUT), "file"].unique()
        tokens = _tokenizer_of(record.path, record.model, tokenizer) if len(numbers) else None
        found.append(measure([record.files[number] for number in numbers], tokens))
    return found


def rows_packet(table: pd.DataFrame, texts: Sequence[int], more: Mapping[str, Any]) -> bytes:
    """Return the packet of the responses in ``table``, without their texts. ``texts``: row indices of the responses
    that the page shows in full. ``more``: further fields of the packet's header."""
    columns: dict[str, NDArray[Any]] = {
        name: table[name].to_numpy(kind) for kind, names in _NUMBERS.items() for name in names
    }
    columns |= {name: table[name].cat.codes.to_numpy("int32") for name in WORDS}
    text_of = pd.Series(range(len(texts)), index=list(texts), dtype="int32")
    columns["text"] = text_of.reindex(table.index, fill_value=-1).to_numpy("int32")
    words = {name: table[name].cat.categories.tolist() for name in WORDS}
    return packet({"words": words, **more}, columns)


def text_packets(
    records: Sequence[PageRun], chosen: pd.DataFrame, tokenizer: Path | None, notes: list[str]
) -> dict[int, bytes]:
    """Return, by row index, a packet for each response in ``chosen``, to be shown in full."""
    packed: dict[int, bytes] = {}
    for number, rows in chosen.groupby("run"):
        record = records[number]
        tokens = _tokenizer_of(record.path, record.model, tokenizer)
        if tokens is None:
            notes.append(
                f"{record.label}: its tokens have no text, since no tokenizer was found in its hf/ or its model.hf; "
                "name its folder with --tokenizer"
            )
        packed |= packets(record.files, rows, tokens)
    return packed


@lru_cache(4)
def _tokenizer_of(run: Path, model: Path | None, given: Path | None) -> TokenTexts | None:
    if given is not None:
        return TokenTexts(given)
    folders = [RunFolder(run).hf, *([] if model is None else [model])]
    return next((TokenTexts(folder) for folder in folders if (folder / TOKENIZER).is_file()), None)


def html(named: Sequence[str], embedded: Mapping[str, bytes], texts: Sequence[bytes] = ()) -> str:
    """Return the page of the runs ``named``, with the packets ``embedded``; without packets it asks its server."""
    title = ", ".join(named)
    body = _asset("report.html").replace("{{title}}", escape(title))
    data = [_held(name, content) for name, content in embedded.items()]
    late = [_held(f"text-{place}", text) for place, text in enumerate(texts)]
    return Template(_asset("frame.html")).substitute(
        title=escape(f"or1 {'report' if embedded else 'watch'}: {title}"),
        connect="" if embedded else "; connect-src 'self'",
        style="\n".join(map(_asset, _STYLES)),
        body=body + "".join(data),
        script="\n".join(map(_asset, _SCRIPTS)),
        late="".join(late),
    )


def _asset(name: str) -> str:
    """Return the text of a file of ``web/``. A file of ``vendor/`` gets its license as a comment at the start."""
    text = (_WEB / name).read_text(encoding="utf-8")
    if not name.startswith("vendor/"):
        return text
    license_text = (_WEB / str(PurePosixPath(name).with_name("LICENSE"))).read_text(encoding="utf-8")
    return f"/*!\n{license_text}\n*/\n{text}"


def _held(name: str, content: bytes) -> str:
    return f'<script type="text/plain" id="data-{name}">{base64.b64encode(content).decode()}</script>\n'
