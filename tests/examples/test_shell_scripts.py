"""launch.sh, evaluate.sh and job.sbatch with small stand-ins for or1, ray, srun and scontrol on the PATH.

What is called, with what, in which order, and what becomes of a signal and of a failure. That the real programs take
these arguments is test_recipe_scripts' to show; of Slurm nothing is proven here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]

# `or1 train` says that it is up and which signal it heard.
TRAIN = """
import os, signal, sys, time
def heard(number, frame):
    open(os.environ["HEARD"], "a").write(signal.Signals(number).name + "\\n")
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, heard), signal.signal(signal.SIGUSR1, heard)
open(os.environ["HEARD"], "a").write("up\\n")
time.sleep(float(os.environ.get("TRAIN_S", "0")))
sys.exit(int(os.environ.get("TRAIN_STATUS", "0")))
"""
OR1 = f"""case "$*" in
  "config "*) echo 4 ;;
  *"${{REFUSES:-nothing}}"*) exit 2 ;;
  "plan "* | *" --check") ;;
  "train "*) exec {sys.executable} "$TRAIN" ;;
esac"""


@pytest.fixture
def stage(tmp_path: Path) -> dict[str, str]:
    """An environment in which every program of another's notes its arguments in the file ``said``."""
    programs = {
        "or1": OR1,
        "ray": 'echo "Ray runtime started"; exec sleep 600',
        "srun": 'shift; SLURM_NODEID=0 exec "$@"',
        "scontrol": '[[ $1 != show ]] || printf "node0\\nnode1\\n"',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f'#!/usr/bin/env bash\necho "{name} $*" >>"$SAID"\n{body}\n')
    (tmp_path / "train.py").write_text(TRAIN)
    for program in (tmp_path / "bin").iterdir():
        program.chmod(0o755)
    for folder in ("model", "data", "eval", "runs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    names = {
        "MODEL": "model",
        "DATA": "data",
        "EVAL": "eval",
        "RUNS": "runs",
        "SAID": "said",
        "HEARD": "heard",
        "TRAIN": "train.py",
    }
    return {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        **{key: f"{tmp_path}/{name}" for key, name in names.items()},
    }


