"""``or1 report``: the page of run folders that the real store wrote, read back without a browser.

``test_run_page_browser.py`` tests that a browser can draw it. Not proven here: how it looks.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from report_runs import NASTY, tokenizer_of_bytes, write_run
from tokenizers import Tokenizer, decoders, models
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.report.page import run_page, run_records
from or1_megatron.report.page.responses import TokenTexts
from or1_megatron.report.page.run_page import Written, write_report
from or1_megatron.report.page.run_records import labels
from or1_megatron.report.page.selection import UnknownRollout, choose

WEB = Path(run_page.__file__).with_name("web")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("report") / "run")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run that the test may change."""
    return write_run(tmp_path / "own")


def unpacked(page: str, name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return (header, columns) of a packet, without our reader."""
    found = re.search(rf'<script type="text/plain" id="data-{name}">([A-Za-z0-9+/=]*)</script>', page)
    assert found is not None, name
    whole = gzip.decompress(base64.b64decode(found[1]))
    length = int.from_bytes(whole[:4], "little")
    header = json.loads(whole[4 : 4 + length])
    columns = {
        column: np.frombuffer(whole, kind, size, 4 + length + first)
        for column, (kind, first, size) in header["columns"].items()
    }
    return header, columns


def report(runs: list[Path], out: Path, **options: Any) -> tuple[str, Written]:
    written = write_report(runs, out, **options)
    page = out.read_text()
    assert len(page.encode()) == written.size_bytes
    return page, written


def test_the_page_is_whole_and_names_the_license_of_what_it_carries(run: Path, tmp_path: Path) -> None:
    """One style, one script, and data: no content ends its element early. Nothing has an address to be loaded from."""
    page, written = report([run], tmp_path / "r.html")
    found = re.findall(r"<(script|style)([^>]*)>(.*?)</\1", page, re.S)  # ends as early as in a browser
    assert len(found) == 2 + 2 + written.texts  # style and script, head and rows
    code = [(tag, text) for tag, attributes, text in found if "text/plain" not in attributes]
    assert [tag for tag, _ in code] == ["style", "script"]
    for (_, text), last in zip(code, ("report.css", "main.js"), strict=True):
        assert text.rstrip().removesuffix("})();").rstrip().endswith((WEB / last).read_text(encoding="utf-8").rstrip())
        assert "The MIT License (MIT)\n\nCopyright (c) 2022 Leon Sorokin" in text
    assert not any("src=" in attributes or "href=" in attributes for _, attributes, _ in found)


def test_curves_and_rows(run: Path, tmp_path: Path) -> None:
    """3 problems x 4 samples x 4 steps; p0 is always truncated, the others never."""
    page, written = report([run], tmp_path / "r.html")
    assert (written.rows, written.texts, written.notes) == (48, 48, ())
    head = unpacked(page, "head")[0]
    assert [metric[0] for metric in head["metrics"]][:2] == ["stage/index", "reward/mean"]
    told = head["runs"][0]
    assert told["steps"] == [0, 1, 2, 3, 4]
    assert told["metrics"]["accuracy/all"] == [[1, 2, 3, 4], [0.1, 0.2, 0.3, 0.4]]
    assert told["metrics"]["evaluation/accuracy"] == [[0], [0.25]]
    assert told["stages"] == [["short", 1, 8], ["long", 3, 16]]
    assert told["config"]["algorithm"]["entropy"] == {"mode": "adaptive", "target": 0.25}
    assert told["sessions"][-1]["host"] == "<b>a</b>" and told["sessions"][0]["host"] == socket.gethostname()
    assert told["sessions"][0]["numpy"] == np.__version__
    assert [unit for name, unit, meaning in head["metrics"] if "one of k" in meaning] == ["fraction"]  # pass@16
    header, rows = unpacked(page, "rows")
    assert header["words"]["source"] == ["sums", "words"]
    assert rows["reward"].sum() == 4 * 2 + 3 + 3 * 4 and rows["truncated"].sum() == 16
    assert rows["kept"].sum() == 4 * 4 + 4  # p1 in all steps, p2 in step 1
    assert np.isnan(rows["difference"]).sum() == 48 - 20
    assert np.nanmax(np.abs(rows["difference"] - 0.25)) == 0  # a power of two: exact in float16


def test_a_text_token_by_token(run: Path, tmp_path: Path) -> None:
    """The tokens' texts are the response, its special token included; a character of four bytes is its last token's."""
    page, _ = report([run], tmp_path / "r.html", ids=["p1/2/0"], texts=0)
    assert "window.broken" not in page and page.count("</script>") == page.count("<script")
    header, columns = unpacked(page, "text-0")
    assert header["response"] == f"x=0 {NASTY}<eos>" and header["prompt"].endswith(NASTY)
    units = columns["units"]
    assert units.sum() == len(header["response"].encode("utf-16-le")) // 2
    assert units.size == len(f"x=0 {NASTY}".encode()) + 1 and units[-1] == len("<eos>")
    scientist = header["response"].encode().index("👩".encode())
    assert units[scientist : scientist + 4].tolist() == [0, 0, 0, 2]
    np.testing.assert_allclose(columns["log_prob"], -np.linspace(0, 2, units.size), atol=2e-3)
    assert set(columns["difference"].tolist()) == {0.25}
    assert columns["entropy"].tolist() == list(range(units.size))
    rows = unpacked(page, "rows")[1]
    assert np.flatnonzero(rows["text"] == 0).tolist() == [12 + 4]


def test_ids(run: Path, tmp_path: Path) -> None:
    _, written = report([run], tmp_path / "r.html", ids=["p1", "p0/3", "p1/1/2"], texts=0)
    assert written.texts == 16 + 4
    for wanted, said in {
        "q": "no rollout of a problem 'q' is kept",
        "p1/9": "the problem's are of step 1, 2, 3, 4",
        "p1/1/7": "no such rollout is listed",
        "p1/x": "expected PROBLEM, PROBLEM/STEP or PROBLEM/STEP/SAMPLE",
        "/1": "expected PROBLEM",
    }.items():
        with pytest.raises(UnknownRollout, match=said):
            write_report([run], tmp_path / "r.html", ids=[wanted])


def test_the_same_runs_give_the_same_page(run: Path, tmp_path: Path) -> None:
    assert report([run], tmp_path / "a.html", texts=9)[0] == report([run], tmp_path / "b.html", texts=9)[0]


def test_choice_covers_what_is_rare() -> None:
    """It takes 40 of 10,000 rows: each part of the run, right and wrong, the one truncated in a hundred and the small
    source, in each half of the steps."""
    rng = np.random.default_rng(0)
    rows = pd.DataFrame(
        {
            "run": 0,
            "step": np.repeat(np.arange(24), 500)[:10_000],
            "status": np.where(rng.random(10_000) < 0.9, "right", "wrong"),
            "truncated": rng.random(10_000) < 0.01,
            "source": np.where(rng.random(10_000) < 0.02, "small", "large"),
        }
    )
    chosen = choose(rows, 40)
    assert len(set(chosen)) == 40 and choose(rows, 40) == chosen
    taken = rows.loc[chosen]
    assert taken["step"].nunique() >= 12
    for half in (taken[taken["step"] < 10], taken[taken["step"] >= 10]):
        for rare in (half["status"] == "wrong", half["truncated"], half["source"] == "small"):
            assert 2 <= rare.sum() <= len(half) - 2
    assert sorted(choose(rows[:7], 200)) == list(range(7)) and choose(rows, 0) == [] == choose(rows[:0], 5)


def test_a_long_table_has_whole_steps_and_says_so(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_records, "ROWS", 24)
    page, thin = report([run], tmp_path / "r.html")
    assert set(unpacked(page, "rows")[1]["step"].tolist()) == {2, 4} and thin.rows == 24
    assert "responses of 2 of 4 files are listed and counted" in thin.notes[0]
    assert report([run], tmp_path / "r.html", ids=["p1/3"], texts=0)[1].rows == 36  # a step that is named is listed


def test_what_cannot_be_read_is_named_and_left_out(own: Path, tmp_path: Path) -> None:
    """Rollout files that a disk has damaged, that another version wrote, or that are being written; a metric that was
    not finite, and a last line of metrics that is being written."""
    rollouts = own / "rollouts"
    (rollouts / "step_000002.parquet").write_bytes(b"PAR1 torn")
    third = rollouts / "step_000003.parquet"
    third.write_bytes(third.read_bytes()[:-100])
    old = pq.read_table(rollouts / "step_000004.parquet").drop_columns(["reward"])
    pq.write_table(old, rollouts / "step_000006.parquet")
    (rollouts / "step_000005.parquet.partial").write_bytes(b"half")
    (own / "config.yaml").write_text("stages: [")
    (own / "summary.json").write_text('{"steps": 4, "seed": 3, "unknown": 1}')
    with (own / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 2, "loss": null}\n{"step": 5, "accuracy/all": 0.')
    page, written = report([own], tmp_path / "r.html")
    assert written.rows == 24
    for said, note in zip(
        (
            "config.yaml is left out: while parsing a flow node",
            "step_000005.parquet.partial: half-written",
            "step_000002.parquet is left out: not a rollout file",
            "step_000003.parquet is left out: not a rollout file",
            "step_000006.parquet is left out: it lacks reward",
        ),
        written.notes,
        strict=True,
    ):
        assert note.startswith(f"own: {said}")
    told = unpacked(page, "head")[0]["runs"][0]
    assert told["metrics"]["loss"] == [[2], [None]] and told["summary"] == {"steps": 4, "seed": 3}
    assert told["metrics"]["accuracy/all"][1] == [0.1, 0.2, 0.3, 0.4]
    assert told["notes"] == [note.removeprefix("own: ") for note in written.notes]
    (own / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl:1: expected a JSON object, found b'nonsense"):
        write_report([own], tmp_path / "r.html")


def test_runs_without_rollouts_metrics_or_tokenizer(own: Path, tmp_path: Path) -> None:
    (own / "metrics.jsonl").unlink()
    (own / "hf" / "tokenizer.json").unlink()
    page, written = report([own], tmp_path / "r.html")
    head = unpacked(page, "head")[0]["runs"][0]
    assert head["stages"] == []
    assert any("its tokens have no text, since no tokenizer was found" in note for note in written.notes)
    header, columns = unpacked(page, "text-0")
    assert "units" not in columns and header["response"]
    page, _ = report([own], tmp_path / "r.html", tokenizer=tokenizer_folder(tmp_path), ids=["p1"], texts=0)
    assert "units" in unpacked(page, "text-0")[1]
    for file in (own / "rollouts").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="nothing to show yet, neither metrics nor rollouts"):
        write_report([own], tmp_path / "r.html")
    (own / "metrics.jsonl").write_text('{"step": 1, "accuracy/all": 0.5}\n')
    page, written = report([own], tmp_path / "r.html")
    assert (written.rows, written.texts) == (0, 0) and "no rollouts are kept" in written.notes[-1]


def tokenizer_folder(folder: Path) -> Path:
    tokenizer_of_bytes(folder / "tokenizer")
    return folder / "tokenizer"


def test_the_command(run: Path, tmp_path: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["report", *arguments])
        return result.exit_code, result.output

    status, text = said(
        str(run), str(run), "--out", str(tmp_path / "new" / "r.html"), "--texts", "5", "--ids", "p0/1,p0/2"
    )
    assert status == 0, text
    assert "48 responses, 1" in text and (tmp_path / "new" / "r.html").is_file()
    assert said(str(tmp_path / "none")) == (2, f"or1: error: no run folder {tmp_path / 'none'}\n")
    status, text = said(str(tmp_path))
    assert status == 2 and "is not a run folder: it has neither config.yaml nor metrics.jsonl nor rollouts/" in text
    (tmp_path / "both" / "stage_1").mkdir(parents=True)
    (tmp_path / "both" / "stage_1" / "config.yaml").touch()
    assert said(str(tmp_path / "both"))[1].endswith("; these folders in it have: stage_1\n")
    (tmp_path / "evaluated").mkdir()
    (tmp_path / "evaluated" / "responses.jsonl").touch()
    status, text = said(str(tmp_path / "evaluated"))
    assert status == 2 and "holds an evaluation" in text
    status, text = said(str(run), "--ids", "zz", "--out", str(tmp_path / "r.html"))
    assert status == 2 and "no rollout of a problem 'zz' is kept" in text


def test_labels() -> None:
    assert labels([Path("/a/x/run"), Path("/b/x/run"), Path("/a/other")]) == ["a/x/run", "b/x/run", "a/other"]
    assert labels([Path("/a/one"), Path("/a/two")]) == ["one", "two"] and labels([Path("/a/run")]) == ["run"]


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A lone byte of a character becomes U+FFFD and is its next token's; an id beyond the vocabulary has no text."""
    tokenizer = tokenizer_of_bytes(tmp_path)
    half = tokenizer.encode("é").ids[0]
    text, units = TokenTexts(tmp_path).cut([half, tokenizer.encode("a").ids[0], 4711, half])
    assert text == "\ufffda\ufffd" and units.tolist() == [0, 2, 0, 1]
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        TokenTexts(tmp_path)


def test_spaces_of_a_tokenizer_that_marks_words(tmp_path: Path) -> None:
    """As Llama's first: ▁ begins a word, and decoding drops the space before the first. Characters beyond the
    vocabulary are tokens of one byte."""
    words = ["▁the", "▁end", "s", *(f"<0x{byte:02X}>" for byte in "é".encode())]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text, units = TokenTexts(tmp_path).cut([0, 1, 2, 3, 4, 0])
    assert text == "the endsé the" and units.tolist() == [3, 4, 1, 0, 1, 4]
