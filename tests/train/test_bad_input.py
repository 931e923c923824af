"""What users get wrong, and what machines do to them: one clear message, exit code 2, no traceback, no hang.

Tested elsewhere: ranks and launchers that die (test_life_of_a_run), keys and values of the configuration
(config/test_load), rows of every wrong kind (data/test_problems, test_unusable_rows), tokenizers (data/test_prompts),
responses that never close ``</think>`` and gold answers (verify), full disks under metrics and rollouts (runtime),
engines that cannot start (rollout/test_manager).
Not proven here: disks with quotas, file systems that are shared between nodes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import problem
import pytest
import ranks
import torch
from safetensors.torch import load_file, save_file
from training import ROOT, Training, refused
from waiting import PATIENCE_S

from or1_megatron.checkpoint import loader
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.config.load import ConfigError, load_config
from or1_megatron.data.prompts import make_prompts, read_problems
from or1_megatron.errors import AgreedError
from or1_megatron.parallel.policy import export_hf
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.trainer.preflight import check_inputs, discarded
from or1_verify.custom import VerifierBroken
from or1_verify.problems.rows import DataError
from or1_verify.sandbox.program import SandboxUnavailable

MODEL = ROOT / "examples" / "quickstart" / "base_model"
DOWN = "model.layers.0.mlp.down_proj.weight"

SmallConfig = Callable[[Path], Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the quickstart's model, to be damaged."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def cut(model: Path) -> str:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2_000_000])
    return r"model\.safetensors is no safetensors file, or cut: it has 2000000 bytes"


def no_header(model: Path) -> str:
    (model / "model.safetensors").write_bytes(b"{} and no header")
    return r"model\.safetensors is no safetensors file, or cut: it has 16 bytes"


def wrong_shape(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors[DOWN] = tensors[DOWN][:-1].contiguous()
    save_file(tensors, model / "model.safetensors")
    return r"model\.safetensors: " + re.escape(f"{DOWN} has shape (127, 384); config.json implies (128, 384)")


def missing_tensor(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    del tensors[DOWN]
    save_file(tensors, model / "model.safetensors")
    return re.escape(f"its safetensors lack {DOWN} (1 of 51 tensors are missing)")


def unknown_tensor(model: Path) -> str:
    tensors = load_file(model / "model.safetensors")
    tensors["score.weight"] = tensors[DOWN].clone()
    save_file(tensors, model / "model.safetensors")
    return r"score\.weight is no tensor of a Qwen2ForCausalLM"


def missing_shard(model: Path) -> str:
    names = {DOWN: "model.safetensors", "x": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return r"model-00002-of-00002\.safetensors is missing \(1 of 2 files"


def no_weights(model: Path) -> str:
    (model / "model.safetensors").unlink()
    return r"lacks model\.safetensors or"


def test_a_verifier_that_no_problem_needs_is_refused(small_config: Callable[[Path], Path], tmp_path: Path) -> None:
    """Names are compared without case: one for "MATH" judges the rows of math, one for "chemistry" would be idle."""
    config, mine = small_config(tmp_path / "run"), "verify.custom={{{}: tests_no_such_module:judge}}".format
    with pytest.raises(DataError, match=r"verify\.custom: no problem has ability chemistry; theirs are \['math'\]"):
        read_problems(load_config(config, [mine("Chemistry")]))
    with pytest.raises(VerifierBroken, match="tests_no_such_module"):
        read_problems(load_config(config, [mine("MATH")]))


def test_a_model_s_name_on_the_hub(small_config: SmallConfig, tmp_path: Path) -> None:
    said = refused(small_config(tmp_path / "run"), "model.hf=Qwen/Qwen2.5-0.5B")
    assert "hf download Qwen/Qwen2.5-0.5B --local-dir Qwen/Qwen2.5-0.5B" in said
    assert "hf download" not in refused(small_config(tmp_path / "run"), "model.hf=/models/Qwen2.5")


@pytest.mark.parametrize(
    "damage", [cut, no_header, wrong_shape, missing_tensor, unknown_tensor, missing_shard, no_weights]
)
def test_a_damaged_model(damage: Callable[[Path], str], small_config: SmallConfig, model: Path, tmp_path: Path) -> None:
    said = damage(model)
    assert re.search(said, refused(small_config(tmp_path / "run"), f"model.hf={model}"))


ROW = '{"prompt": "1+%d?", "answer": "2"}\n'


def test_more_gpus_are_asked_for_than_are_here(
    small_config: SmallConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before a rank starts. The GPUs are pretended: that torch counts right is not proven."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = small_config(tmp_path / "run")
    eight = ["parallel.ranks=6", "rollout.engines=1", "rollout.tensor_parallel=2"]

    def check(*overrides: str, ranks_here: int = 6) -> None:
        check_inputs(load_config(config, overrides), ranks_here)

    check(*eight, "rollout.placement=separate")
    more = [*eight, "rollout.placement=separate", "rollout.engines=2"]
    elsewhere = "cluster.ray_address=auto"  # other nodes may have them; the start counts
    check(*more, elsewhere)
    check("parallel.ranks=16", "rollout.engines=2", elsewhere, ranks_here=8)  # two nodes
    expected = "parallel.ranks = 6 and, with rollout.placement = separate, rollout.engines 2 * tensor_parallel 2"
    with pytest.raises(ConfigError, match=re.escape(expected) + r" on others need 10 GPUs, and there are 8 here; "):
        check(*more)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    with pytest.raises(ConfigError, match=r"parallel.ranks = 10 need 10 GPUs, .* 8 here \(CUDA_VISIBLE_DEVICES = 0,1"):
        check("parallel.ranks=10", ranks_here=10)
    ports: list[int | None] = []  # of rank 0's metrics and of each engine's
    monkeypatch.setattr(f"{check_inputs.__module__}.check_trackers", lambda track: ports.append(track.prometheus_port))
    check("track.prometheus_port=9100", "rollout.engines=2", elsewhere)
    assert ports == [9100, 9101, 9102]


def test_no_bubblewrap(small_config: SmallConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is refused with what to install; math needs none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    config = small_config(tmp_path / "run")
    read_problems(load_config(config)).close()
    code = {"prompt": "Print 1.", "ability": "code", "answer": json.dumps({"inputs": [""], "outputs": ["1"]})}
    data = tmp_path / "train.jsonl"
    data.write_text("".join(ROW % i for i in range(8)) + json.dumps(code))
    with pytest.raises(SandboxUnavailable, match=r"(?s)math can\).*bubblewrap is not installed.*apt install"):
        read_problems(load_config(config, [f"data.train=[{{path: {data}}}]", "verify.sandbox=bubblewrap"]))


def test_more_memory_than_there_is(small_config: SmallConfig, tmp_path: Path) -> None:
    """An engine's cache of 100 TB. Which processes are named, and what is there: sizing/test_memory."""
    said = refused(small_config(tmp_path / "run"), "cluster.check_memory=true", f"rollout.kv_cache_bytes={10**14}")
    assert re.search(r"needs about 186,[\d.]+ GiB of memory, and this machine has free [\d.]+ GiB:", said)
    assert "  - engine: 2 x 93,1" in said and "rollout.engines=1 saves 93,1" in said


