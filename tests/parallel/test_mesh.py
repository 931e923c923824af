"""Process groups beside those of Megatron's collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch.distributed as dist

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.parallel.mesh import build_mesh


def gloo_groups() -> list[int]:
    """Return the sizes of the groups that a mesh asks for over gloo by name."""
    sizes: list[int] = []
    new_group = dist.new_group

    def counted(ranks: Any = None, *arguments: Any, **options: Any) -> Any:
        if options.get("backend") == "gloo":
            sizes.append(dist.get_world_size() if ranks is None else len(ranks))
        return new_group(ranks, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", counted)
        build_mesh(ParallelConfig(ranks=4, tensor=2), seed=1)
    return sizes


def test_a_mesh_makes_no_gloo_group_that_nobody_uses() -> None:
    """All ranks, and each replica. Megatron's own would be six more: three for each of the layout's two
    data-parallel groups.

    That its optimizers and our checkpoints do without is what test_checkpoint and test_resume show.
    """
    assert ranks.call(gloo_groups, 4)[0] == [4, 2, 2]


def gloo_threads() -> list[str]:
    build_mesh(ParallelConfig(ranks=4, tensor=2), seed=1)
    names = [task.read_text().strip() for task in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith("gloo")]


def test_one_thread_serves_all_gloo_groups_of_a_rank() -> None:
    """The thread's name is gloo's own. Without sharing, a rank has one such thread for each group."""
    assert ranks.call(gloo_threads, 4) == [["gloo_tcp_loop"]] * 4
