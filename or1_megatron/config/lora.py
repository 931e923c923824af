"""The section ``model.lora``: low-rank adapters instead of all weights."""

from __future__ import annotations

from pathlib import Path

from or1_megatron.config.base import Positive, PositiveFloat, Section


class LoraConfig(Section):
    """Train low-rank adapters of the linears (LoRA, arXiv 2106.09685); the model's own weights stay as they are."""

    rank: Positive = 32
    """Rank r of each adapter's two factors. Unit: none."""
    alpha: PositiveFloat = 32.0
    """An adapter's product is multiplied by alpha / rank. Unit: none."""
    targets: tuple[str, ...] = ()
    """The linears with an adapter, each by the end of its HF name (q_proj, mlp.down_proj), as in peft's target_modules.
    Empty: every linear of the layers, including the experts'."""
    adapter: Path | None = None
    """Folder of adapters in peft's format from which training starts; rank, alpha and targets must be the same. Unset:
    new adapters, which change nothing before the first update."""
