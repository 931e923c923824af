"""Runs whole quickstarts under random kills and stops of random processes, without any help by hand.

    python lab/benchmarks/chaos.py --mean-s 45 --faults 40            # several runs, until so many faults have come
    python lab/benchmarks/chaos.py --mean-s 120 --faults 10 --name chaos_rare
    python lab/benchmarks/chaos.py --roles rank --mean-s 40 --faults 6 --name chaos_rank
    python lab/benchmarks/chaos.py --draw                             # the page and the table from what is there

First one quickstart runs undisturbed. Then each run gets faults at random times (exponential, seeded): a process of a
random role is killed (SIGKILL) or stopped (SIGSTOP). A loop stands in for the scheduler. It starts `or1 train` again
when the launcher itself was killed, and at most three times when the run gave up (as examples/job.sbatch does). Each
run's outcome is kept in runs/NAME. Finished runs are not repeated, broken-off runs are. Writes lab/results/NAME.json
and docs/images/NAME.svg.

"To progress" is the time from a fault to the next new row of metrics, which includes the end of the current step.
"later": the time from the row before the fault to this row, minus the same time in the undisturbed run. A fault that
came before an earlier fault was over is left out of both times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from result import ROOT, figure, write_result

from or1_megatron.errors import USER_ERROR
from or1_megatron.report.figures.style import GREY, as_svg, panels, styled
from or1_megatron.runtime.heartbeat import beats_folder, read_beats
from or1_megatron.runtime.run_folder import RunFolder

QUICKSTART = ROOT / "examples" / "quickstart"
SAVES = ["checkpoint.every_steps=1"]
"""Saves every step, so that a rank's death costs only the current step and a step whose save is not complete."""
ROLES = {  # what the command line of a process holds: its first word for Ray's programs
    "launcher": r"commands\.app train |bin/or1 train ",
    "rank": r"or1_megatron\.trainer\.run ",
    "engine": r"^ray::EngineActor",
    "manager": r"^ray::RolloutManager",
    "verifier": r"or1_verify\.pool\.pool_process ",
    "Ray": r"/raylet/raylet |/gcs/gcs_server ",
}
WEIGHTS = {"launcher": 1, "rank": 2, "engine": 2, "manager": 2, "verifier": 1, "Ray": 1}
COLOURS = dict(zip(ROLES, ("#b42318", "#c4631b", "#1f6feb", "#7a3fb5", "#1a7f5a", "#5b6470"), strict=True))
AT_MOST_S = {"engine": 12.0, "verifier": 2.0, "manager": 12.0, "rank": 25.0}
STALL_S = 15.0
ACCURACY_NOISE = 0.05
"""With 256 held-out problems at 85%, the standard error of a difference of two runs is 3%, plus the spread of seeds."""
EFFECTIVE = {45.0: 0.45, 120.0: 0.7}
GIVE_UP_S = 3600.0
QUEUED_AGAIN = 3
"""MAX_RESTARTS of examples/job.sbatch."""
MARK = "OR1_CHAOS"


