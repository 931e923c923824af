"""The page of ``or1 report`` in a real Chromium: it draws itself, requests nothing, and its controls work.

Skipped without a browser (``make browser`` installs one). Not proven here: how it looks, and other browsers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chromium import Chromium, find_chromium
from report_runs import NASTY, evaluate, group, tokenizer_of_bytes, write_run

from or1_megatron.report.page.run_page import write_report
from or1_megatron.runtime.rollout_store import to_table
from or1_megatron.runtime.run_folder import RunFolder

TABS = ("overview", "metrics", "behaviour", "time", "lengths", "problems", "rollouts", "setup")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    executable = find_chromium()
    if executable is None:
        pytest.skip("no Chromium: `make browser` installs one into .venv/browser")
    with Chromium(executable, 1400, 900) as started:
        yield started


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return write_run(folder / "one"), write_run(folder / "two", steps=6, stage_steps=4)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A run that the test may change."""
    return write_run(tmp_path / "own")


@pytest.fixture(scope="module")
def page(runs: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the first run."""
    path = tmp_path_factory.mktemp("page") / "one.html"
    write_report([runs[0]], path, texts=20, ids=["p1/2/0"])
    return path


@pytest.fixture
def opened(browser: Chromium, page: Path) -> Chromium:
    show(browser, page)
    return browser


def show(browser: Chromium, page: Path, fragment: str = "") -> None:
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(page, fragment)
    browser.wait_for("document.documentElement.dataset.ready")


def go(browser: Chromium, tab: str) -> None:
    browser.evaluate(f"document.getElementById('tab-{tab}').click()")
    browser.wait_for(f"document.querySelector('[data-tab={tab}]')?.children.length")


def pick(browser: Chromium, selector: str, value: str) -> None:
    """Set a control and send its events."""
    browser.evaluate(
        f"(() => {{ const node = document.querySelector({selector!r}); node.value = {value!r}; "
        "for (const kind of ['input', 'change']) node.dispatchEvent(new Event(kind, {bubbles: true})); })()"
    )


def text(browser: Chromium, selector: str) -> str:
    found: str = browser.evaluate(f"document.querySelector({selector!r}).textContent")
    return found


def assert_quiet(browser: Chromium, page: Path) -> None:
    """Check that there were no errors or warnings, and no requests but for the page itself."""
    assert browser.complaints == []
    assert {url.partition("#")[0] for url in browser.requests} <= {page.as_uri()}


def test_every_part_draws_itself_and_asks_for_nothing(
    browser: Chromium, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Two runs with different stages, at two widths, light and dark; nothing is wider than the window."""
    path = tmp_path / "both.html"
    write_report(list(runs), path, texts=4)
    for width, dark in ((1400, False), (420, True)):
        browser.resize(width, 900, dark)
        show(browser, path)
        for tab in TABS:
            go(browser, tab)
            browser.wait_for(f"document.querySelector('[data-tab={tab}] :is(canvas, table, .row)')")
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, tab)
        assert_quiet(browser, path)
    rows = "[...table.rows].map(row => [...row.cells].map(cell => cell.textContent))"
    facts, differences, every = browser.evaluate(f"[...document.querySelectorAll('.setup')].map(table => {rows})")
    assert facts[2] == ["sessions", "2", "2"] and facts[4] == ["last began", "Monday", "Monday"]
    assert facts[5:] == [["host", "<b>a</b>", "<b>a</b>"]]
    assert differences[1:] == [["model.hf", *(f'"{run}/hf"' for run in runs)]]
    assert every[1] == differences[1] and ["stages.1.max_response_tokens", "16", "16"] in every
    browser.resize(1400, 900)
    show(browser, path)
    plot = '[data-tab=overview] [data-metric="accuracy/all"]'
    named = f"[...document.querySelectorAll('{plot} .stage')].filter(mark => mark.textContent === 'long').length"
    browser.wait_for(f"{named} === 2")  # after step 2 of one run and after step 4 of the other
    assert painted(browser, plot, SECOND_RUN) > 100  # over the first run, whose values are the same
    browser.evaluate("document.querySelectorAll('#runs button')[1].click()")
    browser.wait_for(f"{named} === 1")
    assert painted(browser, plot, FIRST_RUN) > 100 and painted(browser, plot, SECOND_RUN) == 0


FIRST_RUN, SECOND_RUN = (47, 111, 222), (217, 72, 15)
"""--c0 and --c1 of look.css, by day."""


