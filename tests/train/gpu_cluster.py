"""Run as a program: a Ray of two nodes with pretended GPUs, trainer ranks, engines. Prints what each engine sees.

The ranks are forks of this process and join over gloo. They do not train: they only say which GPU they have. An engine
is a real ``EngineActor`` whose model folder does not exist, so that its process is there with its environment, and
starts no vLLM. A scenario named "no trainer" lets Ray choose the GPUs.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import ray
import torch.distributed as dist
from ray.cluster_utils import Cluster

from or1_megatron.config.schema import ClusterConfig, RolloutConfig
from or1_megatron.parallel import mesh  # noqa: F401  # once, before the ranks are forked
from or1_megatron.rollout import cluster
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.trainer import placement
from or1_megatron.trainer.placement import engine_places

RUN = "pretended"


class Settings:
    """The part of a Config that places engines."""

    cluster = ClusterConfig()

    def __init__(self, rollout: dict[str, Any]) -> None:
        self.rollout = RolloutConfig(**rollout)


def main(task: dict[str, Any]) -> int:
    ranks = task["ranks"]
    rank = fork(len(ranks))
    dist.init_process_group("gloo", init_method=f"file://{task['store']}", rank=rank, world_size=len(ranks))
    if rank > 0:
        os.environ.update(ranks[rank])
        for name, rollout in task["scenarios"].items():
            assert name == "no trainer" or engine_places(Settings(rollout)) is None
        return 0
    nodes = start_nodes(task["nodes"])
    try:
        cluster.start_ray(nodes.address, RUN)
        placement.node_gpus = cache(placement.node_gpus)  # it stays the same, and each answer starts two processes
        os.environ.update(ranks[0])  # not earlier: Ray's nodes would inherit it
        seen = {}
        for name, rollout in task["scenarios"].items():
            settings = Settings(rollout)
            seen[name] = seen_by_engines(settings, None if name == "no trainer" else engine_places(settings))
        cluster.stop_ray()
    finally:
        end(nodes)
    print(json.dumps(seen))
    return sum(os.waitstatus_to_exitcode(os.wait()[1]) for _ in ranks[1:])


def fork(world: int) -> int:
    """Fork ``world`` - 1 processes, and return this process's rank. The calling process is rank 0."""
    for rank in range(1, world):
        if os.fork() == 0:
            return rank
    return 0


def start_nodes(nodes: list[dict[str, str]]) -> Cluster:
    """Start a Ray cluster with a raylet for each node; ``nodes`` has the environment of each."""
    os.environ.update(cluster.START_WAITS, RAY_raylet_start_wait_time_s="300")
    started = Cluster()
    for environment in nodes:
        seen = environment.get("CUDA_VISIBLE_DEVICES", environment["PRETENDED_GPUS"])
        started.add_node(
            num_cpus=1,
            num_gpus=len(seen.split(",")),
            env_vars=environment,
            include_dashboard=False,
            include_log_monitor=False,
            no_monitor=True,
        )
    return started


def end(nodes: Cluster) -> None:
    children = psutil.Process().children(recursive=True)
    nodes.shutdown()
    for child in children:  # Ray's agents would stay for another minute
        with suppress(psutil.Error):
            if __file__ not in child.cmdline():  # no trainer rank
                child.kill()


def seen_by_engines(settings: Settings, places: Any) -> list[dict[str, Any]]:
    pool = EnginePool(settings.rollout, Path("/no/model"), "float32", 64, RUN, on_cpu=False, places=places)
    calls = [handle.__ray_call__.remote(look_around) for handle in pool.handles]
    seen: list[dict[str, Any]] = ray.get(calls, timeout=500)
    pool.close()
    return seen


def look_around(_engine: Any) -> dict[str, Any]:
    import sitecustomize

    return {
        "gpus": sitecustomize.visible(),
        "machine": os.environ["PRETENDED_GPUS"].split(","),
        "environment": dict(os.environ),
    }


if __name__ == "__main__":
    try:
        code = main(json.loads(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
