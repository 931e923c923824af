"""Where engines are placed on GPUs, with pretended GPUs: real Ray, real actors, and a torch.cuda that is told its GPUs.

``gpu_cluster.py`` runs two raylets on this machine with 4 and 8 pretended GPUs, four trainer ranks and engine actors,
and prints what each engine's process sees. Ray counts those GPUs too: an engine that asks Ray for GPUs is given some.
Not proven: that CUDA takes such lists, that NCCL and CUDA IPC work across them, several physical hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.rollout.gpus import NodeGpus
from or1_megatron.trainer import placement
from or1_megatron.trainer.placement import PlacementError, RankGpu, colocated_places, separate_places

HERE = Path(__file__).parent
PROGRAM_S = 800.0
"""Ends a hang of the program, which starts a dozen processes; less than the time limit of a test."""
A = [f"GPU-a{number}-of-host-a" for number in range(8)]
B = [f"GPU-b{number}-of-host-b" for number in range(8)]
NODES = [
    {"PRETENDED_GPUS": ",".join(A[:4]), "RAY_OVERRIDE_NODE_ID_FOR_TESTING": "a" * 56},
    {
        "PRETENDED_GPUS": ",".join(B),
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": "b" * 56,
        "CUDA_VISIBLE_DEVICES": "2,3,4,5",  # "ray start" with a part of the host's GPUs
    },
]
RANKS = [
    {"PRETENDED_GPUS": ",".join(A[:4]), "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "0,1"},
    {"PRETENDED_GPUS": ",".join(A[:4]), "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
    {"PRETENDED_GPUS": ",".join(B), "LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": f"{B[4]},GPU-b3"},
    {"PRETENDED_GPUS": ",".join(B), "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": f"{B[4]},GPU-b3"},
]
"""They have a0 and a1 by number, and b4 and b3 by UUID, one of them cut short."""
SCENARIOS = {
    "separate": {"placement": "separate", "engines": 2, "tensor_parallel": 2},
    "colocated": {"placement": "colocated", "engines": 2, "tensor_parallel": 2},
    "no trainer": {"placement": "separate", "engines": 2, "tensor_parallel": 4},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By scenario and engine: the GPUs that it sees (``gpus``), all of its node (``machine``), its ``environment``."""
    task = {"nodes": NODES, "ranks": RANKS, "scenarios": SCENARIOS, "store": str(tmp_path_factory.mktemp("s") / "s")}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE / "pretended_gpus"), str(HERE.parents[1])]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # as somebody may have it who has started the cluster
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # as Megatron leaves it in rank 0, from which embedded Ray inherits it
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "gpu_cluster.py"), json.dumps(task)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_separate_engines_get_no_gpu_of_the_trainer(seen: dict[str, list[dict[str, Any]]]) -> None:
    """The last engine has what is left of the four GPUs that the second node was started with."""
    assert [engine["gpus"] for engine in seen["separate"]] == [A[2:4], [B[2], B[5]]]
    assert [engine["machine"] for engine in seen["separate"]] == [A[:4], B]


def test_colocated_engines_are_on_their_ranks_gpus_and_node(seen: dict[str, list[dict[str, Any]]]) -> None:
    """Both nodes have this machine's name and address, as hosts do whose names resolve to the loopback device."""
    assert [engine["gpus"] for engine in seen["colocated"]] == [A[0:2], [B[4], B[3]]]
    assert [engine["machine"] for engine in seen["colocated"]] == [A[:4], B]


def test_without_a_trainer_ray_chooses_and_no_two_engines_share_a_gpu(seen: dict[str, list[dict[str, Any]]]) -> None:
    """It gives out all GPUs that it counts: those of the ranks too, were any there."""
    given = [set(engine["gpus"]) for engine in seen["no trainer"]]
    assert sorted(given, key=min) == [set(A[:4]), set(B[2:6])]


def test_engines_do_not_inherit_what_megatron_needs(seen: dict[str, list[dict[str, Any]]]) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS=1 would queue all streams of an engine one after another."""
    found = {e["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] for engines in seen.values() for e in engines}
    assert found == {"8"}


def test_engines_serve_their_metrics_behind_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Mock()
    monkeypatch.setattr(placement, "wait_for_nodes", Mock())
    monkeypatch.setattr(placement, "EnginePool", pool)
    placement.start_engines(Mock(**{"track.prometheus_port": 9100}), Mock(root=tmp_path), Mock())
    assert pool.call_args.args[-1] == 9101


def test_ranks_by_number_leave_the_rest_of_a_node() -> None:
    ranks, nodes = [RankGpu("a", gpu) for gpu in A[:4]], [NodeGpus("1", "a", tuple(A)), NodeGpus("2", "b", tuple(B))]
    rollout = RolloutConfig(placement="separate", engines=3, tensor_parallel=2)
    places = [(place.node_id, list(place.devices)) for place in separate_places(rollout, ranks, nodes)]
    assert places == [("1", A[4:6]), ("1", A[6:8]), ("2", B[0:2])]
    with pytest.raises(PlacementError) as refused:
        separate_places(rollout.model_copy(update={"engines": 7}), ranks, nodes)
    assert "7 engines of tensor_parallel 2 need 14 GPUs beside the trainer's 4" in str(refused.value)
    assert "room for 6 of them (a shows 8 GPUs, 4 of them the trainer's; b shows 8 GPUs, 0 of" in str(refused.value)


def test_an_engine_stays_on_one_node() -> None:
    nodes = [NodeGpus("1", "a", tuple(A)), NodeGpus("2", "b", tuple(B))]
    ranks = [RankGpu("a", A[0]), RankGpu("b", B[0])]
    rollout = RolloutConfig(engines=1, tensor_parallel=2)
    with pytest.raises(PlacementError, match="would span the nodes a, b"):
        colocated_places(rollout, ranks, nodes)
    three_left = [NodeGpus("1", "a", tuple(A[:4])), NodeGpus("2", "b", tuple(B[:2]))]
    assert [place.devices for place in separate_places(rollout, ranks, three_left)] == [tuple(A[1:3])]
    with pytest.raises(PlacementError, match="room for 1 of them"):
        separate_places(rollout.model_copy(update={"engines": 2}), ranks, three_left)


def test_a_trainer_gpu_that_ray_does_not_show_is_named() -> None:
    with pytest.raises(PlacementError, match=rf"trainer rank 1 on host b has {B[0]}, .* \(a shows 8 GPUs, 1 of them"):
        colocated_places(
            RolloutConfig(engines=2), [RankGpu("a", A[0]), RankGpu("b", B[0])], [NodeGpus("1", "a", tuple(A))]
        )


def test_two_ray_nodes_on_one_machine_do_not_lend_a_gpu_twice() -> None:
    nodes = [NodeGpus("1", "a", tuple(A[:2])), NodeGpus("2", "a", tuple(A[:3]))]
    places = separate_places(RolloutConfig(engines=2, placement="separate"), [RankGpu("a", A[0])], nodes)
    assert [(place.node_id, place.devices) for place in places] == [("1", (A[1],)), ("2", (A[2],))]