class Disturbed:
    """One run of the quickstart, and its faults."""

    def __init__(self, folder: Path, seed: int, mean_s: float | None, roles: list[str]) -> None:
        """``mean_s``: mean time between faults; None: no faults. ``roles``: roles of the processes that they hit."""
        self.folder, self.seed, self.mean_s, self.roles = folder, seed, mean_s, roles
        self._draw = random.Random(1000 * seed + int(mean_s or 0))
        self._mark = uuid.uuid4().hex
        self._started_s = time.monotonic()
        self._epoch_s = time.time()
        self._seen: set[str] = set()
        self.faults: list[dict[str, Any]] = []
        self.rows: list[tuple[float, int]] = []
        self.starts: list[float] = []

    def run(self) -> dict[str, Any]:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        status: int | None = None
        gave_up = 0
        next_s = self._next_fault_s()
        with self.folder.with_suffix(".log").open("w") as log:
            while status != 0 and self._now_s() < GIVE_UP_S:
                self.starts.append(self._now_s())
                launcher = self._start(log)
                while (status := launcher.poll()) is None and self._now_s() < GIVE_UP_S:
                    self._read_rows()
                    if self._now_s() >= next_s and self._disturb():
                        next_s = self._next_fault_s()
                    time.sleep(0.1)
                gave_up += status not in (0, -signal.SIGKILL)
                if status == USER_ERROR or gave_up > QUEUED_AGAIN:
                    break
            if launcher.poll() is None:
                launcher.kill()
        wall_s = self._now_s()
        self._read_rows()
        return {**self._outcome(status, wall_s), "gave_up": gave_up}

    def _start(self, log: Any) -> subprocess.Popen[bytes]:
        sets = [f"run.seed={self.seed}", f"run.dir={self.folder}", "track.console=plain", *SAVES * bool(self.mean_s)]
        command = [sys.executable, "-m", "or1_megatron.commands.app", "train", str(QUICKSTART / "quickstart.yaml")]
        command += [part for key in sets for part in ("--set", key)]
        environment = {**os.environ, MARK: self._mark}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _now_s(self) -> float:
        return time.monotonic() - self._started_s

    def _next_fault_s(self) -> float:
        return self._now_s() + self._draw.expovariate(1 / self.mean_s) if self.mean_s else float("inf")

    def _disturb(self) -> bool:
        """Draw a role, and kill or stop a process of this role. Return False if there is no such process."""
        role = self._draw.choices(self.roles, [WEIGHTS[role] for role in self.roles])[0]
        stops = self._draw.random() < 0.5 and role != "launcher"  # a scheduler would see a launcher that hangs
        there = sorted(pid for pid, found in self._processes() if found == role)
        if not there:
            return False
        pid = self._draw.choice(there)
        doing = next((beat.doing for beat in read_beats(self._beats()) if beat.who == "rank 0"), "")
        try:
            os.kill(pid, signal.SIGSTOP if stops else signal.SIGKILL)
        except ProcessLookupError:
            return False
        fault = {"at_s": self._now_s(), "role": role, "stopped": stops, "doing": doing, "to_progress_s": None}
        fault["alone"] = not self.faults or self.faults[-1]["to_progress_s"] is not None
        if not fault["alone"]:
            self.faults[-1]["alone"] = False
        self.faults.append(fault)
        print(f"{fault['at_s']:7.1f} s  {'stop' if stops else 'kill'} {role} {pid} in '{doing}'", flush=True)
        return True

    def _processes(self) -> list[tuple[int, str]]:
        """Return the processes of this run whose role is in ``ROLES``, as (pid, role)."""
        found = []
        for process in self._marked():
            try:
                line = " ".join(process.cmdline()) + " "
            except psutil.Error:
                continue
            role = next((role for role, pattern in ROLES.items() if re.search(pattern, line)), None)
            if role is not None:
                found.append((process.pid, role))
        return found

    def _marked(self) -> list[psutil.Process]:
        """Return the run's processes: those with its mark in their environment, and their descendants, of which some
        overwrite the environment."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found |= {each.pid: each for each in (process, *process.children(recursive=True))}
            except psutil.Error:
                continue
        return [process for process in found.values() if _lives(process)]

    def _beats(self) -> Path:
        return beats_folder(RunFolder(self.folder).run_id)

    def _read_rows(self) -> None:
        """Note new rows of metrics. Rows that a resume deletes and writes again are not new."""
        file = self.folder / "metrics.jsonl"
        for line in file.read_text().splitlines(keepends=True) if file.is_file() else ():
            if line.endswith("\n") and line not in self._seen:
                self._seen.add(line)
                self.rows.append((self._now_s(), json.loads(line)["step"]))
                for fault in self.faults:
                    if fault["to_progress_s"] is None:
                        fault["to_progress_s"] = self._now_s() - fault["at_s"]

    def _outcome(self, status: int | None, wall_s: float) -> dict[str, Any]:
        summary_file, metrics = self.folder / "summary.json", self.folder / "metrics.jsonl"
        summary = json.loads(summary_file.read_text()) if summary_file.is_file() else {}
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()] if metrics.is_file() else []
        time.sleep(5.0)  # Ray's programs end a moment after the launcher
        record = self.folder / "faults.jsonl"
        mended = [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
        return {
            "seed": self.seed,
            "mean_s": self.mean_s,
            "status": status,
            "finished": bool(summary.get("finished")) and status == 0,
            "accuracy_after": summary.get("accuracy_after"),
            "wall_s": wall_s,
            "rows_in_order": steps == list(range(len(steps))) and len(steps) == summary.get("total_steps", -1) + 1,
            "left_behind": [f"{process.pid} {process.name()}" for process in self._marked()],
            "faults": self.faults,
            "rows": self.rows,
            "starts": self.starts,
            "mended": [{**each, "at_s": each["time_s"] - self._epoch_s} for each in mended],
        }


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def kept(path: Path, folder: Path, seed: int, mean_s: float | None, roles: list[str]) -> dict[str, Any]:
    """Return the outcome of a run, from the file ``path`` if it is there; otherwise run it first."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        outcome = Disturbed(folder, seed, mean_s, roles).run()
        path.write_text(json.dumps(outcome))
        ended = "finished" if outcome["finished"] else f"ENDED with status {outcome['status']}"
        print(f"seed {seed}: {ended} after {outcome['wall_s']:.0f} s and {len(outcome['faults'])} faults", flush=True)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def later_s(fault: dict[str, Any], rows: list[tuple[float, int]], undisturbed: dict[int, float]) -> float | None:
    """Return "later" (see the module) for a fault; None before the first row. ``undisturbed``: each step's seconds."""
    before = [at for at, _ in rows if at <= fault["at_s"]]
    after = [(at, step) for at, step in rows if at > fault["at_s"]]
    if not before or not after or after[0][1] not in undisturbed:
        return None
    at, step = after[0]
    return at - before[-1] - undisturbed[step]


