"""The estimates of memory and disk against figures worked by hand, and the refusals that rest on them.

Not proven here: that a run holds what is estimated (lab/benchmarks/host_memory.py measures it on CPU,
lab/benchmarks/plan_gpu.py a trainer rank's tensors on one GPU); the two reserves beside a KV cache, which only a GPU
can confirm; a GPU node's host memory was measured nowhere.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.plan.tables import render
from or1_megatron.runtime.host_memory import HostMemory
from or1_megatron.sizing import storage
from or1_megatron.sizing.conflicts import conflicts, kv_tokens
from or1_megatron.sizing.kv_cache import shared_kv_cache_bytes
from or1_megatron.sizing.memory import (
    PHASES,
    NotEnoughMemory,
    Phase,
    ProcessMemory,
    needed,
    phase_bytes,
    process_memory,
    routed_bytes,
    stage_weights,
)
from or1_megatron.sizing.run_plan import Plan, plan
from or1_megatron.sizing.storage import (
    checkpoint_bytes,
    disk_bytes,
    disk_line,
    disk_room,
    disk_short,
    node_memory,
)
from or1_megatron.trainer import placement, preflight
from or1_megatron.weights.families import read_hf_config
from or1_megatron.weights.shape import BYTES, Shape

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
GIB = 1 << 30

# A layer: 64 * 16 * (2*4 + 2*2) in attention, 3 * 64 * 96 in the MLP, 2 * 64 in norms. A vocabulary: 61 * 64.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 128,
}  # fmt: skip
LAYER, VOCABULARY, NORM = 12_288 + 18_432 + 128, 3_904, 64
# Qwen2.5-0.5B's config.json.
HALF_B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}  # fmt: skip


def quickstart(*overrides: str) -> Config:
    return load_config(QUICKSTART / "quickstart.yaml", overrides)


@pytest.mark.parametrize(
    ("pipeline", "tied", "expected"),
    [
        (1, True, [(4 * LAYER + VOCABULARY + NORM, 0)]),
        (1, False, [(4 * LAYER + 2 * VOCABULARY + NORM, 0)]),
        (2, True, [(2 * LAYER + VOCABULARY, 0), (2 * LAYER + VOCABULARY + NORM, VOCABULARY)]),
        (2, False, [(2 * LAYER + VOCABULARY, 0), (2 * LAYER + VOCABULARY + NORM, 0)]),
        (4, False, [(LAYER + VOCABULARY, 0), (LAYER, 0), (LAYER, 0), (LAYER + VOCABULARY + NORM, 0)]),
    ],
)
def test_the_weights_of_each_stage(pipeline: int, tied: bool, expected: list[tuple[int, int]]) -> None:
    shape = Shape.of(SMALL | {"tie_word_embeddings": tied})
    found = stage_weights(ParallelConfig(ranks=pipeline, pipeline=pipeline), shape)
    assert [(stage.dense, stage.copied) for stage in found] == expected
    assert sum(stage.dense - stage.copied for stage in found) == shape.parameters


def test_a_stage_with_several_chunks_and_uneven_layers() -> None:
    """Chunks of 1, 2, 3 and 1 layers: the first and third lie on stage 0."""
    shape = Shape.of(SMALL | {"num_hidden_layers": 7, "tie_word_embeddings": False})
    parallel = ParallelConfig(ranks=2, pipeline=2, virtual_pipeline=2, layers_per_stage=(1, 2, 3, 1))
    assert [stage.dense for stage in stage_weights(parallel, shape)] == [
        4 * LAYER + VOCABULARY,
        3 * LAYER + VOCABULARY + NORM,
    ]


def test_what_a_rank_holds_on_a_host() -> None:
    """fp32: 16 bytes per parameter; 12 in the saver's copy, but for the tied weights that stage 0 saves; the moments
    are cut by DP. The embedding's gradient, on both stages that have a tied one, is a whole tensor of its own."""
    shape = Shape.of(SMALL | {"vocab_size": 600_000, "tie_word_embeddings": True})
    first, last = 2 * LAYER + 600_000 * 64, 2 * LAYER + 600_000 * 64 + NORM

    def parts(*overrides: str) -> list[list[int]]:
        config = quickstart("parallel.micro_batch_tokens=192", *overrides)
        ranks = [each for each in process_memory(config, shape, "cpu") if each.process.startswith("trainer rank")]
        assert all(rank.parts["embedding's gradient"] == BYTES[config.model.dtype] * 600_000 * 64 for rank in ranks)
        return [list(rank.parts.values())[:2] for rank in ranks]

    assert parts() == [[16 * first, 12 * first], [16 * last, 12 * (last - 600_000 * 64)]]
    assert parts("checkpoint.asynchronous=false")[0] == [16 * first, 0]
    assert parts("parallel.ranks=4")[0] == [8 * first + 8 * first // 2, 12 * first // 2]
    assert parts("model.dtype=bfloat16")[0] == [18 * first, 14 * first]


def test_what_an_engine_holds_on_a_host() -> None:
    """A vocabulary of 1,000 rows of 64 in fp32 is 256,000 bytes, of the whole model W. Four engine processes and the
    rank that sends share a handoff's memory; 8 responses' logits are 32,000 bytes, 4.25 times."""
    shape = Shape.of(SMALL | {"vocab_size": 1000, "tie_word_embeddings": True})
    config = quickstart("rollout.tensor_parallel=2", "rollout.max_concurrent=8", "rollout.kv_cache_bytes=1000000")
    engine = next(each for each in process_memory(config, shape, "cpu") if each.process == "engine")
    whole, base = 4 * shape.parameters, engine.parts["base"]
    assert whole == 4 * (4 * LAYER + 64_000 + NORM)
    held = base + whole // 2
    assert engine.at("start") == held + whole // 4
    assert engine.at("update") == held + 128_000 + 1_000_000
    assert engine.at("rollout") == held + 128_000 + 1_000_000 + 136_000
    assert engine.at("handoff") == held + 128_000 + 1_000_000 + whole // 5
    assert (engine.process, engine.count) == ("engine", 4)


def test_one_stage_keeps_fewer_micro_batches() -> None:
    """1F1B: of two stages the first has two micro-batches in flight, the last one."""
    config = quickstart("parallel.micro_batch_tokens=8192")
    shape = Shape.of(SMALL | {"tie_word_embeddings": True})
    first, last = (each.parts["activations"] for each in process_memory(config, shape, "cpu")[1:3])
    # Bytes of one layer and micro-batch; our own layers keep 3 * 64 + 4 * 16 numbers more.
    whole = 4 * 8192 * (4 * 64 + 16 * 12 + 3 * 96 + 3 * 64 + 4 * 16)
    assert first == whole * (2 * 2 + 2)
    assert whole * (2 + 2) < last < whole * (2 + 2) + (8 << 20)  # with the head's workspace, 5 MiB and vectors


def refusal(monkeypatch: pytest.MonkeyPatch, config: Config, hf: dict[str, Any], free: float) -> str:
    """What a machine with so many GiB says; empty when it starts."""
    monkeypatch.setattr(preflight, "host_memory", lambda: HostMemory(24 * GIB, int(free * GIB)))
    try:
        preflight.check_room(plan(config, hf))
    except NotEnoughMemory as error:
        return str(error)
    return ""


def test_half_a_billion_parameters_are_refused_on_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage: 315,069,440 parameters of 16 bytes are 4.69 GiB; of 12 in the copy, 3.52 GiB."""
    said = refusal(monkeypatch, quickstart(), HALF_B, 24)
    lines = said.splitlines()
    assert lines[0].startswith("the run needs about ") and lines[0].endswith("this machine has free 24.00 GiB:")
    first = next(line for line in lines if "trainer rank, pipeline stage 0" in line)
    assert "weights, gradients, optimizer 4.69 GiB, copy for checkpoints 3.52 GiB" in first
    assert any(line.startswith("  - engine: 2 x ") and "weights 1.84 GiB" in line for line in lines)
    assert "checkpoint.asynchronous=false saves 5.52 GiB; " in lines[-1]
    assert lines[-1].count(" saves ") == 3 and "start all the same with cluster.check_memory=false" in lines[-1]
    assert refusal(monkeypatch, quickstart("cluster.check_memory=false"), HALF_B, 24) == ""


def test_the_quickstart_is_not_refused_on_8_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    model = json.loads((QUICKSTART / "base_model" / "config.json").read_text())
    assert refusal(monkeypatch, quickstart(), model, 8) == refusal(monkeypatch, quickstart(), model, 4) == ""
    assert "rollout.engines=1 saves" in refusal(monkeypatch, quickstart(), model, 3)


def shown(planned: Plan) -> str:
    console = Console(width=260, record=True, file=io.StringIO())
    console.print(render(planned))
    return console.export_text()


def test_what_is_not_held_at_one_time() -> None:
    """Activations of 3 + 2, two engines' logits of 4 each, buckets of 6: 8 is the most, beside 10 and 2 * 20.

    With stale rollouts the engines' logits are there all the time: 5 or 6 beside 10 and 2 * 24.
    """

    def peak(sampling: dict[str, frozenset[Phase]]) -> int:
        update = {"activations": frozenset[Phase]({"update"})}
        first = ProcessMemory("first", 1, {"state": 7, "activations": 3}, update)
        last = ProcessMemory("last", 1, {"state": 3, "activations": 2}, update)
        engine = ProcessMemory("engine", 2, {"weights": 20, "logits": 4}, sampling)
        buckets = ProcessMemory("handoff", 1, {"buckets": 6}, {"buckets": frozenset({"handoff"})})
        return needed(quickstart(), [first, last, engine, buckets], "cpu")

    assert (peak({"logits": frozenset({"rollout"})}), peak({})) == (10 + 40 + 8, 10 + 48 + 6)


def test_with_lora_adapters_alone_have_gradients_and_optimizer() -> None:
    """Half a B at TP 2 in bf16, by hand; the reference is model.hf and takes nothing. Each of a layer's seven linears
    has one factor on every rank (A of q, k, v, gate and up, B of o and down), and half of the other."""
    keys = ("model.dtype=bfloat16", "parallel.pipeline=1", "parallel.tensor=2", "model.lora.rank=8")
    config = quickstart(*keys, "algorithm.kl.reference=examples/quickstart/base_model")
    rank = plan(config, HALF_B, None, "cuda").memory[0].parts
    trained = 24 * 8 * (7 * 896 + (896 + 128 + 128 + 4864 + 4864 + 896 + 4864) // 2)
    weights = stage_weights(config.parallel, Shape.of(HALF_B))[0]
    assert rank["gradients, optimizer"] == (4 + 12) * trained
    assert rank["weights"] == 2 * (weights.dense + trained)


def test_a_gpu_in_each_phase_of_a_turn() -> None:
    """A colocated 7B on one GPU of TP 1, 80 GB, bf16, by hand. Weights 2 bytes, gradients 4 and optimizer 12 per
    parameter. While engines decode, trainer and engine fill the GPU: the KV cache is what is left. In an update the
    engine keeps its reserve, of which 6 GiB."""
    shape = Shape.of(SMALL | {"vocab_size": 10_000_000, "tie_word_embeddings": True})  # 640 million parameters
    config = quickstart(
        "model.dtype=bfloat16", "parallel.ranks=1", "parallel.pipeline=1", "rollout.engines=1",
        "rollout.kv_cache_bytes=null", "cluster.gpu_memory_gb=80", "rollout.max_concurrent=8",
    )  # fmt: skip
    processes = process_memory(config, shape, "cuda")
    at = {phase: phase_bytes(config, processes, "cuda", phase) for phase in PHASES}
    reserves, weights = (8 + 6) * GIB, 2 * shape.parameters
    assert at["rollout"] == pytest.approx(80e9, abs=8)
    assert at["handoff"] == reserves + 2 * weights
    assert at["wake"] == at["save"] == reserves + weights
    assert at["update"] == reserves + 18 * shape.parameters + processes[0].parts["activations"]
    apart = config.model_copy(update={"rollout": config.rollout.model_copy(update={"placement": "separate"})})
    held = process_memory(apart, shape, "cuda")
    assert phase_bytes(apart, held, "cuda", "handoff") == 8 * GIB + 18 * shape.parameters


@pytest.mark.parametrize(
    ("gpus_gib", "named_gb", "has"),
    [
        ((80, 79), None, None),
        ((80, 10), None, 10.0),
        ((), 90, None),
        ((), 5, 4.66),
        ((80,), 5, 4.66),
        ((80,), 90, None),
    ],
)
def test_the_smallest_gpu_counts(
    monkeypatch: pytest.MonkeyPatch, gpus_gib: tuple[int, ...], named_gb: int | None, has: float | None
) -> None:
    """The memory of the GPUs here, if there are any, and ``cluster.gpu_memory_gb``. A stage of 0.5B in fp32 holds 4.69
    GiB of state, 14 GiB of reserves and activations: between 18.7 and 79 GiB."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus_gib))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=gpus_gib[index] * GIB)
    )
    named = "null" if named_gb is None else named_gb
    planned = plan(quickstart(f"cluster.gpu_memory_gb={named}"), HALF_B, device="cuda")
    if has is None:
        preflight.check_room(planned)
        return
    with pytest.raises(NotEnoughMemory, match=rf"a GPU has {has:.2f} GiB"):
        preflight.check_room(planned)


