"""Copies of a checkpoint's files in the memory of another node, so that the loss of one node loses none of them.

Each rank sends the file that it has written to the rank at the same place of the next node, in pieces over gloo.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES: Final = 1 << 26


def copy_to_next_node(own: Path, written: bool, per_node: int, group: dist.ProcessGroup) -> None:
    """Send ``own`` ``per_node`` ranks ahead, and write the file of the rank as far behind beside it; collective.

    Args:
        own: ``file_name(rank)`` in the folder of the checkpoint on this node.
        written: it is whole. Otherwise nothing is sent, and the other rank writes nothing.
        per_node: ranks on each node; at least two nodes.
        group: all ranks, over gloo.

    Raises:
        OSError: the copy could not be written, after all pieces have come: no other rank waits.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + per_node) % world, (rank - per_node) % world
    size = torch.tensor([own.stat().st_size if written else 0])
    coming = torch.empty_like(size)
    _exchange(size, ahead, coming, behind, group)
    left, due = int(size), int(coming)
    failure: OSError | None = None
    with own.open("rb") if left else open("/dev/null", "rb") as source:
        target = own.with_name(file_name(behind))
        target.unlink(missing_ok=True)
        while left or due:
            sent = torch.frombuffer(bytearray(source.read(min(left, PIECE_BYTES)) or b"\0"), dtype=torch.uint8)
            received = torch.empty(min(due, PIECE_BYTES), dtype=torch.uint8)
            _exchange(sent if left else None, ahead, received if due else None, behind, group)
            left, due = left - min(left, PIECE_BYTES), due - len(received)
            try:
                with target.open("ab") as file:
                    file.write(received.numpy().tobytes())
            except OSError as error:
                failure = error
    if failure is not None:
        raise failure


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"__{rank}_0.distcp"


def _exchange(sent: Tensor | None, ahead: int, received: Tensor | None, behind: int, group: dist.ProcessGroup) -> None:
    works = [] if sent is None else [dist.isend(sent, ahead, group)]
    works += [] if received is None else [dist.irecv(received, behind, group)]
    for work in works:
        if work is not None:
            work.wait()