def painted(browser: Chromium, chart: str, colour: tuple[int, int, int]) -> int:
    """Return how many pixels of the chart's canvas have the colour."""
    found: int = browser.evaluate(
        f"(() => {{ const canvas = document.querySelector('{chart} canvas'); "
        "const pen = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d'); pen.drawImage(canvas, 0, 0); "
        "const pixels = pen.getImageData(0, 0, canvas.width, canvas.height).data; let found = 0; "
        f"for (let i = 0; i < pixels.length; i += 4) found += {list(colour)}.every((c, k) => pixels[i + k] === c); "
        "return found; })()"
    )
    return found


def point(browser: Chromium, chart: str, across: float, kind: str = "mouseMoved", **more: Any) -> None:
    """Move the pointer to a share of the plot's width, or press or release its button there."""
    browser.wait_for(f"document.querySelector('{chart} .u-over')")
    left, top = browser.evaluate(
        f"(() => {{ const plot = document.querySelector('{chart} .u-over'); plot.scrollIntoView({{block: 'center'}}); "
        f"const box = plot.getBoundingClientRect(); return [box.x + {across} * box.width, box.y + box.height / 2] }})()"
    )
    browser.call("Input.dispatchMouseEvent", type=kind, x=left, y=top, **more)


def test_charts_tell_their_values_and_zoom(browser: Chromium, own: Path, tmp_path: Path) -> None:
    """Numbers from ``report_runs.write_run``. Steps 0 to 4 are on the axis, so step 2 is in its middle."""
    with (own / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 4, "accuracy/all": null}\n')
    path = tmp_path / "own.html"
    write_report([own], path)
    show(browser, path)
    accuracy = '[data-metric="accuracy/all"]'
    browser.wait_for(f"document.querySelector('{accuracy} .cross')")
    point(browser, accuracy, 0.52)
    browser.wait_for("!document.getElementById('tip').hidden")
    assert text(browser, "#tip") == "step 2 (short)\nown, accuracy/all: 0.2"
    point(browser, accuracy, 0.99)
    browser.wait_for("document.getElementById('tip').textContent === 'step 4 (long)\\nown, accuracy/all: not finite'")

    for kind, across in (("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseMoved", 0.9), ("mouseReleased", 0.9)):
        point(browser, accuracy, across, kind, button="left", clickCount=1)
    point(browser, accuracy, 0.0)
    browser.wait_for("document.getElementById('tip').textContent.startsWith('step 2 ')")
    for kind in ("mousePressed", "mouseReleased"):
        point(browser, accuracy, 0.5, kind, button="left", clickCount=2)
    point(browser, accuracy, 0.0)
    browser.wait_for("document.getElementById('tip').textContent === 'step 0\\nown, evaluation/accuracy: 0.25'")

    # The steps end after 0, 500, 1000, ... tokens and after 2 s, 6.5 s, 11 s, ...
    for axis, across, told in ("tokens", 0.28, "1, 500 response tokens"), ("hours", 0.5, "2, 0.00306 hours"):
        pick(browser, "select[aria-label=axis]", axis)
        point(browser, accuracy, across)
        browser.wait_for(f"document.getElementById('tip').textContent.startsWith('step {told} (short)')")
    go(browser, "time")
    point(browser, "[data-tab=time]", 0.5)
    browser.wait_for("document.getElementById('tip').textContent.startsWith('step 2: 4 s')")
    assert text(browser, "#tip").splitlines()[1:] == ["roll out: 3 s (75.0%)", "update: 1 s (25.0%)"]
    rolled_out, updated = (painted(browser, "[data-tab=time]", colour) for colour in (FIRST_RUN, SECOND_RUN))
    assert rolled_out == pytest.approx(3 * updated, rel=0.05)  # 3 s and 1 s in every step but the first

    go(browser, "lengths")
    counts = "[...document.querySelectorAll('[data-tab=lengths] .count')].map(mark => mark.textContent)"
    browser.wait_for(f"{counts}.length === 4")
    assert browser.evaluate(counts) == ["2", "4", "2", "4"]  # groups with 4 and with 0 truncated, in two stages
    point(browser, "[data-tab=lengths]", 0.01)
    browser.wait_for("document.getElementById('tip').textContent.startsWith('0 to 2 tokens: 8 responses')")
    assert text(browser, "#tip").splitlines()[1:] == ["right: 0", "not right: 0", "truncated: 8"]
    assert_quiet(browser, path)