LARGE = Shape.of(read_hf_config(named("shape")["deepseek_r1_distill_qwen_32b"]))
RECIPE = load_config(named("recipe")["or1_32b"], [])


def test_a_32b_on_disk() -> None:
    """A checkpoint: 14 bytes per parameter, about 450 GB. Two newest, the best, and one being written; exports every
    200 of 1,130 steps and at the end; 10 GiB of rollouts."""
    assert checkpoint_bytes(RECIPE, LARGE) == 14 * LARGE.parameters == pytest.approx(459e9, rel=0.01)
    weights = 2 * LARGE.parameters
    assert disk_bytes(RECIPE, LARGE) == {
        "checkpoints": 4 * 14 * LARGE.parameters,
        "exports": (5 + 1) * weights,
        "rollouts": 10 * GIB,
    }


def test_retention_counts() -> None:
    """Without the best, three newest, and those of every 100 steps kept for good: 3 + 1 + 11."""
    kept = ["checkpoint.keep_best=false", "checkpoint.keep_last=3", "checkpoint.keep_every_steps=100"]
    config = load_config(named("recipe")["or1_32b"], kept)
    assert disk_bytes(config, LARGE)["checkpoints"] == 15 * 14 * LARGE.parameters


def test_the_host_of_a_node() -> None:
    """TP 8, DP 16, eight ranks: weights of 2 bytes and 12 / 16 of the optimizer, for an eighth of the model each; twice
    an equal share of a checkpoint; sixteen processes."""
    found = node_memory(RECIPE, LARGE, 8).parts
    assert found["offloaded state"] == pytest.approx(LARGE.parameters * (2 + 12 / 16), rel=1e-4)
    assert found["copies for checkpoints"] == pytest.approx(8 * 2 * 14 * LARGE.parameters / 128, rel=1e-4)
    assert found["processes"] == 16 * 4 * GIB


