"""Estimates the time of a head call on a GPU, from shapes and the GPU's rates.

On an H100, given a product's rate in the same run, estimates are 4% too long for recompute, 2% for one pass.

A matrix product runs as tiles of 128 x 256 results, one on each SM at a time, so it takes whole waves of tiles.
Products, epilogues and the traffic of the fp32 sums are added as if nothing overlapped.

Shapes: T tokens, t tokens of one tile, H hidden, V/tp rows of the output weight on this rank, v rows of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

from or1_megatron.config.hardware import Hardware

Mode = Literal["recompute", "one_pass"]

_M, _N = 128, 256
"""Results of one tile of a product: the largest that a Hopper SM's registers hold; large products use it."""


def wave_efficiency(rows: int, columns: int, sms: int) -> float:
    """Return the share of SMs at work over the waves of a product with ``rows`` x ``columns`` results."""
    tiles = _tiles(rows, columns)
    return tiles / (-(-tiles // sms) * sms)


def head_seconds(
    tokens: int, hidden: int, vocab_local: int, tile_tokens: int, block_rows: int, mode: Mode, gpu: Hardware
) -> float:
    """Return the expected seconds of a head call with bf16 inputs, forward and backward.

    Tiles are [``tile_tokens``, ``block_rows``] = [t, v]; sizes are 1 or more.

    Example: 32,768 tokens, H 5,120, V 152,064, on H200. recompute in tiles of 8,192 x 8,448: 283 ms, 91% of the rate of
    full waves; one_pass in tiles of 4,096 tokens: 219 ms, 88%.
    """
    logits_products = 2 if mode == "recompute" else 1
    products_s = sum(
        (token_tiles * blocks)
        * (
            logits_products * _product_s(t, v, hidden, gpu)
            + _product_s(t, hidden, v, gpu)
            + _product_s(v, hidden, t, gpu)
        )
        for (t, token_tiles), (v, blocks) in product(_cut(tokens, tile_tokens), _cut(vocab_local, block_rows))
    )
    # The fp32 logits are read twice, their bf16 gradient is written once; the weight's fp32 gradient is read and
    # written once per tile of tokens, a tile's fp32 hidden gradient once per block of rows.
    token_tiles, blocks = -(-tokens // tile_tokens), -(-vocab_local // block_rows)
    moved_bytes = 10 * tokens * vocab_local + 8 * hidden * (vocab_local * token_tiles + tokens * blocks)
    return products_s + moved_bytes / (gpu.memory_bytes_per_s.value * gpu.memory_share.value)


def _product_s(rows: int, columns: int, summed: int, gpu: Hardware) -> float:
    """Return the seconds of [rows, summed] x [summed, columns]."""
    operations = 2 * _M * _N * _tiles(rows, columns) * summed
    full_waves_flops = gpu.bf16_flops.value * gpu.product_share.value
    return operations / full_waves_flops / wave_efficiency(rows, columns, int(gpu.multiprocessors.value))


def _tiles(rows: int, columns: int) -> int:
    return -(-rows // _M) * -(-columns // _N)


def _cut(whole: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (size of a piece, how many pieces have it) when ``whole`` is cut into pieces of ``size`` and a rest."""
    if whole >= size:
        yield size, whole // size
    if rest := whole % size:
        yield rest, 1
