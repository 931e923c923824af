"""Seeds: from the run's one seed, a repeatable seed for every rank, purpose and request; the generators' states."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *purpose: str | int) -> int:
    """Return a seed in [0, 2**31) for one purpose: ``derive_seed(run_seed, "rollout", step, sample)``.

    The same arguments give the same seed on every machine and Python version; other arguments give an unrelated one
    (with ``seed + rank``, rank 1 of seed 1 would repeat rank 0 of seed 2). vLLM and NumPy's legacy generator take at
    most 31 bits.
    """
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 33


def seed_everything(seed: int, rank: int) -> int:
    """Seed the global generators of Python, NumPy and torch (with CUDA's) for this rank, and return that seed.

    Parameters that all ranks must draw alike come from Megatron's model-parallel generators instead.
    """
    rank_seed = derive_seed(seed, "rank", rank)
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)
    return rank_seed


def random_state() -> Mapping[str, Any]:
    """Copy the states of this rank's generators. Megatron's own, for dropout, are not used: there is no dropout."""
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Undo ``random_state``."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
