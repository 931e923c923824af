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
from typing import Any

import pytest
from chromium import Chromium, find_chromium
from report_runs import write_run
from typer.testing import CliRunner
from waiting import wait_until

from or1_megatron.commands.app import app
from or1_megatron.report.page import feed
from or1_megatron.report.page.feed import Feed
from or1_megatron.report.page.run_page import _series
from or1_megatron.report.page.server import PageServer
from or1_megatron.runtime.jsonl import GrowingSteps, read_steps


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@contextmanager
def serving(*runs: Path, host: str = "127.0.0.1") -> Iterator[PageServer]:
    with PageServer(Feed(runs), host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


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
        told = asked(server, f"/data/head?version={head['version']}")["runs"][0]
        assert told["steps"] == [0, 1, 2, 3, 4, 5] and told["metrics"]["reward/mean"][1][-1] == 0.75
        metrics.write_text('{"step": 0}\n{"step": 1, "reward/mean": 0.5, "old": "text"}\n')
        assert asked(server, "/data/head")["runs"][0]["metrics"] == {"reward/mean": [[1], [0.5]]}
        run.rename(run.with_name("away"))
        for name in ("head", "counts", "rows", "text?step=1&row=0"):
            assert ask(server, f"/data/{name}") == (404, f"the run folder {run} is gone".encode())
        run.with_name("away").rename(run)
        assert asked(server, "/data/head")["runs"][0]["steps"] == [0, 1]


def test_growing_steps_are_read_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    growing, lines = GrowingSteps(path), b'{"step": 2, "a": 1.0}\n{"step": 2, "b": null}\n{"step": 1, "a": 3}\n'
    assert growing.read() == {}
    for end in range(0, len(lines) + 1, 5):
        path.write_bytes(lines[:end])  # replaced, with the same beginning
        growing.read()
    path.write_bytes(lines)
    assert growing.read() == read_steps(path) == {1: {"step": 1, "a": 3}, 2: {"step": 2, "a": 1.0, "b": None}}


def test_rows_counts_and_texts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers from ``report_runs.write_run``: 12 responses per step; row 4 is the first of p1. An old file is named."""
    monkeypatch.setattr(feed, "COUNTED_ROWS", 24)
    earlier = write_run(run.with_name("earlier"), steps=2)
    with serving(run, earlier) as server:
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


def test_only_questions_with_the_token_are_answered(run: Path) -> None:
    with serving(run) as server:
        assert ask(server, "/")[0] == 200 and "token" not in server.url
        assert ask(server, "/", host="evil.example")[0] == 403  # a name that leads here
        for method in ("POST", "PUT", "DELETE"):
            assert ask(server, "/", method)[0] == 501
        for path in (
            "/../config.yaml",
            "/config.yaml",
            "/data/../../config.yaml",
            "/data/rows?step=../1",
            "/data/text",
        ):
            assert ask(server, path)[0] == 404
    with serving(run, host="0.0.0.0") as server:
        token = server.url.partition("?token=")[2]
        assert len(token) == 32
        assert [ask(server, f"/{more}")[0] for more in ("", "?token=", "?token=%C3%A9", f"?token={token[:-1]}")] == [
            403
        ] * 4
        assert ask(server, "/data/head")[0] == 403 and asked(server, f"/data/head?token={token}")["kept"] == [4]


def test_a_port_that_is_taken_and_a_browser_that_goes_away(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(run) as server:
        port = server.server_address[1]
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
    assert "Traceback" not in capfd.readouterr().err
    assert CliRunner().invoke(app, ["watch", str(run / "none")]).exit_code == 2


def test_long_curves_keep_their_extremes() -> None:
    """9,999 steps of zeros with one peak and one gap; what the page adds up stays whole."""
    rows = {step: {"x": float(step == 5000), "time/x": 1.0} for step in range(9999)} | {7000: {"x": None}}
    series = _series(type("Run", (), {"metrics": rows}), ["x", "time/x"], 2000)  # type: ignore[arg-type]
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
        browser.open(server.url.replace("127.0.0.1", "localhost"), "#overview")
        browser.wait_for("document.documentElement.dataset.ready && document.querySelector('canvas')")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 5, "reward/mean": 0.75, "alarm/entropy": 1}\n')
        browser.wait_for("document.getElementById('facts').textContent.includes('up to step 5')")
        browser.wait_for("document.querySelector('details').textContent.includes('step 5alarm entropy')")

        def press(key: str, code: int, times: int = 1) -> None:
            for _ in range(times):
                for kind in ("rawKeyDown", "keyUp"):
                    browser.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code)

        def reach(found: str) -> None:
            wait_until(lambda: press("Tab", 9) or browser.evaluate(f"document.activeElement.matches('{found}')"), found)

        reach("#tab-rollouts")
        browser.call("Input.dispatchKeyEvent", type="char", text="\r")
        browser.wait_for("document.querySelector('[role=status].note')?.textContent.startsWith('12 of 12 responses')")
        reach("#earlier")
        browser.call("Input.dispatchKeyEvent", type="char", text="\r")
        browser.wait_for("document.getElementById('step').value === '3'")
        reach(".scroller")
        press("ArrowDown", 40, times=5)
        browser.wait_for("document.querySelectorAll('.tokens b').length > 50")
        assert browser.evaluate("location.hash") == "#rollouts/0/p1/3/0"
        run.rename(run.with_name("away"))
        browser.wait_for("document.querySelector('#live.off')?.textContent.includes('is gone')")
        assert {url.split("/")[2] for url in browser.requests} == {f"localhost:{server.server_address[1]}"}
        assert all("404" in told for told in browser.complaints)
