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
from report_runs import write_run
from typer.testing import CliRunner
from waiting import wait_until

from or1_megatron.commands.app import app
from or1_megatron.report.page import feed, run_page
from or1_megatron.report.page.server import PageServer


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@contextmanager
def serving(*runs: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with PageServer(feed.Feed(runs), host, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        try:
            yield server
        finally:
            server.shutdown()


def ask(server: PageServer, path: str, method: str = "GET", host: str = "localhost") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read()


def asked(server: PageServer, path: str) -> dict[str, Any]:
    status, body = ask(server, path)
    assert status == 200, body
    whole = gzip.decompress(body)
    header: dict[str, Any] = json.loads(whole[4 : 4 + int.from_bytes(whole[:4], "little")])
    return header


def test_the_feed_tells_new_steps_once(run: Path) -> None:
    """A torn line waits; a resume that cuts rows is seen; a run that is moved away is told, and comes back."""
    metrics = run / "metrics.jsonl"
    with serving(run) as server:
        head = asked(server, "/data/head")
        assert head["runs"][0]["steps"] == [0, 1, 2, 3, 4] and head["kept"] == [4]
        assert ask(server, f"/data/head?version={head['version']}") == (204, b"")
        with metrics.open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.')
        assert asked(server, f"/data/head?version={head['version']}")["runs"][0]["steps"] == [0, 1, 2, 3, 4]
        with metrics.open("a") as file:
            file.write('75}\nno row\n{"step": "x"}\n')
        told = asked(server, "/data/head")["runs"][0]
        assert told["steps"] == [0, 1, 2, 3, 4, 5] and told["metrics"]["reward/mean"][1][-1] == 0.75
        metrics.write_text('{"step": 1, "reward/mean": 0.5, "old": "text"}\n{"step": 1, "a": null}\n{"step": 0}\n')
        assert asked(server, "/data/head")["runs"][0]["metrics"] == {"reward/mean": [[1], [0.5]], "a": [[1], [None]]}
        run.rename(run.with_name("away"))
        assert ask(server, "/data/rows") == (404, f"the run folder {run} is gone".encode())
        run.with_name("away").rename(run)
        assert asked(server, "/data/head")["runs"][0]["steps"] == [0, 1]


def test_rows_counts_and_texts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from ``report_runs.write_run``: 12 responses per step; row 4 is the first of p1. An old file is named."""
    monkeypatch.setattr(feed, "COUNTED_ROWS", 24)
    with serving(run, write_run(run.with_name("earlier"), steps=2)) as server:
        newest, second = asked(server, "/data/rows"), asked(server, "/data/rows?step=2")
        assert (newest["step"], newest["all"], newest["steps"]) == (4, 12, [1, 2, 3, 4])
        assert (second["step"], second["all"], second["words"]["problem"]) == (2, 24, ["p0", "p1", "p2"])
        assert asked(server, "/data/text?step=2&row=16")["response"].startswith("x=0 ")  # of the earlier run
        assert ask(server, "/data/text?step=2&row=24")[0] == 404
        counts = asked(server, "/data/counts")
        assert (counts["counted"], counts["kept"], counts["problems"]) == ([2, 2], [4, 2], ["p0", "p1", "p2"])
        assert [stage["steps"] for stage in counts["runs"][0]["histograms"]] == [[2, 2], [4, 4]]
        (run / "rollouts" / "step_000004.parquet").write_bytes(b"PAR1 of another program")
        assert "step_000004.parquet is left out" in asked(server, "/data/rows")["notes"][0]


def test_who_is_answered(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only GET, with the token or on this machine; a second server is told of the port, a browser may go away."""
    with serving(run) as server:
        port = server.server_address[1]
        assert ask(server, "/")[0] == 200 and ask(server, "/", host="evil.example")[0] == 403
        assert [ask(server, "/", method)[0] for method in ("POST", "PUT", "DELETE")] == [501] * 3
        for path in ("/config.yaml", "/data/../../run/config.yaml", "/data/rows?step=../1", "/data/text"):
            assert ask(server, path)[0] == 404
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
        assert asked(server, "/data/head")["kept"] == [4]
    with serving(run, host="0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        for wrong in ("", "?token=", "?token=%C3%A9", f"?token={token[:-1]}"):
            assert ask(server, f"/data/head{wrong}")[0] == ask(server, f"/{wrong}")[0] == 403
        assert len(token) == 32 and asked(server, f"/data/head?token={token}")["kept"] == [4]
    assert "Traceback" not in capfd.readouterr().err


def test_long_curves_keep_their_extremes() -> None:
    """9,999 steps of zeros with one peak and one gap; what the page adds up stays whole."""
    rows = {step: {"x": float(step == 5000), "time/x": 1.0} for step in range(9999)} | {7000: {"x": None}}
    series = run_page._series(SimpleNamespace(metrics=rows), ["x", "time/x"], 2000)  # type: ignore[arg-type]
    places, values, measured = series["x"]
    assert measured == 9999 and 1000 <= len(places) <= 2000 and places == sorted(set(places))
    assert [(place, value) for place, value in zip(places, values, strict=True) if value != 0] == [
        (5000, 1),
        (7000, None),
    ]
    assert len(series["time/x"][0]) == 9998 and len(series["time/x"]) == 2


def test_the_live_page(run: Path) -> None:
    """By keyboard alone: new steps appear, responses are read; the run goes away. Only the server is asked."""
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium: `make browser` installs one into .venv/browser")
    with serving(run) as server, Chromium(executable, 1400, 900) as browser:
        browser.open(server.url, "#overview")
        browser.wait_for("document.documentElement.dataset.ready && document.querySelector('canvas')")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.75, "alarm/entropy": 1}\n')
        browser.wait_for("document.getElementById('facts').textContent.includes('up to step 5')")
        browser.wait_for("document.querySelector('details').textContent.includes('step 5alarm entropy')")

        def press(key: str, code: int, text: str = "") -> None:
            for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, text=text)

        def reach(found: str) -> None:
            here = f"document.activeElement.matches('{found}')"
            wait_until(lambda: (press("Tab", 9), browser.evaluate(here))[1], found)

        for button, shown in (("#tab-rollouts", '#step[value="4"]'), ("#earlier", '#step[value="3"]')):
            reach(button)
            press("Enter", 13, "\r")
            browser.wait_for(f"document.querySelector('{shown}')")
        reach(".scroller")
        for _ in range(5):
            press("ArrowDown", 40)
        browser.wait_for("document.querySelectorAll('.tokens b').length > 50")
        assert browser.evaluate("location.hash") == "#rollouts/0/p1/3/0"
        run.rename(run.with_name("away"))
        browser.wait_for("document.querySelector('#live.off')?.textContent.includes('is gone')")
        assert all(url.startswith(server.url) for url in browser.requests)
        assert all("404" in told for told in browser.complaints)
