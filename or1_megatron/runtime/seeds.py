"""One seed for a run; from it a different, repeatable seed for every rank, purpose and request."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2**31) for one purpose: ``derive_seed(run_seed, "rollout", step, sample)``.

    The same arguments give the same number on every machine and Python version; any other argument gives an unrelated
    one (``seed + rank`` would make rank 1 of seed 1 repeat rank 0 of seed 2). 31 bits, because vLLM and NumPy's
    legacy generator take no more.
    """
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 33


def seed_everything(seed: int, rank: int) -> int:
    """Seed Python's, NumPy's and torch's global generators (CUDA's with torch's) for this rank; returns that seed.

    Parameters that all ranks must draw alike do not come from here: Megatron's own model-parallel generators do that.
    """
    rank_seed = derive_seed(seed, "rank", rank)
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    return rank_seed
