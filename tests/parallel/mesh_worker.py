"""Which process groups a mesh makes over gloo by name: run by test_mesh.

mesh_worker.py OUT PARALLEL_JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group


def main() -> None:
    made: list[int] = []
    new_group = dist.new_group

    def counted(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo":
            made.append(dist.get_world_size() if ranks is None else len(ranks))
        return new_group(ranks, *arguments, **options)

    start_process_group(60)
    dist.new_group = counted
    mesh = build_mesh(ParallelConfig(**json.loads(sys.argv[2])), seed=1)
    if mesh.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(made))
    stop_process_group()


main()