def test_prompts_gained_and_lost_and_the_marks_of_alarms(browser: Chromium, own: Path, tmp_path: Path) -> None:
    """One of four held-out prompts is gained and one is lost. The alarm of step 3 is told at its step in its chart."""
    evaluate(own, {0: "4012", 2: "1111", 4: "2412"})
    sentence = "alarm 'entropy' at step 3: <i>too</i> low"
    (own / "alarms.jsonl").write_text(f'{{"step": 3, "text": "{sentence}"}}\n')
    path = tmp_path / "own.html"
    write_report([own], path)
    show(browser, path)
    browser.wait_for("document.querySelector('[data-metric=\"entropy/sampled\"] .alarm')")
    go(browser, "behaviour")
    browser.wait_for("document.querySelector('[role=status]')?.textContent")
    assert text(browser, "[role=status]") == "4 prompts in both: 1 gained, 1 lost, 2 as before"
    assert text(browser, ".alarms li") == sentence
    entropy = '[data-metric="behaviour/entropy/tenth/0"]'
    point(browser, entropy, 0.66)  # steps 1 to 4 are on the axis
    browser.wait_for(f"document.getElementById('tip').textContent.endsWith({f'▼ {sentence}'!r})")
    marked = (
        "[...document.querySelectorAll('.chart .alarm')].map((mark) => mark.closest('[data-metric]').dataset.metric)"
    )
    assert browser.evaluate(marked) == ["entropy/sampled", "behaviour/entropy/tenth/0", "behaviour/entropy/kind/space"]
    key = "new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true})"
    sides = "[...document.querySelectorAll('.sides .tokens')].map(one => one.textContent).join()"
    browser.wait_for(f"{sides} === '0 h1 0<eos>,4 h1 0<eos>'")  # it has changed most
    browser.evaluate(f"document.querySelector('.short').dispatchEvent({key})")
    browser.wait_for(f"{sides} === '0 h0 0<eos>,4 h0 0<eos>'")
    pick(browser, "[aria-label=from]", "1")
    assert text(browser, "[role=status]") == "4 prompts in both: 3 gained, 0 lost, 1 as before"
    assert_quiet(browser, path)