def figures(runs: list[dict[str, Any]], undisturbed: dict[str, Any], mean_s: float, roles: list[str]) -> dict[str, Any]:
    """Return every figure, with its limit if it has one."""
    faults = [fault for run in runs for fault in run["faults"]]
    effective = statistics.fmean(undisturbed["wall_s"] / run["wall_s"] * run["finished"] for run in runs)
    found: dict[str, Any] = {
        "runs": figure(len(runs), ""),
        "faults": figure(len(faults), ""),
        "runs finished": figure(sum(run["finished"] for run in runs), "", at_least=len(runs)),
        "runs with whole rows in order": figure(sum(run["rows_in_order"] for run in runs), "", at_least=len(runs)),
        "times that a run gave up, and the scheduler's stand-in went on": figure(
            sum(run["gave_up"] for run in runs), ""
        ),
        "processes left behind": figure(sum(len(run["left_behind"]) for run in runs), "", at_most=0),
        "undisturbed: wall time": figure(undisturbed["wall_s"], "s"),
        "undisturbed: accuracy": figure(undisturbed["accuracy_after"], "share"),
        "accuracy, worst run": figure(min(run["accuracy_after"] or 0.0 for run in runs), "share"),
        "accuracy, mean of the runs minus undisturbed": figure(
            statistics.fmean(run["accuracy_after"] or 0.0 for run in runs) - undisturbed["accuracy_after"],
            "share",
            at_least=-ACCURACY_NOISE,
        ),
        "roles hit": figure(len({fault["role"] for fault in faults}), "", at_least=len(roles)),
        "effective training time": figure(effective, "share", at_least=EFFECTIVE.get(mean_s)),
    }
    rows = undisturbed["rows"]
    took = {step: at - before for (before, _), (at, step) in itertools.pairwise(rows)}
    for role in ROLES:
        for stopped in (False, True):
            alone = [
                (fault["to_progress_s"], later_s(fault, run["rows"], took))
                for run in runs
                for fault in run["faults"]
                if (fault["role"], fault["stopped"]) == (role, stopped) and fault["alone"] and fault["to_progress_s"]
            ]
            times, later = [time for time, _ in alone], [each for _, each in alone if each is not None]
            if times:
                limit = AT_MOST_S.get(role)
                limit = None if limit is None else limit + STALL_S * stopped
                name = f"{role} {'stopped' if stopped else 'killed'}: to progress"
                found[f"{name}, median of {len(times)}"] = figure(statistics.median(times), "s", at_most=limit)
                found[f"{name}, worst"] = figure(max(times), "s")
            if later:
                name = f"{role} {'stopped' if stopped else 'killed'}: later"
                found[f"{name}, median of {len(later)}"] = figure(statistics.median(later), "s")
    return found


