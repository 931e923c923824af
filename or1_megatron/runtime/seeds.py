"""Derives repeatable seeds for ranks, purposes and requests from the run's seed; saves and restores RNG states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**31) for one purpose: ``derive_seed(run_seed, "rollout", step, sample)``.

    Equal arguments give equal seeds on every machine and Python version; other arguments give unrelated seeds (with
    ``seed + rank``, rank 1 of seed 1 would repeat rank 0 of seed 2). vLLM and NumPy's legacy generator take at most 31
    bits.
    """
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 33


def seed_everything(seed: int, rank: int) -> int:
    """Seed the global generators of Python, NumPy and torch (also CUDA) for this rank, and return the rank's seed.

    Initial parameters that must be equal on all ranks are drawn from Megatron's model-parallel generators instead.
    """
    rank_seed = derive_seed(seed, "rank", rank)
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    return rank_seed


def random_state() -> Mapping[str, Any]:
    """Return copies of this rank's generator states. Megatron's are left out: only dropout would draw from them."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Restore the generator states that ``random_state`` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
