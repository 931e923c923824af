"""Ranks under the launcher: signals reach the ranks and nothing else, exit codes come through, nothing is left behind.

The ranks are a small real module under the real torchrun agent. Not proven here: that the trainer's ranks save.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from waiting import PATIENCE_S, lives, wait_until

from or1_megatron.runtime.launch import _failed, threads_of_rank
from or1_megatron.runtime.signals import CPP_LOG_LEVEL, QUIET

RANK = """
import os, signal, subprocess, sys, time
rank, folder, what = os.environ["RANK"], sys.argv[1], sys.argv[2]
# As Ray's daemons: in the rank's process group. With "bare" nothing says whose it is.
helper = subprocess.Popen(
    [sys.executable, "-c", "import sys, time; [print(line, flush=True) for line in sys.stdin]; time.sleep(600)"],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={} if what == "bare" else None,
    start_new_session=what == "bare",
)
heard = []
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, lambda n, _: heard.append(n))
open(f"{folder}/{rank}.part", "w").write(f"{os.getpid()} {helper.pid}")
os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.up")
while not heard:
    time.sleep(0.05)
    if rank == "1" and what.startswith("exit") and os.path.exists(f"{folder}/0.up"):
        sys.exit(int(what[4:]))
    if what == "done":
        sys.exit(0)
if what == "deaf":
    time.sleep(600)
try:  # had the signal gone to the whole group, nobody would answer
    helper.stdin.write("alive\\n")
    helper.stdin.flush()
    answer = helper.stdout.readline().strip()
except BrokenPipeError:
    answer = ""
open(f"{folder}/{rank}.heard", "w").write(f"{heard} helper={answer}")
os._exit(0)  # else Python may print that the helper's pipe is broken
"""

DRIVER = """
import sys
from or1_megatron.runtime import launch
launch.KILL_MARGIN_S = 0.0
sys.exit(launch.run_ranks("or1_test_rank", sys.argv[1:], ranks=2, grace_s=float(sys.argv[3]), task="training"))
"""


TWICE = """
import os, sys
from pathlib import Path
from or1_megatron.runtime.faults import FaultRecord
from or1_megatron.runtime import launch
from or1_megatron.runtime.watchdog import Watchdog
launch._GONE_S = 300.0
for what in ("exit7", "done"):
    watchdog = Watchdog(os.getpid(), sys.argv[1], 10.0, FaultRecord(Path(sys.argv[1])))
    ended = launch.launch("or1_test_rank", [sys.argv[1], what], ranks=2, grace_s=5.0, watchdog=watchdog)
    print(ended.code, ended.rank_code, ended.how[:6])
    print(watchdog.left_over())
"""


class Launched:
    """The launcher with two ranks, in a folder."""

    def __init__(self, folder: Path, what: str, grace_s: float = 30.0) -> None:
        (folder / "or1_test_rank.py").write_text(RANK)
        self.folder = folder
        path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH", "")) if part)
        command = [sys.executable, "-c", DRIVER, str(folder), what, str(grace_s)]
        environment = {**os.environ, "PYTHONPATH": path, CPP_LOG_LEVEL: QUIET}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def wait_up(self) -> None:
        def up() -> bool:
            assert self.process.poll() is None, self.process.stderr.read()  # type: ignore[union-attr]
            return all(self._up(rank).is_file() for rank in (0, 1))

        wait_until(up, "the ranks")

    def pids(self) -> list[int]:
        return [int(pid) for rank in (0, 1) for pid in self._up(rank).read_text().split()]

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors

    def wait_gone(self) -> None:
        """One that was killed has some time to be gone."""
        wait_until(lambda: not any(map(lives, self.pids())), "the ranks and their helpers to be gone")

    def _up(self, rank: int) -> Path:
        return self.folder / f"{rank}.up"


@pytest.fixture
def started() -> Iterator[list[Launched]]:
    runs: list[Launched] = []
    yield runs
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            for pid in filter(lives, run.pids()):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("sent", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_alone(tmp_path: Path, started: list[Launched], sent: signal.Signals) -> None:
    run = Launched(tmp_path, "wait")
    started.append(run)
    run.wait_up()
    run.process.send_signal(sent)
    code, errors = run.end()
    assert code == 128 + sent, errors
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.heard").read_text() == f"[{int(signal.SIGUSR1)}] helper=alive"
    run.wait_gone()


def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path, started: list[Launched]) -> None:
    """nohup: a closed terminal's SIGHUP ends nothing, SIGTERM does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup; the launcher inherits it
    try:
        started.append(run := Launched(tmp_path, "wait"))
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_up()
    run.process.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert run.process.poll() is None and not (tmp_path / "0.heard").exists()
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end()
    assert code == 128 + signal.SIGTERM, errors


