"""Checkpoints: the same layout resumes to the bit, any layout loads any other's to the bit, damage is named.

One start of two ranks does all of it. What a checkpoint holds as a whole is put together by Megatron's own loader.
Not proven here: generators and pinned copies on GPUs, kills in the middle of a save (test_killed_saves), full disks
(train/test_bad_input).
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from at_layouts import STATE, Rank, travel

from or1_megatron.checkpoint import loader, shard_files
from or1_megatron.checkpoint.manifest import MANIFEST, CheckpointDamaged, CheckpointUnreadable, check_manifest
from or1_megatron.checkpoint.saver import RANDOM, CheckpointSaver
from or1_megatron.checkpoint.sharded_state import slices_of
from or1_megatron.runtime.seeds import random_state, seed_everything

FLOAT32 = [
    {"tensor": 2, "sequence": True},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"pipeline": 2, "layers_per_stage": [1, 3]},
    {"context": 2},
    {"distributed_optimizer": False},
    {"tensor": 2},
]
BFLOAT16 = [{}, {"tensor": 2}, {"distributed_optimizer": False}]
TIED = [{"pipeline": 2}, {"tensor": 2}, {"pipeline": 2}]
ONE_KV_HEAD = [{"tensor": 2}, {}]
EXPERTS = [
    {"expert": 2},
    {"tensor": 2, "sequence": True},
    {"expert": 2, "distributed_optimizer": False},
    {"pipeline": 2},
    {"expert": 2, "context": 2},
]


def draws() -> list[float]:
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def save_and_resume(model: Path, folder: Path) -> dict[str, Any]:
    """Two updates, a save, two more updates while it is written; then the last two again from the checkpoint."""
    layout = {"tensor": 2}
    first = Rank(model, "float32", layout)
    first.update()
    first.update()
    torch.manual_seed(first.mesh.rank + 17)
    random.seed(5)
    saver = CheckpointSaver(first.policy)
    saver.save(folder, STATE)
    went_on = {"draws": draws(), "updates": [first.update(), first.update()]}
    saver.finish(wait=True)
    saver.save(folder.with_name("step_000004"), STATE)  # over the same buffers
    third = first.update()
    saver.close()

    second = Rank(model, "float32", layout)
    state = loader.load(second.policy, folder)
    resumed = {"draws": draws(), "updates": [second.update(), second.update()]}
    later = Rank(model, "float32", layout)
    loader.load(later.policy, folder.with_name("step_000004"))
    third_again = later.update()
    return {
        "state": state,
        "went_on": went_on,
        "resumed": resumed,
        "third": [third, third_again],
        "own draws": draws_after_a_load_of_more_ranks(later, folder),
    }


def draws_after_a_load_of_more_ranks(rank: Rank, folder: Path) -> list[list[float]]:
    """Return the draws of freshly seeded generators without and with a load of a checkpoint that three ranks saved."""
    of_three = folder.with_name(f"of_three_{rank.mesh.rank}")
    shutil.copytree(folder, of_three)
    torch.save([*torch.load(of_three / RANDOM, weights_only=False), random_state()], of_three / RANDOM)
    drawn = []
    for load in (lambda: None, lambda: loader.load(rank.policy, of_three)):
        seed_everything(1, rank.mesh.rank)
        load()
        drawn.append(draws())
    return drawn


def resume_and_travel(model: Path, plan: dict[str, Any], scratch: Path) -> dict[str, Any]:
    resume = save_and_resume(model, scratch / "step_000002")
    return {"resume": resume, "travels": {name: travel(*of, scratch / name) for name, of in plan.items()}}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoint")


@pytest.fixture(scope="module")
def results(tiny: Callable[..., Path], tiny_qwen2: Path, tied_qwen2: Path, scratch: Path) -> Any:
    """What rank 0 saw."""
    one_kv_head, experts = tiny("one_kv_head"), tiny("qwen3_moe")
    plan = {
        "float32": (tiny_qwen2, "float32", FLOAT32),
        "bfloat16": (tiny_qwen2, "bfloat16", BFLOAT16),
        "tied": (tied_qwen2, "float32", TIED),
        "one_kv_head": (one_kv_head, "float32", ONE_KV_HEAD),
        "experts": (experts, "float32", EXPERTS),
        "gpt_oss": (tiny("gpt_oss"), "float32", EXPERTS[:2]),
    }
    return ranks.call(resume_and_travel, 2, tiny_qwen2, plan, scratch)[0]


def test_same_layout_resumes_to_the_bit(results: Any) -> None:
    """Losses, gradient norms, learning rates and random draws of the resumed run are those of the run that went on
    while the checkpoint was written; so is what a second save, over the same buffers, resumes. With another number of
    ranks generators keep their own seeds."""
    resume = results["resume"]
    assert resume["state"] == STATE
    assert resume["resumed"] == resume["went_on"]
    third, again = resume["third"]
    assert third == again and third != resume["went_on"]["updates"][1]
    without, with_load = resume["own draws"]
    assert with_load == without


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("float32", FLOAT32),
        ("bfloat16", BFLOAT16),
        ("tied", TIED),
        ("one_kv_head", ONE_KV_HEAD),
        ("experts", EXPERTS),
        ("gpt_oss", EXPERTS[:2]),
    ],
)
def test_any_layout_loads_any_other(results: Any, name: str, layouts: list[Any]) -> None:
    """Each layout loads what the one before it saved, and saves it again: every whole tensor, the optimizer's included,
    is that of the first checkpoint to the bit. The updates that follow agree within rounding."""
    travels = results["travels"][name]
    assert len(travels) == len(layouts)
    tolerance = 2e-2 if name == "bfloat16" else 1e-5
    for stop in travels[1:]:
        assert stop["tensors"] == travels[0]["tensors"] and stop["differ"] == []
        for mine, theirs in zip(stop["updates"], travels[0]["updates"], strict=True):
            assert mine == pytest.approx(theirs, rel=tolerance)


def test_what_is_saved_of_a_parameter(results: Any) -> None:
    """Each parameter, two moments, and in bf16 an fp32 master weight. Parameters are nine kinds of tensors of a layer,
    the embedding, the last norm and the head. Nothing else, in particular no extra state of Transformer Engine."""
    key = "decoder.layers.mlp.linear_fc1.weight"
    float32, bfloat16 = (results["travels"][name][0]["tensors"] for name in ("float32", "bfloat16"))
    assert [name for name in float32 if key in name] == [
        key,
        f"optimizer.state.exp_avg.{key}",
        f"optimizer.state.exp_avg_sq.{key}",
    ]
    assert sorted(set(bfloat16) - set(float32)) == sorted(
        f"optimizer.state.param.{name}" for name in float32 if not name.startswith("optimizer")
    )
    layer = ("input_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
    attention = ("linear_proj.weight", "linear_qkv.weight", "linear_qkv.bias")
    assert [name for name in float32 if not name.startswith("optimizer")] == sorted(
        ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"]
        + [f"decoder.layers.{name}" for name in layer]
        + [f"decoder.layers.self_attention.{name}" for name in attention]
    )


def test_a_flat_range_as_slices() -> None:
    """Every range of small arrays: the slices, read in order, give numpy's flat range; in n dimensions there are at
    most 2 n - 1 of them."""
    assert list(slices_of((4, 5), 3, 16)) == [((0, 3), (1, 2)), ((1, 0), (2, 5)), ((3, 0), (1, 1))]
    for sizes in [(7,), (3, 4), (1, 3, 4), (2, 3, 2)]:
        whole = np.arange(np.prod(sizes)).reshape(sizes)
        for first, last in itertools.combinations_with_replacement(range(whole.size + 1), 2):
            slices = list(slices_of(sizes, first, last))
            parts = [whole[tuple(slice(a, a + n) for a, n in zip(*part, strict=True))].ravel() for part in slices]
            assert np.concatenate([np.empty(0), *parts]).tolist() == list(range(first, last))
            assert len(slices) <= 2 * len(sizes) - 1


def test_a_tensor_that_is_not_whole_is_named(tmp_path: Path) -> None:
    """Half of it is on disk. Nothing is changed."""
    half, whole = (shard_files.TensorSlice("w", (4,), (0,), (size,), 0) for size in (2, 4))
    written, _ = shard_files.write_slices(tmp_path / "0", [(half, torch.ones(2))])
    shard_files.write_metadata(tmp_path, written)
    target = torch.zeros(4)
    with pytest.raises(shard_files.StateMismatch, match=r"2 of the 4 elements of w at \(0,\) \+ \(4,\) are there"):
        shard_files.read_shards(tmp_path, [shard_files.LocalShard(lambda: target, (whole,), True, False)])
    assert not target.any()


def damaged(results: Any, scratch: Path, tmp_path: Path) -> Path:
    """Copy a checkpoint; the copy is still intact."""
    copy = tmp_path / "copy"
    shutil.copytree(scratch / "step_000002", copy)
    check_manifest(copy)
    return copy


def test_flipped_bit_is_named(results: Any, scratch: Path, tmp_path: Path) -> None:
    """A flipped bit in any file."""
    copy = damaged(results, scratch, tmp_path)
    files = sorted(path for path in copy.iterdir() if path.name != MANIFEST)
    assert [path.name for path in files] == [
        *(".metadata", "__0_0.distcp", "__1_0.distcp", "common.pt", "loop.json", "metadata.json", "random.pt")
    ]
    for file in files:
        intact = file.read_bytes()
        flipped = bytearray(intact)
        flipped[len(flipped) // 2] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(CheckpointDamaged, match=f"{file.name} is corrupt"):
            check_manifest(copy)
        file.write_bytes(intact)


def test_cut_and_missing_files_are_named(results: Any, scratch: Path, tmp_path: Path) -> None:
    copy = damaged(results, scratch, tmp_path)
    file = copy / "loop.json"
    file.write_text(file.read_text()[:-1])
    with pytest.raises(CheckpointDamaged, match=r"loop\.json has \d+ bytes; the manifest says"):
        check_manifest(copy)
    file.unlink()
    with pytest.raises(CheckpointDamaged, match=r"loop\.json is missing"):
        check_manifest(copy)
    (copy / MANIFEST).write_text('{"format": 1, "files": {}}')
    with pytest.raises(CheckpointUnreadable, match="format 1; this version of or1_megatron reads format 2"):
        check_manifest(copy)
    (copy / MANIFEST).unlink()
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json is missing: the checkpoint is incomplete"):
        check_manifest(copy)
