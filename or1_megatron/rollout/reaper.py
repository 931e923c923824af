"""Ends what is left of an embedded Ray cluster after its driver was killed: a process of its own, without packages.

    python -I reaper.py SESSION_FOLDER PID_OF_THE_DRIVER

Ray ends most of its processes itself, but after ``kill -9`` of the driver its two agents stay for another minute,
trying to report the death to a server that died with it. A process belongs to the session when it has a file open under
the session's folder: every Ray process logs there, and the children of workers inherit their output.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

POLL_S = 0.5
GRACE_S = 3.0  # in this time workers end by themselves and close what they hold
GIVE_UP_S = 30.0


def session_processes(session: Path) -> list[int]:
    """Return the ids of the processes, other than this one, that hold a file under ``session`` open."""
    holders = []
    prefix = f"{session}{os.sep}"
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            files = [os.readlink(fd.path) for fd in os.scandir(f"{entry.path}/fd")]
        except OSError:
            continue  # it has ended, or is another user's
        if any(file.startswith(prefix) for file in files):
            holders.append(int(entry.name))
    return holders


def main(session: Path, driver: int) -> None:
    while os.getppid() == driver:  # a driver that died before this was asked is no parent any more
        time.sleep(POLL_S)
    time.sleep(GRACE_S)
    deadline = time.monotonic() + GIVE_UP_S
    while (left := session_processes(session)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), int(sys.argv[2]))
