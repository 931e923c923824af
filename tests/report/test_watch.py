"""``or1 watch``: the feed read back over HTTP from runs that grow, break and go away, and the live page in a Chromium.

Not proven here: how it looks, and how fast it is.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chromium import Chromium, find_chromium
from report_runs import evaluate, write_run
from typer.testing import CliRunner
from waiting import wait_until

from or1_megatron.commands.app import app
from or1_megatron.report.page import feed, run_page
from or1_megatron.report.page.server import PageServer


@contextmanager
def serving(*runs: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with PageServer(feed.Feed(runs), host, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: PageServer, path: str, method: str = "GET", host: str = "localhost") -> Any:
    """Return the header of the packet at ``path``, or else the status of the answer, and its text if it is 404."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200 or path == "/":
        return content.decode() if answer.status == 404 else answer.status
    whole = gzip.decompress(content)
    return json.loads(whole[4 : 4 + int.from_bytes(whole[:4], "little")])


def size(rows: Any) -> int:
    return int(rows["columns"]["step"][2])


def test_the_feed_tells_new_steps_once(tmp_path: Path) -> None:
    """A torn line waits; a resume that cuts rows is seen; a run that is moved away is told, and comes back."""
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        head = ask(server, "/data/head")
        assert head["runs"][0]["steps"] == [0, 1, 2, 3, 4] and head["kept"] == [f"0/rollouts/{i}" for i in (1, 2, 3, 4)]
        assert ask(server, f"/data/head?version={head['version']}") == 204
        with (run / "metrics.jsonl").open("a") as file:
            print('{"step": 5, "reward/mean": 0.', end="", file=file, flush=True)
            assert ask(server, f"/data/head?version={head['version']}")["runs"][0]["steps"] == [0, 1, 2, 3, 4]
            print('75}\nno row\n{"step": "x"}', file=file)
        told = ask(server, "/data/head")["runs"][0]
        assert told["steps"] == [0, 1, 2, 3, 4, 5] and told["metrics"]["reward/mean"][1][-1] == 0.75
        (run / "metrics.jsonl").write_text(
            '{"step": 1, "b": 0.5, "old": "text"}\n{"step": 1, "a": null}\n{"step": 0}\n'
        )
        assert ask(server, "/data/head")["runs"][0]["metrics"] == {"b": [[1], [0.5]], "a": [[1], [None]]}
        version = ask(server, "/data/head")["version"]
        (run / "summary.json").write_text('{"finished": true}')
        assert ask(server, f"/data/head?version={version}")["runs"][0]["summary"] == {"finished": True}
        run.rename(tmp_path / "away")
        assert ask(server, "/data/rows") == f"the run folder {run} is gone"
        (tmp_path / "away").rename(run)
        assert ask(server, "/data/head")["runs"][0]["steps"] == [0, 1]