def test_a_run_of_one_step_has_charts(browser: Chromium, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    rows = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(rows[1] + "\n")
    path = tmp_path / "one.html"
    write_report([run], path)
    show(browser, path)
    for tab, chart in (("overview", '[data-metric="reward/mean"]'), ("time", "[data-tab=time]")):
        go(browser, tab)
        browser.wait_for(f"document.querySelector('{chart} canvas')")
        assert painted(browser, chart, FIRST_RUN) > 0
    assert_quiet(browser, path)


def test_filters(opened: Chromium, page: Path) -> None:
    """Numbers worked out from ``report_runs.write_run``: 48 responses, 23 right, 16 truncated, 16 of source 'words'."""
    go(opened, "rollouts")

    def told() -> str:
        return text(opened, "[role=status]")

    texts = page.read_text().count('id="data-text-')
    assert told().startswith(f"48 of 48 responses, mean reward 0.479, {texts} in full")
    controls = {
        name: f"#filters label:has(:nth-child(1)):nth-of-type({place}) :is(select, input)"
        for place, name in enumerate(
            ("from", "to", "reward", "truncated", "source", "status", "stage", "problem"), start=1
        )
    }
    for changes, count in (
        ({"reward": "1"}, 23),
        ({"truncated": "1"}, 16),
        ({"truncated": "0", "reward": "0"}, 9),
        ({"source": "1"}, 16),
        ({"from": "2", "to": "3"}, 24),
        ({"problem": "p2", "to": "1"}, 4),
        ({"stage": "1", "reward": "1"}, 11),
        ({"problem": "none such"}, 0),
    ):
        opened.evaluate("[...document.querySelectorAll('#filters button')].pop().click()")
        for name, value in changes.items():
            pick(opened, controls[name], value)
        assert told().startswith(f"{count} of 48 responses"), (changes, told())
        assert int(opened.evaluate("document.querySelector('.scroller').getAttribute('aria-rowcount')")) == count + 1
    assert_quiet(opened, page)


def test_a_response_with_its_tokens(browser: Chromium, page: Path) -> None:
    """Opened by its address: every token is shown, none of its text is interpreted, and shades follow the numbers."""
    show(browser, page, "#rollouts/0/p1/2/0")
    browser.wait_for("document.querySelectorAll('.tokens b').length")
    turned = f"x=0 {NASTY}<eos>".replace("\u202e", "◌")
    shown = "".join(c if c >= " " or c == "\n" else chr(0x2400 + ord(c)) for c in turned)
    assert text(browser, ".tokens") == shown
    assert text(browser, ".prompt").endswith(shown.removeprefix("x=0 ").removesuffix("<eos>"))
    assert browser.evaluate("window.broken === undefined")
    tokens = len(f"x=0 {NASTY}".encode()) + 1
    assert browser.evaluate("document.querySelectorAll('.tokens b').length") == tokens
    assert browser.evaluate("document.querySelectorAll('.tokens b.special').length") == 1

    def shades(mode: str) -> list[float]:
        pick(browser, "#detail select", mode)
        found: list[float] = browser.evaluate(
            "[...document.querySelectorAll('.tokens b')].map(b => "
            "Number((/[/,] ([.\\d]+)\\)/.exec(getComputedStyle(b).backgroundColor) ?? [0, 1])[1]))"
        )
        return found

    surprise = shades("engine log-prob")
    assert surprise[0] == 0 and np.all(np.diff(surprise) >= 0) and surprise[-1] == pytest.approx(0.72, abs=0.01)
    assert shades("log-prob difference") == pytest.approx([0.72] * tokens, abs=0.01)  # all alike
    assert np.all(np.diff(shades("entropy")) >= 0)
    assert shades("advantage") == pytest.approx([0.72] * tokens, abs=0.01)
    assert set(shades("none")) == {0.0}
    browser.evaluate(
        "document.querySelector('.tokens b').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    )
    tip = text(browser, "#tip")
    assert "token 1 of" in tip and '"x"' in tip and "policy − engine 0.25" in tip and "advantage 1" in tip
    assert_quiet(browser, page)


def test_what_is_not_in_the_page_is_said(opened: Chromium, page: Path) -> None:
    go(opened, "rollouts")
    opened.evaluate("document.querySelectorAll('.head button')[0].click()")  # by whether the text is here
    opened.evaluate("document.querySelectorAll('.head button')[0].click()")
    opened.evaluate("document.querySelector('.row').click()")
    opened.wait_for("!document.getElementById('detail').hidden")
    assert "--ids p" in text(opened, "#detail")
    assert_quiet(opened, page)


def test_how_pass_rates_move(browser: Chromium, page: Path, tmp_path: Path) -> None:
    """p0 stays at none and p1 at a half, p2 goes from 7 of 8 to all; its cell lists its 16 responses. A run of one
    stage is halved; held-out responses count in neither."""
    matrix = "[...document.querySelector('.matrix').rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
    path = tmp_path / "halves.html"
    evaluate(write_run(tmp_path / "halves", steps=2), {0: "4"})
    write_report([tmp_path / "halves"], path)
    for shown, periods in ((path, "steps 1–1 ↓  steps 2–2 →"), (page, "short ↓  long →")):
        show(browser, shown, "#problems")
        head, *rows = browser.evaluate(matrix)
        moves = {(i, j): n for i, row in enumerate(rows) for j, n in enumerate(row[1:]) if n not in ("", "0")}
        assert head[0] == periods and moves == {(0, 0): "1", (3, 3): "1", (4, 5): "1"}
    browser.evaluate("document.querySelector('.matrix').rows[5].cells[6].querySelector('button').click()")
    browser.wait_for("document.querySelector('[role=status]')?.textContent.startsWith('16 of 48')")
    assert_quiet(browser, page)


def big_run(root: Path, responses: int) -> Path:
    """Write ten steps that differ only in the step."""
    folder = RunFolder(root)
    folder.create()
    tokenizer = tokenizer_of_bytes(folder.hf)
    folder.write_config("{}")
    one = group("p", [("a", "right"), ("b", "wrong")] * 8, tokenizer)
    table = to_table(1, "only", [one] * (responses // 160), [])
    for step in range(1, 11):
        numbers = pa.array(np.full(table.num_rows, step, np.int32))
        pq.write_table(table.set_column(0, "step", numbers), folder.rollouts / f"step_{step:06d}.parquet")
    return root


def test_ten_thousand_rows_with_few_in_the_document(browser: Chromium, tmp_path: Path) -> None:
    page = tmp_path / "big.html"
    assert write_report([big_run(tmp_path / "big", 12_800)], page, texts=3).rows == 12_800
    show(browser, page, "#rollouts")
    browser.wait_for("document.querySelector('.row')")

    def shown() -> list[list[Any]]:
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        found: list[list[Any]] = browser.evaluate(
            "[...document.querySelectorAll('.row')].map(r => [r.ariaRowIndex ?? r.getAttribute('aria-rowindex'), "
            "r.children[1].textContent])"
        )
        assert len(found) < 100
        return found

    assert shown()[0] == ["2", "1"]
    browser.evaluate("document.querySelector('.scroller').scrollTop = 1e9")
    browser.wait_for("document.querySelector('.rows').lastChild.getAttribute('aria-rowindex') === '12801'")
    assert shown()[-1] == ["12801", "10"]
    browser.evaluate("document.querySelectorAll('.head button')[1].click()")  # by step, the last first
    assert shown()[0] == ["2", "10"]
    assert_quiet(browser, page)
