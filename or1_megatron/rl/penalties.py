"""Length penalty: DAPO's soft overlong penalty, subtracted from a response's reward before advantages are computed.

Metrics and pass rates use rewards without penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from or1_megatron.config.algorithm import AdvantageConfig
from or1_megatron.types import Group


def reward_penalties(
    groups: Sequence[Group], config: AdvantageConfig, longest: int
) -> list[NDArray[np.float64]] | None:
    """Return each group's penalties [M], or None if none is set. ``longest``: the limit of a response, in tokens."""
    if config.overlong_tokens is None:
        return None
    lengths = [np.array([completion.token_ids.size for completion in group.completions]) for group in groups]
    return [config.overlong_penalty * overlong(of_group, longest, config.overlong_tokens) for of_group in lengths]


def overlong(lengths: NDArray[np.int64], longest: int, soft: int) -> NDArray[np.float64]:
    """Return the share [M], 0 to 1, of DAPO's soft penalty for responses of ``lengths`` [M] (arXiv 2503.14476, eq. 13).

    The share is 0 up to ``longest`` - ``soft`` tokens, then rises linearly to 1 at ``longest``. Worked example, longest
    20, soft 4: lengths 16, 17, 20 give 0, 1/4, 1.
    """
    return np.clip((lengths - (longest - soft)) / soft, 0.0, 1.0)
