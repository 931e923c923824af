"""A trainer of two ranks without Megatron: run by test_handoff under torch's launcher variables, one process per rank.

Each rank holds half of every tensor and gathers over the default process group, as a policy would. Rank 0 attaches to
the Ray that the test started. Prints ``SENT <version> <bytes>`` per handoff.

    trainer_ranks.py WEIGHTS.pt RAY_ADDRESS ENGINES_NAMESPACE BUCKET_BYTES VERSION...
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from or1_megatron.config.schema import HandoffConfig
from or1_megatron.handoff.sender import make_sender


class HalvedWeights:
    """What the gathering backend needs of ``interfaces.PolicyWeights``: flat halves, joined at iteration."""

    ranks = 2

    def __init__(self, weights: dict[str, torch.Tensor], rank: int) -> None:
        self.shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
        self.halves = {name: tensor.flatten().chunk(2)[rank].clone() for name, tensor in weights.items()}

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, dtype, shape) for name, (dtype, shape) in self.shapes.items()]

    def from_rank_0(self, value: Any) -> Any:
        told = [value]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        for name, half in self.halves.items():
            parts = [torch.empty_like(half), torch.empty_like(half)]
            dist.all_gather(parts, half)
            whole = torch.cat(parts).view(self.shapes[name][1])
            yield name, whole if dist.get_rank() == 0 else None


def main() -> None:
    weights, ray_address, engines_namespace, bucket_bytes, *versions = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    control = None
    if rank == 0:
        import ray

        from or1_megatron.rollout import cluster
        from or1_megatron.rollout.engine_group import EngineGroup

        cluster.start_ray(ray_address, "trainer-of-tests")
        handles = [ray.get_actor(f"engine-{index}", namespace=engines_namespace) for index in range(2)]
        control = EngineGroup(handles, workers_per_engine=1, timeout_s=240.0)
    halved: Any = HalvedWeights(torch.load(weights), rank)
    config = HandoffConfig(backend="gloo", bucket_bytes=int(bucket_bytes), timeout_s=240.0)
    sender = make_sender(halved, rank, config, control)
    for version in versions:
        sent = sender.send(int(version))
        if rank == 0:
            print("SENT", version, sent, flush=True)
        dist.barrier()  # the trainer's own group works on, between handoffs
    sender.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