def run(environment: Mapping[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def lines(environment: Mapping[str, str], name: str = "SAID") -> list[str]:
    path = Path(environment[name])
    return path.read_text().splitlines() if path.exists() else []


def signalled(environment: Mapping[str, str], number: signal.Signals, *command: str) -> tuple[int, str]:
    """Exit status and stderr of a command that is sent a signal once it trains."""
    env = {**os.environ, **environment, "TRAIN_S": "600"}

    def take_signals() -> None:  # a shell's background jobs, as these tests may be one, are born deaf to SIGINT
        signal.signal(number, signal.SIG_DFL)

    with subprocess.Popen(
        command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, preexec_fn=take_signals
    ) as process:
        wait_until(lambda: "up" in lines(environment, "HEARD") or process.poll() is not None, "the training")
        process.send_signal(number)
        said = process.communicate(timeout=PATIENCE_S)[1]
        return process.returncode, said


LAUNCH = ("examples/launch.sh", "or1_7b", "2", "--set", "optimizer.lr=2e-6")
ASKED = "configs/recipes/or1_7b.yaml --set run.stage=2 --set optimizer.lr=2e-6"


def test_one_node_checks_asks_for_the_ranks_and_trains(stage: dict[str, str]) -> None:
    done = run(stage, *LAUNCH)
    assert done.returncode == 0, done.stderr
    assert lines(stage) == [
        f"or1 train {ASKED} --check",
        f"or1 config {ASKED} --key parallel.ranks",
        f"or1 train {ASKED}",
    ]
    assert run({**stage, "TRAIN_STATUS": "7"}, *LAUNCH).returncode == 7
    before = len(lines(stage))
    assert run({**stage, "REFUSES": "--check"}, *LAUNCH).returncode == 2
    assert run({**stage, "DRY_RUN": "1"}, *LAUNCH).returncode == 0
    assert lines(stage)[before:] == [
        f"or1 train {ASKED} --check",
        f"or1 plan {ASKED}",
        f"or1 config {ASKED} --key parallel.ranks",
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_of_two_starts_its_part_of_ray(stage: dict[str, str], rank: int) -> None:
    """Node 1 looks for a head first: here a listening socket stands for it."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        several = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "RAY_PORT": str(port)}
        done = run({**stage, **several}, *LAUNCH)
    assert done.returncode == 0, done.stderr
    cluster = f"--set cluster.ray_address=127.0.0.1:{port} --set cluster.nodes=2"
    where = "--head --port" if rank == 0 else "--address"
    place = str(port) if rank == 0 else f"127.0.0.1:{port}"
    *check, config, ray, train = lines(stage)
    assert check == ([f"or1 train {ASKED} {cluster} --check"] if rank == 0 else [])
    assert config == f"or1 config {ASKED} {cluster} --key parallel.ranks"
    assert ray == f"ray start {where} {place} --block --disable-usage-stats"
    meeting = f"--nnodes 2 --node-rank {rank} --master-addr 127.0.0.1 --master-port 29500"
    assert train == f"or1 train {ASKED} {cluster} {meeting}"
    token = Path(stage["RUNS"]) / "ray_token"
    assert (token.is_file() and token.stat().st_mode & 0o077 == 0) if rank == 0 else not token.exists()


@pytest.mark.parametrize(
    ("sent", "heard"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGUSR1, "SIGUSR1"), (signal.SIGINT, "SIGTERM")]
)
def test_a_signal_reaches_the_training_and_the_script_says_so(
    stage: dict[str, str], sent: signal.Signals, heard: str
) -> None:
    status, said = signalled(stage, sent, *LAUNCH)
    assert status == 3 and f"stopped by {'SIGUSR1' if sent is signal.SIGUSR1 else 'SIGTERM'}" in said
    assert lines(stage, "HEARD") == ["up", heard]


def test_evaluate_takes_the_last_stage_and_every_set(stage: dict[str, str]) -> None:
    command = ("examples/evaluate.sh", "or1_7b", "--set", "max_response_tokens=64")
    missing = run(stage, *command)
    assert missing.returncode == 2
    assert f"{stage['RUNS']}/or1_7b/hf holds no config.json; finish the last stage, or set MODEL_OUT" in missing.stderr
    for number in (1, 2, 10):
        export = Path(stage["RUNS"]) / f"or1_7b/stage_{number}/hf"
        export.mkdir(parents=True)
        (export / "config.json").write_text("{}")
    assert f"no {stage['EVAL']}/aime24.jsonl" in run(stage, *command).stderr
    for name in ("aime24", "aime25", "livecodebench"):
        (Path(stage["EVAL"]) / f"{name}.jsonl").touch()
    for model, more in ((f"{stage['RUNS']}/or1_7b/stage_10/hf", {}), (stage["MODEL"], {"MODEL_OUT": stage["MODEL"]})):
        Path(stage["SAID"]).unlink(missing_ok=True)
        assert run({**stage, **more}, *command).returncode == 0
        assert lines(stage) == [
            f"or1 eval --model {model} --data {stage['EVAL']}/{name}.jsonl --k {k} "
            f"--out {stage['RUNS']}/or1_7b/evaluation/{name} --set max_response_tokens=64"
            for name, k in (("aime24", 32), ("aime25", 32), ("livecodebench", 4))
        ]
    assert "expected a recipe's name; there are: or1_235b.yaml" in run(stage, "examples/evaluate.sh", "or1_8b").stderr


def test_a_slurm_job_finds_its_nodes_and_is_queued_again_when_stopped_or_failed(stage: dict[str, str]) -> None:
    slurm = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "12345"}
    job = ("examples/job.sbatch", "examples/or1_7b/stage_2.sh", "--set", "optimizer.lr=2e-6")
    done = run({**stage, **slurm}, *job)
    assert done.returncode == 0, done.stderr
    said = lines(stage)
    assert said[0] == "scontrol show hostnames node[0-1]" and said[1].startswith("srun --kill-on-bad-exit=0 bash -c ")
    assert said[-1] == f"or1 train {ASKED}"
    assert not any("requeue" in line for line in said)
    for failed, restarts, again in (("7", "2", True), ("7", "3", False), ("2", "0", False)):  # 2: a user's error
        Path(stage["SAID"]).unlink()
        failing = {"TRAIN_STATUS": failed, "SLURM_RESTART_COUNT": restarts}
        assert run({**stage, **slurm, **failing}, *job).returncode == int(failed)
        assert ("scontrol requeue 12345" in lines(stage)) == again
    Path(stage["HEARD"]).unlink()
    status, output = signalled({**stage, **slurm}, signal.SIGUSR1, *job)
    assert status == 3 and "queued again" in output
    assert lines(stage)[-1] == "scontrol requeue 12345"
    assert (
        "examples/none.sh is not a script" in run({**stage, **slurm}, "examples/job.sbatch", "examples/none.sh").stderr
    )
