"""Layouts as a person writes them (``TP2 PP2 SP``), the rows that suit them, and whose layers can run here.

Knows nothing of Megatron.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from pydantic import ValidationError

from or1_megatron.arithmetic import Shape
from or1_megatron.config import ParallelConfig
from or1_megatron.rl.packing import BatchLayout, SequenceCost

LayerKind = Literal["own", "transformer_engine"]

_SIZES: Final = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context"}
_WORDS: Final[dict[str, dict[str, Any]]] = {
    "1": {},
    "SP": {"sequence": True},
    "distopt": {"distributed_optimizer": True},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "one_pass": {"head": "one_pass"},
    "overlap": {"overlap_grad_reduce": True},
    "overlap_gather": {"overlap_grad_reduce": True, "overlap_param_gather": True, "distributed_optimizer": True},
    "shuffled": {},
}
HELP: Final = (
    "TPn PPn VPPn CPn DPn SP distopt; selective or full (recompute); one_pass (head); overlap, overlap_gather; "
    "layers=3+1 (per chunk); rowsN (token budget); shuffled (samples in another order); 1 for none of them"
)


class LayoutError(ValueError):
    """A layout that cannot be read, or that cannot work."""


@dataclass(frozen=True)
class Case:
    """One way of computing the same batch."""

    name: str
    parallel: ParallelConfig
    shuffled: bool = False

    def order(self, samples: int) -> list[int]:
        """The order in which samples go into the batch."""
        indices = np.arange(samples)
        return [int(i) for i in (np.random.default_rng(3).permutation(indices) if self.shuffled else indices)]


def parse_layout(text: str, longest: int) -> Case:
    """``text``: words of ``HELP``, separated by blanks. Rows hold a multiple of ``longest`` unless ``rowsN`` is there.

    Raises:
        LayoutError: an unknown word, or words that do not go together.
    """
    values: dict[str, Any] = {"distributed_optimizer": False}
    data, budget = 1, 4 * longest
    for word in text.split():
        sized = re.fullmatch(r"(TP|PP|VPP|CP|DP|rows)(\d+)", word)
        if word in _WORDS:
            values |= _WORDS[word]
        elif sized and sized[1] == "DP":
            data = int(sized[2])
        elif sized and sized[1] == "rows":
            budget = int(sized[2])
        elif sized:
            values[_SIZES[sized[1]]] = int(sized[2])
        elif re.fullmatch(r"layers=\d+(\+\d+)*", word):
            values["layers_per_stage"] = tuple(int(n) for n in word.removeprefix("layers=").split("+"))
        else:
            raise LayoutError(f"layout '{text}': '{word}' is not known; expected {HELP}")
    values["ranks"] = data
    for name in ("tensor", "pipeline", "context"):
        values["ranks"] *= values.get(name, 1)
    try:
        return Case(text, ParallelConfig(**values, micro_batch_tokens=max(1, budget)), "shuffled" in text.split())
    except ValidationError as error:
        raise LayoutError(f"layout '{text}': {'; '.join(e['msg'] for e in error.errors())}") from None


class LayersUnavailable(ValueError):
    """Transformer Engine was asked for where it cannot run."""


def choose_layers(asked: Literal["auto", "own", "transformer_engine"]) -> LayerKind:
    """Transformer Engine's layers on a GPU where it is installed, else ours; what was asked for, if it can run.

    Raises:
        LayersUnavailable: ``transformer_engine`` without the package or without a CUDA device.
    """
    installed = importlib.util.find_spec("transformer_engine") is not None
    usable = installed and torch.cuda.is_available()
    if asked == "transformer_engine" and not usable:
        lacking = "no CUDA device" if installed else "the package transformer-engine is not installed"
        raise LayersUnavailable(f"parallel.layers is 'transformer_engine', but {lacking}; set it to auto or own")
    if asked == "auto":
        return "transformer_engine" if usable else "own"
    return asked


def batch_layout(parallel: ParallelConfig, hf: Mapping[str, Any]) -> BatchLayout:
    """How this layout wants its rows, balanced by what a model with HF config ``hf`` computes."""
    shape = Shape.of(hf)
    return BatchLayout(
        data_ranks=parallel.data,
        budget_tokens=parallel.micro_batch_tokens,
        alignment=2 * parallel.context * parallel.tensor,
        sequence_alignment=2 * parallel.context if parallel.context > 1 else 1,
        rows_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        fixed_length=parallel.overlap_tensor,
        cost=SequenceCost.of_decoder(shape.multiplied_weights, shape.attention_width),
    )