def test_a_run_folder_that_is_a_file(small_config: SmallConfig, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    assert f"{tmp_path / 'run'} is a file, a folder was expected" in refused(small_config(tmp_path / "run"))


def test_a_read_only_file_system(small_config: SmallConfig, small_disk: Path) -> None:
    """Also where the run's folder is there already."""
    for make in (False, True):
        if make:
            RunFolder(small_disk / "run").create()
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        said = refused(small_config(small_disk / "run"))
        assert "the file system is read-only: could not write the run folder" in said and str(small_disk) in said
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_a_run_folder_in_use(small_config: SmallConfig, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with folder.lock():
        said = refused(small_config(folder.root))
    assert f"run folder {folder.root} is in use by pid {os.getpid()} on host" in said


def begun(config: Path, root: Path) -> Path:
    """The run's folder with a checkpoint of step 1, as far as its manifest goes; the checkpoint's folder."""
    from or1_megatron.config.load import resolved_yaml

    folder = RunFolder(root)
    folder.create()
    folder.write_config(resolved_yaml(load_config(config)))
    checkpoint = folder.checkpoints / "step_000001"
    checkpoint.mkdir()
    (checkpoint / "loop.json").write_text("{}")
    entry = {"bytes": 2, "sha256": "0"}
    (checkpoint / "manifest.json").write_text(json.dumps({"format": 2, "files": {"loop.json": entry}}))
    return checkpoint


def test_what_a_start_deletes_is_said(small_config: SmallConfig, tmp_path: Path) -> None:
    """Steps behind the newest checkpoint, or all where there is none."""
    config = small_config(tmp_path / "run")
    checkpoint = begun(config, tmp_path / "run")
    loaded, metrics = load_config(config), tmp_path / "run" / "metrics.jsonl"
    metrics.write_text('{"step": 0}\n{"step": 1}\n')
    assert not list(discarded(loaded))
    (tmp_path / "run" / "rollouts" / "step_000003.parquet").touch()
    assert "holds steps 3 to 3 of an earlier session, behind the checkpoint of step 1" in next(discarded(loaded))
    shutil.rmtree(checkpoint)
    assert "holds steps 0 to 3 of an earlier session, of which it saved no checkpoint" in next(discarded(loaded))


def test_wandb_without_its_package_is_refused(small_config: SmallConfig, tmp_path: Path) -> None:
    assert "the package wandb is not installed" in refused(small_config(tmp_path / "run"), "track.wandb_project=magic")
    assert not (tmp_path / "run").exists()


def test_resuming_with_another_configuration(small_config: SmallConfig, tmp_path: Path) -> None:
    config = small_config(tmp_path / "run")
    begun(config, tmp_path / "run")
    said = refused(config, "optimizer.lr=1e-6", "checkpoint.keep_last=3")
    assert re.search(r"optimizer\.lr: was 0\.\d+, now 1e-06", said)
    assert "keep_last" not in said and "--set run.dir=" in said


@pytest.mark.slow
def test_what_rank_0_finds_ends_both_ranks(
    small_config: SmallConfig, train: Callable[..., Training], tmp_path: Path
) -> None:
    """No checkpoint but a damaged one."""
    config = small_config(tmp_path / "run")
    checkpoint = begun(config, tmp_path / "run")
    (checkpoint / "loop.json").write_text("{")
    status, output = train(config).finish(timeout_s=800)
    lines = [line for line in output.strip().splitlines() if not line.endswith(": 6 steps in all")]
    assert status == 2
    assert len(lines) == 1 and lines[0].startswith("or1: error: none of the checkpoints in"), output
    assert "does not start from scratch" in output and f"{checkpoint / 'loop.json'} has 1 bytes" in output
    assert checkpoint.is_dir()


def test_prompts(small_config: SmallConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts over the limit are dropped and counted; tests of code that do not go together; too few problems left."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(ROW % i for i in range(9)) + '{"prompt": "1+1+1+1+1+1+1+1?", "answer": "8"}\n')
    code, none, graded = (tmp_path / f"{name}.jsonl" for name in ("code", "none", "graded"))
    rows = [
        {
            "data_source": "x", "prompt": [{"role": "user", "content": f"{i}+{i}?"}], "ability": "math",
            "reward_model": {"ground_truth": json.dumps([str(2 * i)]), "style": "rule"},
            "extra_info": {"index": i, "model_difficulty": {"M": 16 if i < 4 else 3}},
        }
        for i in range(10)
    ]  # fmt: skip
    graded.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tests = json.dumps({"inputs": ["1", "2"], "outputs": ["1"]})
    code.write_text(ROW % 1 + json.dumps({"prompt": "1?", "ability": "code", "answer": tests}))
    none.write_text(ROW % 1 + json.dumps({"prompt": "1?", "ability": "code", "answer": "{}"}))
    cases = {
        f"data.train.0.path={code}": f"{code}:2: field 'ground_truth': mismatched: 2 inputs, 1 outputs",
        f"data.train.0.path={none}": f"{none}:2: field 'ground_truth': unknown kind",
        f"data.train.0.path={data} data.max_prompt_tokens=12 evaluate.data=[]": "[9] 0 ['math']",
        f"data.train.0.path={data} data.max_prompt_tokens=2": f"none of 10 prompts (from {data}:1 on) fits",
        f"data.train.0.path={data} data.max_prompt_tokens=12 stages.0.prompts_per_step=16": (
            "data.train: of 10 problems 9 are left (data.max_prompt_tokens = 12 dropped 1), fewer than "
            "prompts_per_step = 16"
        ),
        f"data.train.0.path={graded} data.difficulty_model=M stages.0.prompts_per_step=8": (
            "data.train: of 10 problems 6 are left (data.difficulty_model = M dropped 4, data.max_prompt_tokens = "
        ),
    }
    config = small_config(tmp_path / "run")
    for case, expected in cases.items():
        loaded = load_config(config, case.split())
        with closing(read_problems(loaded)) as problems:
            try:
                sources, held_out = make_prompts(loaded, problems)
                said = f"{[len(source.prompts) for source in sources]} {len(held_out)} {sorted(problems.verifiers)}"
            except DataError as error:
                said = str(error)
        assert expected in said
    dropped = f"{data}: 1 of 10 prompts are longer than data.max_prompt_tokens = 12 and were dropped"
    assert dropped in caplog.text


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("cannot mount a tmpfs here (needs root)")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def save_on(disk: Path) -> dict[str, tuple[Any, list[str]]]:
    """On a disk with room for one checkpoint: save, fail to save and to export, load; return what came of each attempt,
    and what was on the disk then.

    At last the disk becomes read-only, and the folder of checkpoints is removed, while a save is written. The first
    save comes before any update, as when a run is stopped within its first step. Saves are asynchronous: each attempt
    names what raised.
    """
    said: dict[str, Any] = {}
    policy, batch = problem.make_policy(MODEL, lr=1e-3), problem.batch(1, 64)
    meanwhile: list[Callable[[], object]] = []
    saver = CheckpointSaver(policy, before_complete=lambda: [fault() for fault in meanwhile] and None)

    def update() -> float:
        return problem.update(policy, batch).sums["loss"]

    def attempt(what: str, call: Callable[[], Mapping[str, Any] | None]) -> None:
        try:
            result: Any = call()
        except AgreedError as error:
            result = str(error)
        said[what] = (result, sorted(path.name for path in disk.iterdir()))

    saver.save(disk / "step_000000", {"step": 0})
    attempt("first save", lambda: {"written": (saver.finish(wait=True) or 0) > 0})
    before = [update(), update()]
    fill(disk, left_bytes=policy.parameter_count * 12 + 8192)  # the numbers alone would fit
    saver.save(disk / "step_000001", {"step": 1})
    attempt("writers", lambda: saver.finish(wait=True))
    saver.save(disk / "step_000001", {"step": 1})
    attempt("next save", lambda: saver.save(disk / "step_000002", {"step": 2}))
    fill(disk, left_bytes=1 << 20)
    attempt("no room", lambda: saver.save(disk / "step_000001", {"step": 1}))
    attempt("export", lambda: export_hf(policy, disk / "hf"))
    attempt("load", lambda: loader.load(policy, disk / "step_000000"))
    assert [update(), update()] == before
    (disk / "fill").unlink()
    (disk / "run").mkdir()
    for what, fault in (
        ("read-only", lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)),
        ("removed", lambda: shutil.rmtree(disk / "run")),
    ):
        meanwhile[:] = [fault]
        saver.save(disk / "run" / "step_000001", {"step": 1})
        attempt(what, lambda: saver.finish(wait=True))
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    meanwhile.clear()
    saver.save(disk / "run" / "step_000001", {"step": 1})
    attempt("after it", lambda: {"written": (saver.finish(wait=True) or 0) > 0})
    return said


def fill(disk: Path, left_bytes: int) -> None:
    with (disk / "fill").open("ab") as file:
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        file.write(bytes(free - left_bytes))


def test_a_disk_that_is_full_or_read_only_or_emptied(small_disk: Path) -> None:
    """The writers' failure in the background, told by ``finish`` or else by the next save; no room from the start;
    and an export: each says so, and the old checkpoint loads."""
    said = ranks.call(save_on, 1, small_disk)[0]
    assert said["first save"] == ({"written": True}, ["step_000000"])
    for what in ("writers", "next save", "no room"):
        message, left = said[what]
        assert message.startswith(f"checkpoint {small_disk / 'step_000001'} could not be written: the disk is full")
        assert "The checkpoints before it are intact" in message and "\n" not in message
        assert left == ["fill", "step_000000"]
    message, left = said["export"]
    assert message.startswith(f"the model could not be exported to {small_disk / 'hf'}") and "No space left" in message
    assert left == ["fill", "step_000000"]
    assert said["load"][0] == {"step": 0}
    message, left = said["read-only"]
    assert message.startswith(f"checkpoint {small_disk / 'run' / 'step_000001'} could not be written: [Errno 30]")
    assert "The checkpoints before it are intact: fix the cause" in message
    message, left = said["removed"]
    assert f"{small_disk / 'run'} has been removed" in message and left == ["step_000000"]
    assert said["after it"] == ({"written": True}, ["run", "step_000000"])


RAY_DRIVER = """
import sys, ray
from or1_megatron.rollout import cluster
cluster.start_ray(None, sys.argv[1])

@ray.remote(num_cpus=0)
class Counter:
    count = 0
    def add(self):
        self.count += 1
        return self.count

counter = Counter.options(name="rollout-manager", namespace=cluster.namespace(sys.argv[1])).remote()
for _ in range(2):
    print(ray.get(counter.add.remote()), ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.readline()
cluster.stop_ray()
"""


def test_a_ray_that_runs_already_is_left_alone() -> None:
    """Two runs at once, even of the same name, and RAY_ADDRESS naming the other: each has a Ray of its own."""

    def driver(**environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RAY_DRIVER, "same-run"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    def reading(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        return process.stdout.readline().split()

    first = driver()
    count, address = reading(first)
    assert count == "1"
    second = driver(RAY_ADDRESS=address)
    count, other = reading(second)
    assert count == "1" and other != address
    second.communicate("\n\n", timeout=PATIENCE_S)
    assert second.returncode == 0
    first.stdin.write("\n")  # type: ignore[union-attr]
    first.stdin.flush()  # type: ignore[union-attr]
    assert reading(first) == ["2", address]
    first.communicate("\n", timeout=PATIENCE_S)
    assert first.returncode == 0


RANKS_DRIVER = """
import sys
from or1_megatron.runtime.launch import run_ranks
sys.exit(run_ranks("or1_port_rank", [], ranks=2, grace_s=5.0, task="training"))
"""
PORT_RANK = """
from or1_megatron.runtime.world import choose_gloo_interface
from torch import distributed
choose_gloo_interface()  # as parallel.mesh does; Megatron is not needed
distributed.init_process_group("gloo")
distributed.barrier()  # else the first to leave may close the other's connection while it is made
distributed.destroy_process_group()
"""


def test_a_port_in_use_and_a_host_name_that_leads_nowhere(tmp_path: Path) -> None:
    """``or1 train`` takes free ports, whatever MASTER_PORT says, and on one machine needs no name of its own. The host
    is named where that is allowed (root)."""
    named = ["unshare", "--uts", "sh", "-c", 'hostname gpu-node-17.example; exec "$@"', "sh"]
    if subprocess.run([*named, "true"], capture_output=True, check=False).returncode:
        named = []
    (tmp_path / "or1_port_rank.py").write_text(PORT_RANK)
    with socket.create_server(("", 0)) as server:
        port = str(server.getsockname()[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        ours = subprocess.run([*named, sys.executable, "-c", RANKS_DRIVER], env=environment, timeout=PATIENCE_S)
        assert ours.returncode == 0
