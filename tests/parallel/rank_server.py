"""Calls functions on ranks that are forks of this process, which has imported torch, Megatron and this package.

Otherwise each rank would spend seconds on imports. A request is a line of JSON on stdin, a list of jobs that run at the
same time. The answer is a line on stdout, the list of their results. The server ends when stdin is closed. A job has:

    ranks, timeout_s
    folder: the file ``call`` in it has the function and its arguments; each rank's output and what the function
        returns go there
    joined: start the process group before the call, and leave it afterwards
    watched: end the other ranks when one fails, as torchrun does; otherwise they must end by themselves

A job of one rank is started without torchrun's environment.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import sys
import time
import traceback
from multiprocessing.util import _exit_function
from pathlib import Path
from typing import Any

import or1_megatron.parallel  # noqa: F401  # isort: skip  # before Megatron, so that it compiles nothing without a GPU

import pytest  # noqa: F401
import torch.distributed as dist
import torch.nn.attention.bias  # noqa: F401  # torch's compiler with it, which some layouts need
import transformers.models.qwen2.modeling_qwen2  # noqa: F401
from megatron.core import dist_checkpointing  # noqa: F401
from ports import listen

from or1_megatron.parallel import parity  # noqa: F401
from or1_megatron.parallel.mesh import start_process_group, stop_process_group
from or1_megatron.trainer import synced_policy  # noqa: F401

AFTER_FAILURE_S = 20.0
"""How long the other ranks of a watched job may take to end after a failure."""


def fork_rank(job: dict[str, Any], rank: int, port: int) -> int:
    """Start one rank; return its pid."""
    pid = os.fork()
    if pid:
        return pid
    if job["ranks"] > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["ranks"], "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(job["watched"])
    log = os.open(output_of(job, rank), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 1
    try:
        function, arguments = pickle.loads(Path(job["folder"], "call").read_bytes())
        if job["joined"]:
            start_process_group(60)
        value = function(*arguments)
        if job["joined"]:
            stop_process_group()
        Path(job["folder"], f"{rank}.returned").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    _exit_function()  # ends what Megatron's saves have started
    os._exit(code)


def output_of(job: dict[str, Any], rank: int) -> Path:
    return Path(job["folder"], f"{rank}.log")


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] == "T"


def finish(job: dict[str, Any], pids: list[int]) -> list[int | str]:
    """Return exit statuses by rank (negative: the signal). A killed rank has "stopped", "ended" or "hung" instead."""
    ends: dict[int, int | str] = {}
    until, why = time.monotonic() + job["timeout_s"], "hung"
    while len(ends) < len(pids):
        left = [pid for pid in pids if pid not in ends]
        for pid in left:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[pid] = os.waitstatus_to_exitcode(status)
                if job["watched"] and ends[pid] != 0 and why == "hung":
                    until, why = time.monotonic() + AFTER_FAILURE_S, "ended"
        left = [pid for pid in left if pid not in ends]
        if left and (time.monotonic() > until or all(map(is_stopped, left))):
            for pid in left:
                ends[pid] = "stopped" if is_stopped(pid) else why
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        time.sleep(0.02)
    return [ends[pid] for pid in pids]


def run(job: dict[str, Any]) -> None:
    """Run a job and write its result beside its ranks' outputs."""
    listener = listen()
    port = listener.getsockname()[1]
    if not job["watched"]:
        listener.close()  # rank 0 hosts the store
    pids = [fork_rank(job, rank, port) for rank in range(job["ranks"])]
    store = None
    if job["watched"]:
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    ends = finish(job, pids)
    del store
    outputs = [output_of(job, rank).read_text(errors="replace") for rank in range(job["ranks"])]
    Path(job["folder"], "result.json").write_text(json.dumps({"ends": ends, "outputs": outputs}))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stray print is no answer
    gc.freeze()  # ranks collect after each layout, and would walk all of this each time
    for line in sys.stdin:
        jobs = json.loads(line)
        keepers = []
        for job in jobs:
            pid = os.fork()
            if not pid:  # keeps the job's store and ranks, so that this process stays as it is
                try:
                    run(job)
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            keepers.append(pid)
        for pid in keepers:
            os.waitpid(pid, 0)
        results = [json.loads(Path(job["folder"], "result.json").read_text()) for job in jobs]
        print(json.dumps(results), file=answers, flush=True)
    os._exit(0)  # tearing down what is imported takes seconds


if __name__ == "__main__":
    main()
