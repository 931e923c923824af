"""Cases of ``lockstep_worker`` with nobody to watch over their ranks: forks of one process that has imported it all.

``python forked_ranks.py FOLDER RANKS CASE...`` runs the cases some at a time and writes each one's exit statuses and
outputs to FOLDER/<case>/result.json. A rank that is stopped is killed once all others have ended, as torchrun would.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import lockstep_worker

AT_ONCE = 4
PATIENCE_S = 60.0


def start(case: str, folder: Path, ranks: int) -> list[int]:
    """The ranks' pids."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
            os.environ.update({name: str(value) for name, value in (place | {"MASTER_PORT": port}).items()})
            log = os.open(folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                lockstep_worker.main(case, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
        pids.append(pid)
    return pids


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T"


def finish(pids: list[int]) -> list[int | str]:
    """Exit statuses by rank (negative: the signal); "stopped" and "hung" for those that did not end by themselves."""
    ends: dict[int, int | str] = {}
    until = time.monotonic() + PATIENCE_S
    while len(ends) < len(pids):
        for pid in [pid for pid in pids if pid not in ends]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ends[pid] = os.waitstatus_to_exitcode(status)
        left = [pid for pid in pids if pid not in ends]
        if left and (time.monotonic() > until or all(map(stopped, left))):
            for pid in left:
                ends[pid] = "stopped" if stopped(pid) else "hung"
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        time.sleep(0.1)
    return [ends[pid] for pid in pids]


def main() -> None:
    folder, ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    while cases:
        now, cases = cases[:AT_ONCE], cases[AT_ONCE:]
        started = {case: start(case, folder / case, ranks) for case in now}
        for case, pids in started.items():
            ends = finish(pids)
            outputs = [(folder / case / f"{rank}.log").read_text() for rank in range(ranks)]
            (folder / case / "result.json").write_text(json.dumps({"ends": ends, "outputs": outputs}))


if __name__ == "__main__":
    main()
