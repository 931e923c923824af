"""The policy's weight sources against vLLM's own checks of sources, as far as those run without a GPU.

That a Megatron policy yields what is declared here is tests/parallel/test_slices' to show. The backends themselves
(NCCL, CUDA IPC, NIXL) are not run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sharded_trainer import Grid, RankWeights

from or1_megatron.config.load import ConfigError
from or1_megatron.config.schema import Config, HandoffConfig
from or1_megatron.handoff.backend_check import VLLMS, check_choice, worker_info


@pytest.fixture(scope="module")
def grid() -> Grid:
    """Two stages of two tensor-parallel ranks; a vocabulary that both can share."""
    return Grid(_model(64), 2, 1, 2)


def _model(vocabulary: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, tie_word_embeddings=False, **shape)
    return Qwen2ForCausalLM(config).float()


def test_held_names_pass_the_checks_of_sharded_rdt(grid: Grid) -> None:
    """vLLM finds an owner for every tensor, and every group as declared; layers 0 and 1 are with different ranks."""
    from vllm.distributed.weight_transfer.base import layerwise_groups
    from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerWeightTransferEngine as Engine

    from or1_megatron.handoff.vllm.sources import HeldSource

    sources = [HeldSource(RankWeights(grid, rank)) for rank in range(4)]
    engines = []
    for source in sources:
        engine = object.__new__(Engine)
        engine.source, engine._meta = source, source.metadata()
        engine._groups = layerwise_groups([meta.name for meta in engine._meta])
        engines.append(engine)
    told: list[Any] = []
    for engine in engines:  # the collective between the ranks, by hand
        engine._all_gather_owned = lambda world, mine: told.append(mine) or [mine] * world
        try:
            engine._resolve_ownership(4, 0)
        except ValueError as error:
            assert "no trainer rank holds" in str(error)  # one rank alone does not
    for rank, engine in enumerate(engines):
        engine._all_gather_owned = lambda world, mine: told
        engine._resolve_ownership(4, rank)
        assert engine._owner_sets == [[0, 1], [2, 3]]
        seen = 0
        for index, (names, tensors) in zip(engine._owned_idx, sources[rank].iter_groups(), strict=True):
            assert names == engine._groups[index]
            engine._validate_held_yields(index, names, tensors)
            for name, tensor in zip(names, tensors, strict=True):
                if tensor is not None:
                    torch.testing.assert_close(tensor, grid.model.state_dict()[name], rtol=0, atol=0)
                    seen += 1
        assert seen == len(engine._held_names)
    assert sum(len(e._held_names) for e in engines[::2]) == len(engines[0]._meta)


def test_sources_pass_the_check_of_nccl(grid: Grid) -> None:
    """Iteration is what metadata declares, in name, order, dtype and shape; and a source that lies is found out."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine as Engine

    from or1_megatron.handoff.vllm.sources import EverywhereSource

    source = EverywhereSource(RankWeights(grid, 3))
    checked = list(Engine._checked_iter(source, source.metadata()))
    assert [name for name, _ in checked] == list(grid.shapes)
    with pytest.raises(ValueError, match="disagrees with iteration at index 0"):
        list(Engine._checked_iter(source, source.metadata()[1:]))


def test_meshes_pass_the_checks_of_m2n() -> None:
    """TP2 and two replicas: each rank's shard is the part of the whole that its placement says, to vLLM's liking."""
    from vllm.distributed.weight_transfer.m2n_common import check_transferable, resolve_layout, validate_layout

    from or1_megatron.handoff.vllm.sources import MeshSource

    grid = Grid(_model(64), 2, 2, 1)
    for rank in range(4):
        source = MeshSource(RankWeights(grid, rank), rank)
        assert source.mesh().dims == (2, 2)
        state = grid.model.state_dict()
        for meta, (name, shard) in zip(source.metadata(), source, strict=True):
            check_transferable(meta.name, meta.dtype, meta.shape)
            mesh, placements = resolve_layout(source.mesh(), meta.placements)
            validate_layout(mesh, placements, meta.shape, "source")
            whole = state[name]
            part = whole if meta.placements is None else whole.chunk(2, dim=meta.placements[1])[rank % 2]
            assert name == meta.name and torch.equal(shard, part)
            assert (meta.placements is None) == ("norm" in name)
    uneven = Grid(_model(61), 2, 1, 1)
    with pytest.raises(ValueError, match=r"nccl_m2n cannot send 'model\.embed_tokens\.weight'"):
        MeshSource(RankWeights(uneven, 0), 0).metadata()


def test_init_infos_pass_their_own_checks() -> None:
    """And each engine's workers get ranks of their own: two engines of two behind a trainer of four."""
    from vllm.distributed.weight_transfer.m2n_trainer import M2NTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

    from or1_megatron.handoff.vllm.builtin import init_info

    infos = {backend: init_info(backend, 3, 4, ("10.0.0.1", 1234, 2, 2)) for backend in VLLMS}
    assert {info.backend for info in infos.values()} == set(VLLMS)
    assert isinstance(infos["nccl_m2n"], M2NTrainerInitInfo) and infos["nccl_m2n"].destination_mesh_dims == (2, 2)
    assert infos["nccl"].world_size == 5 and infos["nccl_m2n"].world_size == 8
    base = {"master_address": "10.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 5}
    offsets = [NCCLWeightTransferInitInfo(**worker_info("nccl", base, index, 2)).rank_offset for index in range(2)]
    assert offsets == [1, 3]
    assert worker_info("sharded_rdt", {"num_consumers": 4}, 1, 2)["num_replicas"] == 2
    assert worker_info("shard", {}, 1, 2) == {"engine_index": 1}


REFUSED = [
    ({"backend": "nccl"}, "separate", False, "nccl is vLLM's and needs CUDA"),
    ({"backend": "sharded_rdt"}, "separate", False, "expected one of shard, gloo"),
    ({"backend": "shard", "transport": "nccl"}, "separate", False, "transport = nccl needs CUDA"),
    ({"backend": "gloo", "transport": "shared_memory"}, "separate", False, "is for handoff.backend = shard"),
    ({"backend": "nccl"}, "colocated", True, "NCCL refuses two ranks on one GPU"),
    ({"backend": "shard", "transport": "nccl"}, "colocated", True, "NCCL refuses two ranks on one GPU"),
    ({"backend": "ipc"}, "separate", True, "needs rollout.placement = colocated"),
]


def config_of(handoff: dict[str, Any], placement: str) -> Config:
    parallel = SimpleNamespace(pipeline=1, expert=1)
    made: Any = SimpleNamespace(
        handoff=HandoffConfig(**handoff), rollout=SimpleNamespace(placement=placement), parallel=parallel
    )
    return made


@pytest.mark.parametrize(("handoff", "placement", "cuda", "message"), REFUSED)
def test_what_cannot_run_here_is_refused(handoff: dict[str, Any], placement: str, cuda: bool, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_choice(config_of(handoff, placement), cuda)


def test_what_can_run_is_let_through() -> None:
    for cuda in (False, True):
        check_choice(config_of({}, "colocated"), cuda)
    check_choice(config_of({"backend": "shard", "transport": "gloo+shared_memory"}, "colocated"), False)
    check_choice(config_of({"backend": "shard", "transport": "nccl+cuda_ipc"}, "colocated"), True)
    for backend in VLLMS:
        check_choice(config_of({"backend": backend}, "colocated" if backend == "ipc" else "separate"), True)
