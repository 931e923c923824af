"""How long does the page of `or1 watch` take for a run of 10,000 steps and a million responses, and how much memory?

    python lab/benchmarks/watch.py FOLDER

makes the run in FOLDER if it is not there (48 MB of metrics, 1,000 files of 1,000 responses), serves it, and opens it in
a headless Chromium. CPU times are the server's; wall times are those of a machine that other programs use, too.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "report"))

from chromium import Chromium, find_chromium  # noqa: E402
from report_runs import group, tokenizer_of_bytes  # noqa: E402
from result import figure, write_result  # noqa: E402

from or1_megatron.runtime.rollout_store import to_table  # noqa: E402
from or1_megatron.runtime.run_folder import RunFolder  # noqa: E402
from or1_megatron.schemas.metrics import METRICS  # noqa: E402

STEPS, FILES = 10_000, 1000


def make(root: Path) -> None:
    folder = RunFolder(root)
    folder.create()
    tokenizer = tokenizer_of_bytes(folder.hf)
    folder.write_config(f"model: {{hf: {folder.hf}}}\nstages: [{{name: only, max_response_tokens: 400}}]\n")
    lengths = np.random.default_rng(0).integers(10, 70, (100, 10))
    made = [[("word " * int(n), "right" if n % 2 else "wrong") for n in each] for each in lengths]
    table = to_table(1, "only", [group(f"p{i}", each, tokenizer) for i, each in enumerate(made)], [])
    names = [metric.name for metric in METRICS if "<" not in metric.name]
    with folder.metrics.open("w") as out:
        for step in range(1, STEPS + 1):
            row = {name: random.random() for name in names if step % 10 == 0 or not name.startswith("evaluation/")}
            row |= {name: 0.0 for name in names if name.startswith("alarm/")}
            out.write(json.dumps({**row, "step": step, "stage/index": 0}) + "\n")
    for step in range(STEPS // FILES, STEPS + 1, STEPS // FILES):
        numbered = table.set_column(0, "step", pa.array(np.full(table.num_rows, step, np.int32)))
        pq.write_table(numbered, folder.rollouts / f"step_{step:06d}.parquet", compression="zstd")


def main(root: Path) -> None:
    if not root.exists():
        make(root)
    command = [sys.executable, "-m", "or1_megatron.commands.app", "watch", str(root), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert server.stdout is not None
    url, process, figures = server.stdout.readline().split()[0], psutil.Process(server.pid), {}

    def used_s() -> float:
        return float(sum(process.cpu_times()[:2]))

    executable = find_chromium()
    assert executable is not None
    with Chromium(executable, 1280, 900) as browser:
        before_s = used_s()
        for _ in range(3):
            browser.open(url)
            browser.wait_for("document.documentElement.dataset.ready")
            paint_s = browser.evaluate("performance.getEntriesByName('curves')[0].startTime / 1000")
            figures["curves painted"] = min(figures.get("curves painted", 1e9), paint_s)
        figures["server, CPU time of one opening"] = (used_s() - before_s) / 3
        for tab, ready in (("rollouts", ".row"), ("lengths", "canvas"), ("problems", "table"), ("time", "canvas")):
            start_s = time.monotonic()
            browser.evaluate(f"document.getElementById('tab-{tab}').click()")
            browser.wait_for(f"document.querySelector('[data-tab={tab}] {ready}')")
            figures[f"tab {tab}"] = time.monotonic() - start_s
        browser.evaluate("document.getElementById('tab-rollouts').click()")
        start_s = time.monotonic()
        browser.evaluate("document.querySelector('.row').click()")
        browser.wait_for("document.querySelectorAll('.tokens b').length")
        figures["a response in full"] = time.monotonic() - start_s
        for back in range(1, 21):
            browser.evaluate("document.getElementById('earlier').click()")
            browser.wait_for(f"document.getElementById('step').value == {STEPS - back * STEPS // FILES}")
        heap = browser.evaluate("performance.memory.usedJSHeapSize")
    before_s = used_s()
    time.sleep(60)
    idle, memory = (used_s() - before_s) / 60, process.memory_info().rss
    server.terminate()
    server.wait()
    limits = {"curves painted": {"at_most": 2.0}}
    told = {name: figure(round(value, 3), "s", **limits.get(name, {})) for name, value in figures.items()}
    told |= {"browser's heap": figure(heap / 1e6, "MB"), "server's memory": figure(memory / 1e6, "MB")}
    told["share of a core with nobody looking"] = figure(idle, "", at_most=0.005)
    print(json.dumps({"load": psutil.getloadavg(), **told}, indent=1))
    write_result("watch", told, {"steps": STEPS, "responses": 1000 * FILES, "load": psutil.getloadavg()})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