def test_ranks_that_do_not_end_are_killed(tmp_path: Path, started: list[Launched]) -> None:
    run = Launched(tmp_path, "deaf", grace_s=1.0)
    started.append(run)
    run.wait_up()
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end()
    assert code == 128 + signal.SIGTERM
    assert "did not end within 1 s" in errors
    run.wait_gone()


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [("done", 0, ""), ("exit7", 7, r"(?s).*rank 1 \(pid .* exited with code 7.*"), ("exit2", 2, "")],
)
def test_the_exit_code_of_a_rank_comes_through(
    tmp_path: Path, started: list[Launched], what: str, code: int, said: str
) -> None:
    """Exit code 2: the rank has said what to mend, and that is all that there is to read."""
    run = Launched(tmp_path, what)
    started.append(run)
    ended, errors = run.end()
    assert ended == code and re.fullmatch(said, errors), errors
    run.wait_gone()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_leaves_nothing(tmp_path: Path, started: list[Launched], rank: int) -> None:
    """Neither its helper's environment nor its session says whose it is."""
    run = Launched(tmp_path, "bare")
    started.append(run)
    run.wait_up()
    os.kill(run.pids()[2 * rank], signal.SIGKILL)
    code, errors = run.end()
    assert code == 128 + signal.SIGKILL, errors
    assert f"rank {rank} (pid {run.pids()[2 * rank]}) " in errors
    assert "was killed by SIGKILL" in errors and "out-of-memory killer" in errors
    run.wait_gone()


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        (-signal.SIGKILL, "; an out-of-memory killer does that, or a person"),
        (-signal.SIGSEGV, ""),
        (1, "; its message is above"),
    ],
)
def test_only_sigkill_is_blamed_on_an_out_of_memory_killer(code: int, ends: str) -> None:
    failure = ProcessFailure(0, 123, code, "none.json")
    how = _failed(ChildFailedError("ranks", {0: failure}), 0).how
    assert re.fullmatch(rf"rank 0 \(pid 123\) [\w ]+ at [\d:]+{ends}", how), how


def test_ranks_are_launched_again_in_the_same_process(tmp_path: Path) -> None:
    """One fails; nothing of the first launch is left; the second is as good as the first."""
    (tmp_path / "or1_test_rank.py").write_text(RANK)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TWICE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.stdout.splitlines() == ["7 7 rank 1", "[]", "0 0 ", "[]"], done.stderr


def test_a_killed_launcher_takes_ranks_along_that_are_being_imported(tmp_path: Path, started: list[Launched]) -> None:
    """Also one that is stopped: no code of its own could end it."""
    launched = Launched(tmp_path, "deaf")
    started.append(launched)
    launched.wait_up()
    ranks, helpers = launched.pids()[::2], launched.pids()[1::2]
    os.kill(ranks[1], signal.SIGSTOP)
    launched.process.kill()
    wait_until(lambda: not any(map(lives, ranks)), "the ranks to end with their launcher")
    for helper in helpers:  # the trainer's own end with rank 0
        os.kill(helper, signal.SIGKILL)


def test_threads_are_shared_by_the_ranks_of_a_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 ranks, 8 on each machine of 192 cores: 24 threads each, however many other machines there are."""
    from or1_megatron.trainer import ranks

    config = SimpleNamespace(
        parallel=SimpleNamespace(threads_per_rank=None, ranks=256), cluster=SimpleNamespace(verb_timeout_s=1.0)
    )
    set_to: list[int] = []
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(ranks.torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(ranks, "join_world", lambda _config: 1 / 0)
    for ranks_here in ("8", None):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks_here is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_here)
        with pytest.raises(ZeroDivisionError), ranks.trainer_rank(config):
            pass
    assert set_to == [24, 1]  # not started by torchrun: it cannot tell, and takes the fewest
    assert threads_of_rank(3, 8) == 3