def test_the_routed_experts_of_a_step() -> None:
    """Worked by hand for Qwen3-235B-A22B: 94 layers * 8 experts of 1 byte are 752 bytes per token. 160 * 32 responses
    of 2,048 + 24,576 tokens at most, the second stage's, are 102.5 GB, held four times; nothing without router replay,
    or of a dense model."""
    config = load_config(named("recipe")["or1_235b"], ["rollout.router_replay=true"])
    shape = Shape.of(read_hf_config(named("shape")["qwen3_235b_a22b"]))
    assert routed_bytes(config, shape) == 160 * 32 * 26_624 * 752 == 102_508_789_760
    assert shape.experts is not None
    assert node_memory(config, shape, 8).parts["routed experts"] == 4 * routed_bytes(config, shape)
    many = replace(shape, experts=replace(shape.experts, count=257))
    assert routed_bytes(config, many) == 2 * routed_bytes(config, shape)
    assert routed_bytes(RECIPE, LARGE) == routed_bytes(load_config(named("recipe")["or1_235b"], []), shape) == 0


def test_room_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert disk_room(tmp_path / "a" / "b") == pytest.approx(disk_room(tmp_path), rel=0.05)


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder holds 40 of the bytes that the run writes; it fits with as many free as are left, and no fewer.
    Both sizes are told."""
    config = RECIPE.model_copy(update={"run": RECIPE.run.model_copy(update={"dir": tmp_path})})
    (config.run.folder / "old").write_bytes(bytes(40))
    needed = sum(disk_bytes(config, LARGE).values())
    for free, fits in ((needed - 40, True), (needed - 41, False)):
        monkeypatch.setattr(storage.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert (disk_short(config, LARGE) == "") == fits
    assert str(config.run.folder) in disk_short(config, LARGE) and "checkpoint.keep_last" in disk_short(config, LARGE)
    assert "has room for" in disk_line(config, LARGE, here=True)
    assert "has room for" not in disk_line(config, LARGE, here=False)


SEVEN_B = read_hf_config(named("shape")["deepseek_r1_distill_qwen_7b"])
SHAPE = Shape.of(SEVEN_B)
WEIGHTS = 7_615_487_488  # the published count less 129,024 biases
LOGITS = 3 * 4 * 128 * 152_064
RESERVES = 14 * 1024**3  # 8 GiB of the trainer, 6 GiB of the engine


def config(gpu_gb: float | None = 80, **sections: Any) -> Config:
    """Rows and sequences of 36,864 tokens on 32 GPUs of 80e9 bytes, 128 responses at once in each engine."""
    return Config.model_validate(
        {
            "run": {"dir": "runs/x"},
            "model": {"hf": "m"},
            "data": {"train": [{"path": "a.jsonl"}]},
            "stages": [
                {"name": "1", "steps": 1, "max_response_tokens": 32768, "prompts_per_step": 256,
                 "prompts_per_update": 256, "group_size": 16},
            ],
            "parallel": {"ranks": 32, "micro_batch_tokens": 36_864, **sections.get("parallel", {})},
            "rollout": {"engines": 4, "max_concurrent": 128, **sections.get("rollout", {})},
            "cluster": {"gpu_memory_gb": gpu_gb},
        }
    )  # fmt: skip


def too_small(config: Config) -> list[str]:
    return [line for line in conflicts(config, SHAPE, None, "cuda") if "has room for" in line]


def test_what_is_left_of_a_gpu() -> None:
    """80e9 - 2 * 7,615,487,488 - 12 * 128 * 152,064 - 14 GiB = 49,503,069,184 bytes; 57,344 bytes a token."""
    left = 80_000_000_000 - 2 * WEIGHTS - LOGITS - RESERVES
    assert shared_kv_cache_bytes(config(), SHAPE) == left == 49_503_069_184
    assert kv_tokens(config(), SHAPE) == 863_265
    half = 80_000_000_000 - WEIGHTS - LOGITS - RESERVES
    assert shared_kv_cache_bytes(config(rollout={"tensor_parallel": 2}), SHAPE) == half


@pytest.mark.parametrize(
    "other",
    [
        config(gpu_gb=None),
        config(rollout={"placement": "separate"}),
        config(parallel={"offload": "never"}),
    ],
    ids=["unknown GPU", "separate", "trainer stays"],
)
def test_left_to_vllm(other: Config) -> None:
    assert shared_kv_cache_bytes(other, SHAPE) is None


def test_a_gpu_that_is_too_small_is_refused() -> None:
    """A GPU of 31e9 bytes has 503,069,184 left, 8,772 tokens: fewer than one sequence of 34,816."""
    (line,) = too_small(config(gpu_gb=31))
    assert "31 GB" in line and "8,772" in line and "raise rollout.tensor_parallel" in line
    assert too_small(config()) == []


def test_engines_start_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU nobody takes turns; with one its memory counts, unless the config says another."""
    monkeypatch.setattr(placement, "read_hf_config", lambda folder: SEVEN_B)
    unknown = config(gpu_gb=None)
    assert placement.sized_rollout(unknown) == unknown.rollout
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("Card", (), {"total_memory": 90_000_000_000})
    )
    assert placement.sized_rollout(unknown).kv_cache_bytes == 59_503_069_184
    assert placement.sized_rollout(config()).kv_cache_bytes == 49_503_069_184
    assert placement.sized_rollout(config(rollout={"kv_cache_bytes": 7})).kv_cache_bytes == 7
