"""A save that is killed at any moment leaves a checkpoint that loads, and it is the newest that was ever complete.

Not proven here: that a disk keeps what was synced when the power fails, and kills of one rank of several.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import problem
import pytest
import ranks
import torch

from or1_megatron.checkpoint import loader, shard_files
from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.checkpoint.sharded_state import local_shards
from or1_megatron.parallel.mesh import start_process_group

KILLS = 80
STEPS = 60
AT_ANY_TIME = "at a random time"
OPERATIONS = {  # about how many there are in three saves
    "prepare": 3,
    "snapshot": 4,
    "write": 4000,
    "manifest": 6,
    "rename": 5,
    "best": 2,
    "delete": 30,
    AT_ANY_TIME: 1,
}
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}


class Life:
    """One process of the run."""

    def __init__(self, model: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        start_process_group(60)
        self.policy = problem.make_policy(model, lr=1e-3)
        self._batch = problem.batch(1, 512)
        self.tell = tell

    def digest(self) -> str:
        """Digest parameters, moments and generators."""
        state = [shard.tensor() for shard in local_shards(self.policy)] + [torch.get_rng_state()]
        digest = hashlib.sha256(repr(random.getstate()).encode())
        for tensor in state:
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    def step(self) -> None:
        problem.update(self.policy, self._batch)
        torch.rand(1)
        random.random()

    def whole(self) -> None:
        random.seed(3)
        self.tell({"digests": [self.digest()] + [(self.step(), self.digest())[1] for _ in range(STEPS)]})

    def resumed(self, folder: Path, digests: list[str]) -> None:
        """Resume from the newest intact checkpoint to the last step; save every step."""
        random.seed(3)
        keeper = CheckpointKeeper(folder, keep_last=2, keep_best=True, keep_every_steps=7)
        keeper.clean()
        newest = keeper.newest_intact()
        step = 0 if newest is None else int(loader.load(self.policy, newest)["step"])
        self.tell({"resumed": step, "same": self.digest() == digests[step]})
        saver = CheckpointSaver(self.policy)
        while step < STEPS:
            self.step()
            step += 1
            saver.save(keeper.folder_for(step), {"step": step})
            assert saver.finish(wait=True) is not None
            self.tell({"complete": step})
            keeper.saved(step, best=step % 5 == 0)


def die_at(phase: str, operation: int, folder: Path) -> None:
    """Kill this process as it is about to do its n-th operation of a phase."""
    left = operation

    def note(noted: str) -> None:
        nonlocal left
        left -= noted == phase
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        deleting = event in ("os.remove", "os.rmdir", "shutil.rmtree")  # of a tree, by names alone
        if event in EVENTS and (str(folder) in (path := f"{arguments[0]} {arguments[1]}") or deleting):
            by_name = {"manifest.json": "manifest", "best.partial": "best"}
            named = next((phase for part, phase in by_name.items() if part in path), None)
            note(
                named or ("delete" if deleting else {"os.rename": "rename", "os.mkdir": "prepare"}.get(event, "write"))
            )

    write, copied = shard_files._DigestedFile.write, CheckpointSaver._copied

    def noted_write(self: Any, data: Any) -> int:
        note("write")
        return write(self, data)

    def noted_copy(self: Any) -> Any:
        note("snapshot")
        return copied(self)

    shard_files._DigestedFile.write = noted_write  # type: ignore[method-assign]
    CheckpointSaver._copied = noted_copy  # type: ignore[method-assign]
    sys.addaudithook(audit)


def live(body: Callable[[Callable[[dict[str, Any]], None]], None], kill_after_s: float | None) -> list[dict[str, Any]]:
    """Run ``body`` in a forked process; return what it told before it ended."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body(lambda message: os.write(writing, (json.dumps(message) + "\n").encode()) and None)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = [pipe.readline()]  # the first says that it has resumed
        if kill_after_s is not None:
            time.sleep(kill_after_s)
            os.kill(pid, signal.SIGKILL)
        lines += pipe.readlines()
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    return [*(json.loads(line) for line in lines if line), {"killed": killed, "code": status}]


def live_and_die(model: Path, folder: Path, kills: int, seed: int) -> tuple[collections.Counter[str], list[Any]]:
    """Kill a run that saves after every step again and again, each time at another moment of its saves, and resume it.

    Each life is a forked process: it resumes from the newest intact checkpoint, compares the state with what the
    uninterrupted run had at that step, and goes on until it is killed, at a random time or as it is about to do its
    n-th operation of one phase of a save. Returns how often it was killed in each phase, and what was wrong.
    """
    rng = random.Random(seed)
    digests = live(lambda tell: Life(model, tell).whole(), None)[0]["digests"]
    phases: collections.Counter[str] = collections.Counter()
    wrong: list[Any] = []
    complete = lives = 0
    while phases.total() < kills:
        lives += 1
        phase = list(OPERATIONS)[lives % len(OPERATIONS)]
        operation = rng.randint(1, OPERATIONS[phase])

        def body(tell: Callable[[dict[str, Any]], None], phase: str = phase, operation: int = operation) -> None:
            life = Life(model, tell)
            if phase != AT_ANY_TIME:
                die_at(phase, operation, folder)
            life.resumed(folder, digests)

        delay_s = rng.uniform(0.0, 0.5) if phase == AT_ANY_TIME else None
        results = {key: value for message in live(body, delay_s) for key, value in message.items()}
        if "resumed" in results and (results["resumed"] < complete or not results["same"]):
            wrong.append({"complete": complete, **results})
        complete = max(complete, results.get("complete", 0))
        if results["killed"]:
            phases[phase] += 1
        elif results["code"] != 0:
            wrong.append(results)
            break
        if complete >= STEPS - 6:
            shutil.rmtree(folder)
            complete = 0
    return phases, wrong


@pytest.mark.slow
def test_killed_at_any_moment(tiny_qwen2: Path, tmp_path: Path) -> None:
    """SIGKILL in each phase of a save, and of dropping older ones: what is loaded next is no older than the newest that
    had been complete, and equals, to the bit, what the uninterrupted run had at that step: parameters, moments,
    generators."""
    phases, wrong = ranks.call(live_and_die, 1, tiny_qwen2, tmp_path / "checkpoints", KILLS, 11, joined=False)[0]
    assert wrong == []
    assert phases.total() == KILLS >= 50
    assert set(phases) == set(OPERATIONS)