@styled
def draw(runs: list[dict[str, Any]], undisturbed: dict[str, Any]) -> str:
    """Return an SVG with a line per run: rows of metrics are ticks, faults are dots with a bar to the next row."""
    lines = [("undisturbed", undisturbed), *((f"seed {run['seed']}", run) for run in runs)]
    figure, (axes,) = panels(1, width=10.0, height=0.8 + 0.3 * len(lines))
    for y, (_, run) in enumerate(lines):
        axes.plot([at for at, _ in run["rows"]], [y] * len(run["rows"]), "|", color=GREY)
        for fault in run["faults"]:
            colour = COLOURS[fault["role"]]
            axes.barh(y, fault["to_progress_s"] or 0.0, left=fault["at_s"], height=0.5, color=colour, alpha=0.15)
            axes.plot(fault["at_s"], y, "o", color=colour, markerfacecolor="white" if fault["stopped"] else colour)
    for role, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=role)
    figure.legend(loc="outside upper left", ncols=len(COLOURS), title="filled: killed; ring: stopped; ticks: rows")
    axes.set_yticks(range(len(lines)), [f"{name}, {run['wall_s']:.0f} s" for name, run in lines])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:g} s")
    return as_svg(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean-s", type=float, default=45.0, help="mean seconds between two faults")
    parser.add_argument("--faults", type=int, default=40, help="begin runs until so many faults have come")
    parser.add_argument("--seed", type=int, default=1, help="of the first run; the next ones count on")
    parser.add_argument("--name", default="chaos")
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=ROLES, help="which processes are hit")
    parser.add_argument("--draw", action="store_true", help="start nothing; use the runs that are there")
    arguments = parser.parse_args()
    folder = ROOT / "runs" / arguments.name
    task = [sys.executable, str(QUICKSTART / "task.py"), "--out", str(ROOT / "runs" / "quickstart_data")]
    subprocess.run([*task, "--train", "4096", "--held-out", "256", "--seed", "1"], check=True, cwd=ROOT)
    undisturbed = kept(folder / "undisturbed.json", folder / "undisturbed", arguments.seed, None, [])
    runs: list[dict[str, Any]] = []
    while sum(len(run["faults"]) for run in runs) < arguments.faults:
        seed = arguments.seed + len(runs)
        file = folder / f"seed_{seed}.json"
        if arguments.draw and not file.is_file():
            break
        runs.append(kept(file, folder / f"seed_{seed}", seed, arguments.mean_s, arguments.roles))
    found = figures(runs, undisturbed, arguments.mean_s, arguments.roles)
    phases = Counter(fault["doing"].partition(" after ")[0] for run in runs for fault in run["faults"])
    settings = {
        "mean seconds between faults": arguments.mean_s,
        "roles": arguments.roles,
        "seeds": [run["seed"] for run in runs],
        "faults by what rank 0 did": dict(phases.most_common()),
    }
    write_result(arguments.name, found, {**settings, "overrides of disturbed runs": SAVES})
    (ROOT / "docs" / "images" / f"{arguments.name}.svg").write_text(draw(runs, undisturbed))
    for name, each in found.items():
        print(f"{name}: {each['value']} {each['unit']}" + ("" if each.get("met", True) else "  MISSED"))


if __name__ == "__main__":
    main()
