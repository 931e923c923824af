"""Context parallelism: splits a packed row's tokens over the ranks, and computes attention over the whole row.

Each sequence of a packed row is cut into 2 * CP equal chunks; rank r holds chunks r and 2 * CP - 1 - r (zig-zag), so
every rank has equally many tokens and equal causal work. Transformer Engine's layers use this split, but compute
attention themselves. Our own layers call ``attend``: each rank gathers the keys and values of the whole packed row, and
a query sees the tokens of its own sequence up to its own position.

Shapes: T row tokens, t = T / CP tokens of this rank, S sequences, N query heads, G key/value heads, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor


@dataclass(frozen=True)
class QueryChunk:
    """The slices of a chunk's queries and of the keys that they see. Both end at the same token; the mask is causal."""

    query: slice  # of this rank's t tokens
    key: slice  # of the row's T tokens


@dataclass(frozen=True)
class ContextShard:
    """The tokens of one packed row that a context-parallel rank holds."""

    held: Tensor  # [t] int64: the row positions that this rank holds, in its order
    to_row_order: Tensor  # [T] int64: for each row position, its index in all ranks' tokens, concatenated
    chunks: tuple[QueryChunk, ...]


def held_positions(bounds: Sequence[int], rank: int, ranks: int) -> Tensor:
    """Return the positions [t] int64 of the tokens that one rank holds; ``bounds`` [S+1] has 0 and the sequences' ends.

    With sequences of 8 and 4 tokens on 2 ranks, rank 0 holds 0 1 6 7 | 8 11, and rank 1 holds 2 3 4 5 | 9 10.

    Raises:
        ValueError: a sequence's length is not a multiple of 2 * ranks.
    """
    parts = []
    for start, end in itertools.pairwise(bounds):
        chunk, rest = divmod(end - start, 2 * ranks)
        if rest:
            raise ValueError(
                f"context parallelism over {ranks} ranks: a sequence of {end - start} tokens is not a multiple of "
                f"2 * {ranks}; pad it (BatchLayout.sequence_alignment)"
            )
        early, late = start + rank * chunk, start + (2 * ranks - 1 - rank) * chunk
        parts += [torch.arange(early, early + chunk), torch.arange(late, late + chunk)]
    return torch.cat(parts)


def context_shard(bounds: Sequence[int], rank: int, ranks: int, device: torch.device) -> ContextShard:
    """Return the part of a packed row that ``rank`` holds; ``bounds`` [S+1] has 0 and the sequences' ends."""
    everyone = torch.cat([held_positions(bounds, other, ranks) for other in range(ranks)])
    to_row_order = torch.empty_like(everyone)
    to_row_order[everyone] = torch.arange(len(everyone))
    chunks, place = [], 0
    for start, end in itertools.pairwise(bounds):
        chunk = (end - start) // (2 * ranks)
        for index in (rank, 2 * ranks - 1 - rank):
            chunks.append(QueryChunk(slice(place, place + chunk), slice(start, start + (index + 1) * chunk)))
            place += chunk
    held = everyone[rank * (len(everyone) // ranks) :][: len(everyone) // ranks]
    return ContextShard(held.to(device), to_row_order.to(device), tuple(chunks))


def attend(
    query: Tensor, key: Tensor, value: Tensor, shard: ContextShard, chunked: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return attention [t, N, D] of this rank's query [t, N, D] to all ranks' key and value [t, G, D].

    The result has as many channels as the value, which may be fewer than D. The backward pass sums the gradients of key
    and value over the context-parallel ranks (reduce-scatter). ``chunked`` returns one chunk's attention from (queries,
    keys, values). The last query and the last key belong to the same token.
    """
    mine = torch.cat((key, value), dim=-1)
    gathered = gather_from_sequence_parallel_region(mine, group=parallel_state.get_context_parallel_group())
    together = gathered.index_select(0, shard.to_row_order)
    keys, values = together.split((key.shape[-1], value.shape[-1]), dim=-1)  # [T, G, D] each
    return torch.cat([chunked(query[chunk.query], keys[chunk.key], values[chunk.key]) for chunk in shard.chunks])