def test_rows_counts_and_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from ``report_runs.write_run``: 12 responses per step; row 4 is the first of p1. An old file is named."""
    monkeypatch.setattr(feed, "COUNTED_ROWS", 24)
    run, earlier = write_run(tmp_path / "run"), write_run(tmp_path / "earlier", steps=2)
    evaluate(run, {0: "1", 4: "2"})
    with serving(run, earlier) as server:
        assert "0/evaluations/4" in ask(server, "/data/head")["kept"]
        both = "of=0/rollouts/2,0/evaluations/4,1/rollouts/2"
        rows, counts = ask(server, f"/data/rows?{both}"), ask(server, "/data/counts")
        assert (size(rows), rows["words"]["problem"]) == (12 + 4 + 12, ["h0", "p0", "p1", "p2"])
        assert ask(server, f"/data/text?{both}&row=20")["response"].startswith("x=0 ")  # of the earlier run
        assert size(counts) == (2 + 2) * 12 + 2 * 4
        assert [list(of) for of in counts["behaviour"]] == [["2", "4"], ["1", "2"]]
        (run / "rollouts" / "step_000004.parquet").write_bytes(b"PAR1 of another program")
        assert "step_000004.parquet is left out" in ask(server, "/data/rows?of=0/rollouts/4")["notes"][0]
        (run / "rollouts" / "step_000002.parquet").unlink()
        assert "0/rollouts/2 are not kept" in ask(server, f"/data/text?{both}&row=20")


def test_who_is_answered(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only GET, with the token or on this machine; a second server is told of the port, a browser may go away."""
    run = write_run(tmp_path / "run")
    with serving(run) as server:
        port = server.server_address[1]
        assert ask(server, "/") == 200 and ask(server, "/", host="evil.example") == 403
        assert [ask(server, "/", method) for method in ("POST", "PUT", "DELETE")] == [501] * 3
        for path in (
            "config.yaml",
            "data/../../run/config.yaml",
            "data/rows?of=../1",
            "data/text?of=0/rollouts/2&row=24",
        ):
            assert isinstance(ask(server, f"/{path}"), str)
        told = CliRunner().invoke(app, ["watch", str(run), "--port", str(port)])
        assert told.exit_code == 2 and f"cannot listen on port {port} of 127.0.0.1" in told.output
        for sent in (
            b"GET /data/head HTTP/1.0\r\nHost: localhost\r\n\r\n",
            b"GET /da",
            b"\x16\x03\x01 no HTTP\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port)) as gone:
                gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                gone.sendall(sent)
        assert ask(server, "/data/head")["kept"][0] == "0/rollouts/1"
    with serving(run, host="0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        for wrong in ("", "?token=", "?token=%C3%A9", f"?token={token[:-1]}"):
            assert ask(server, f"/data/head{wrong}") == ask(server, f"/{wrong}") == 403
        assert len(token) == 32 and ask(server, f"/data/head?token={token}")["kept"][0] == "0/rollouts/1"
    assert "Traceback" not in capfd.readouterr().err


def test_long_curves_keep_their_extremes() -> None:
    """9,999 steps of zeros with one peak and one gap; what the page adds up stays whole."""
    added = {"time/x": 1.0, "alarm/x": 0.0, "rollout/response_tokens": 9.0}
    rows = {step: {"x": float(step == 5000), **added} for step in range(9999)} | {7000: {"x": None}}
    series = run_page._series(SimpleNamespace(metrics=rows), ["x", *added], 2000)  # type: ignore[arg-type]
    (places, values, measured), *whole = series.values()
    assert measured == 9999 and 1000 <= len(places) <= 2000 and places == sorted(set(places))
    assert [(place, values[i]) for i, place in enumerate(places) if values[i] != 0] == [(5000, 1), (7000, None)]
    assert [list(map(len, each)) for each in whole] == [[9998, 9998]] * 3


def test_the_live_page(tmp_path: Path) -> None:
    """By keyboard alone: new steps appear, responses are read; the run goes away. Only the server is asked."""
    run, executable = write_run(tmp_path / "run"), find_chromium()
    evaluate(run, {0: "40", 4: "22"})
    if executable is None:
        pytest.skip("no Chromium: `make browser` installs one into .venv/browser")
    with serving(run) as server, Chromium(executable, 1400, 900) as browser:
        browser.open(server.url, "#overview")
        browser.wait_for("document.documentElement.dataset.ready && document.querySelector('canvas')")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.75, "alarm/entropy": 1}\n')
        browser.wait_for("document.getElementById('facts').textContent.includes('up to step 5')")
        browser.wait_for("document.querySelector('details').textContent.includes('step 5alarm')")

        def press(key: str, code: int, text: str = "", until: str = "true") -> bool:
            for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)
            return bool(browser.evaluate(until))

        def reach(found: str) -> None:
            wait_until(lambda: press("Tab", 9, until=f"document.activeElement.matches('{found}')"), found)

        for button, step in (("#tab-rollouts", 4), ("#earlier", 3)):
            reach(button)
            press("Enter", 13, "\r")
            browser.wait_for(f"document.querySelector('#step')?.value === '{step}'")
        reach(".scroller")
        for _ in range(5):
            press("ArrowDown", 40)
        browser.wait_for("document.querySelectorAll('.tokens b').length > 50")
        assert browser.evaluate("location.hash") == "#rollouts/0/p1/3/0"
        reach("#tab-behaviour")
        press("Enter", 13, "\r")
        sides = "[...document.querySelectorAll('.sides .tokens')].map(one => one.textContent).join()"
        browser.wait_for(f"{sides} === '0 h0 0<eos>,4 h0 0<eos>'")
        run.rename(tmp_path / "away")
        browser.wait_for("document.querySelector('#live.off')?.textContent.includes('is gone')")
        assert all(url.startswith(server.url) for url in browser.requests)
        assert all("404" in told for told in browser.complaints)
