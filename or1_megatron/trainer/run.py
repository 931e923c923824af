"""The entry point of every trainer rank, which ``or1 train`` starts under torchrun.

Rank 0 reads the problems, then starts Ray and the engines. ``trainer.ranks`` goes on from there. Importing
``trainer.ranks`` takes seconds, so rank 0 imports it while the engines start.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NoReturn

from or1_megatron.config.load import from_json
from or1_megatron.config.schema import Config
from or1_megatron.errors import PART_LOST, USER_ERROR, AgreedError, PartLost
from or1_megatron.runtime.console import native_lines_to, outlive_console
from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime.heartbeat import Heartbeat, beats_folder
from or1_megatron.runtime.imports import quick_imports
from or1_megatron.runtime.log import set_up_logging
from or1_megatron.runtime.run_folder import USER_OS_ERRORS, RunFolder
from or1_megatron.runtime.signals import StopRequested, is_launched
from or1_megatron.runtime.timeline import VARIABLE
from or1_verify.errors import UserError

_STARTED_S = time.time()


def finished_before(config: Config) -> Mapping[str, Any] | None:
    """Return the run's summary if its folder holds the finished run; None if there is still something to do."""
    folder = RunFolder(config.run.folder)
    if not folder.summary.is_file():
        return None
    summary = folder.read_summary()
    ended = summary["finished"] and summary["total_steps"] == config.total_steps
    return summary if ended else None


def show_again(config: Config, summary: Mapping[str, Any]) -> None:
    from or1_megatron.report.console.run_console import open_console, show_summary

    console, _ = open_console("plain")
    console.print(f"{config.run.folder} holds a finished run; remove it, or set another run.dir, to train again")
    show_summary(summary, console)


def run_rank(config: Config, rank: int) -> int:
    """Run this rank to its end and return its exit status: 0, or 3 when it was stopped before the end of the run."""
    folder = RunFolder(config.run.folder)
    set_up_logging(folder.logs, rank)
    native_lines_to(folder.logs / f"rank_{rank}.log")
    if (summary := finished_before(config)) is not None:
        if rank == 0:
            show_again(config, summary)
        return 0
    stop = StopRequested(config.checkpoint.signal_grace_s)
    os.environ[VARIABLE] = str(folder.timeline.resolve()) if config.track.timeline else ""
    heart = Heartbeat(beats_folder(folder.run_id), f"rank {rank}")
    if rank == 0:
        return start_and_lead(config, folder, stop, heart)
    with quick_imports():
        from or1_megatron.trainer.ranks import serve

    serve(config, stop, heart)
    return 0


def start_and_lead(config: Config, folder: RunFolder, stop: StopRequested, heart: Heartbeat) -> int:
    """Run rank 0: read the problems, start Ray and the engines, and run the loop."""
    folder.create()
    with ExitStack() as stack:
        stack.enter_context(folder.lock())
        with quick_imports():
            from or1_megatron.data.prompts import read_problems
        problems = read_problems(config)
        stack.callback(problems.close)
        print(f"run {folder.root.resolve()}: {config.total_steps} steps in all", flush=True)
        with quick_imports():
            from or1_megatron.rollout.cluster import start_ray, stop_ray

        start_ray(config.cluster.ray_address, folder.run_id)
        stack.callback(stop_ray)
        with quick_imports():
            from or1_megatron.trainer.placement import start_engines

        engines = start_engines(config, folder, stack)
        with quick_imports():
            from or1_megatron.trainer.ranks import lead

        return lead(config, folder, problems, engines, stop, heart, _STARTED_S)


def note_failure(folder: RunFolder | None, rank: int, error: BaseException) -> None:
    """Record for the launcher why this rank ends."""
    if folder is not None:
        FaultRecord(folder.root).failed(f"rank {rank}")(f"{type(error).__name__}: {error}")


def main() -> int:
    """Run this rank, and return its exit status. The program's only argument is the configuration, as JSON."""
    outlive_console()
    rank = int(os.environ.get("RANK", "0"))
    folder: RunFolder | None = None
    try:
        if not is_launched():
            raise UserError("ranks are started by `or1 train` alone, on each node")
        config = from_json(sys.argv[1])
        folder = RunFolder(config.run.folder)
        return run_rank(config, rank)
    except (UserError, *USER_OS_ERRORS) as error:
        if rank == 0 or not isinstance(error, AgreedError) or os.environ["LOCAL_RANK"] == "0":
            print(f"or1: error: {error}", file=sys.stderr, flush=True)
        if rank > 0 and isinstance(error, AgreedError):
            return 0  # rank 0 fails; if this rank failed, rank 0 would be killed before its engines end
        note_failure(folder, rank, error)
        return PART_LOST if isinstance(error, PartLost) else USER_ERROR
    except Exception as error:
        note_failure(folder, rank, error)
        raise


def leave(status: int) -> NoReturn:
    """End this process with ``status``, once its other threads have ended and its exit functions have run.

    Python's own shutdown is skipped: in it, a daemon thread that waits in torch for a dead engine aborts the process.
    """
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.current_thread():
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())
