"""Parses parallel layouts as users write them (``TP2 PP2 SP``); chooses between Transformer Engine's layers and ours.

This module also says how each layout packs sequences into rows. It imports no Megatron.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from or1_megatron.config.schema import ParallelConfig
from or1_megatron.rl.packing import BatchLayout, SequenceCost
from or1_megatron.types import Aggregation
from or1_megatron.weights.shape import Shape
from or1_verify.errors import UserError

LayerKind = Literal["own", "transformer_engine"]

_SIZES: Final = {"TP": "tensor", "PP": "pipeline", "VPP": "virtual_pipeline", "CP": "context", "EP": "expert"}
_WORDS: Final[dict[str, dict[str, Any]]] = {
    "1": {},
    "SP": {"sequence": True},
    "distopt": {"distributed_optimizer": True},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "one_pass": {"head": "one_pass"},
    "overlap": {"overlap_grad_reduce": True},
    "shuffled": {},
    "response_mean": {},
}
HELP: Final = (
    "TPn PPn VPPn CPn DPn EPn SP distopt; selective or full (recompute); one_pass (head); overlap; "
    "bucketsN (overlap, in buckets of N parameters); "
    "layers=3+1 (per chunk); rowsN (token budget); shuffled (samples in another order); response_mean (aggregation of "
    "the loss); 1 for none of them"
)


class LayoutError(UserError, ValueError):
    """The text of a parallel layout has unknown or contradictory words."""


@dataclass(frozen=True)
class Case:
    """One way to compute a batch: a parallel layout, an order of samples and an aggregation of the loss."""

    name: str
    parallel: ParallelConfig
    shuffled: bool = False
    aggregation: Aggregation = "token_mean"

    def order(self, samples: int) -> list[int]:
        """Return the indices of ``samples`` samples in the order in which they go into the batch."""
        indices = np.arange(samples)
        return [int(i) for i in (np.random.default_rng(3).permutation(indices) if self.shuffled else indices)]


def parse_layout(text: str, longest: int) -> Case:
    """Parse a layout: words of ``HELP``, separated by blanks. Packed rows hold 4 * ``longest`` tokens by default.

    Raises:
        LayoutError: a word is unknown, words contradict each other, or rows are shorter than the longest sequence.
    """
    values: dict[str, Any] = {"distributed_optimizer": False}
    data, budget = 1, 4 * longest
    for word in text.split():
        sized = re.fullmatch(r"(TP|PP|VPP|CP|DP|EP|rows|buckets)(\d+)", word)
        if word in _WORDS:
            values |= _WORDS[word]
        elif sized and sized[1] == "DP":
            data = int(sized[2])
        elif sized and sized[1] == "rows":
            budget = int(sized[2])
        elif sized and sized[1] == "buckets":
            values |= {"grad_bucket_size": int(sized[2]), "overlap_grad_reduce": True}
        elif sized:
            values[_SIZES[sized[1]]] = int(sized[2])
        elif re.fullmatch(r"layers=\d+(\+\d+)*", word):
            values["layers_per_stage"] = tuple(int(n) for n in word.removeprefix("layers=").split("+"))
        else:
            raise LayoutError(f"layout '{text}': '{word}' is not known; expected {HELP}")
    if budget < longest:
        raise LayoutError(f"layout '{text}': rows of {budget} tokens do not hold the longest sequence, {longest}")
    values["ranks"] = data
    for name in ("tensor", "pipeline", "context"):
        values["ranks"] *= values.get(name, 1)
    try:
        parallel = ParallelConfig(**values, micro_batch_tokens=budget)
    except ValidationError as error:
        raise LayoutError(f"layout '{text}': {'; '.join(e['msg'] for e in error.errors())}") from None
    aggregation: Aggregation = "response_mean" if "response_mean" in text.split() else "token_mean"
    return Case(text, parallel, "shuffled" in text.split(), aggregation)


class LayersUnavailable(UserError, ValueError):
    """The config asks for Transformer Engine, which cannot run here."""


class ChosenLayers(NamedTuple):
    """The implementation of linear layers, norms and attention that a run uses."""

    kind: LayerKind
    warning: str
    """Why our layers are used on a GPU that could run Transformer Engine's; "" in all other cases."""


def choose_layers(parallel: ParallelConfig, dtype: str) -> ChosenLayers:
    """Choose the layers that ``parallel.layers`` names, else Transformer Engine's if possible, else ours.

    Transformer Engine's layers need a GPU, an import that succeeds, and bfloat16 (fast attention takes no float32).

    Raises:
        LayersUnavailable: ``parallel.layers`` asks for Transformer Engine's layers, which cannot run.
    """
    if parallel.layers == "own":
        return ChosenLayers("own", "")
    broken = why_no_transformer_engine()
    unsuited = "" if torch.cuda.is_available() else "there is no CUDA device"
    if dtype != "bfloat16":
        unsuited = unsuited or f"model.dtype is {dtype}, and it wants bfloat16"
    lacking = broken or unsuited
    if lacking and parallel.layers == "transformer_engine":
        raise LayersUnavailable(f"parallel.layers is 'transformer_engine', but {lacking}; set it to auto or own")
    if not lacking:
        return ChosenLayers("transformer_engine", "")
    warning = f"parallel.layers is auto: our own, slower layers are used, as {broken}"
    return ChosenLayers("own", "" if unsuited else warning)


@functools.cache
def why_no_transformer_engine() -> str:
    """Import Transformer Engine, and return why the import fails; empty if the import succeeds.

    ``import transformer_engine`` succeeds without the PyTorch part, so this function imports the PyTorch part. If that
    import fails, the package is hidden from the process: Megatron imports it too, and fails on any error except
    ImportError.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return "the package transformer-engine is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # OSError, AssertionError and RuntimeError as well as ImportError
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        return f"the installed transformer-engine cannot be imported ({type(error).__name__}: {error})"
    return ""


def batch_layout(parallel: ParallelConfig, hf: Mapping[str, Any]) -> BatchLayout:
    """Return how a parallel layout packs sequences into rows, balanced by the cost of a model with HF config ``hf``."""
    return rows_of(parallel, Shape.of(hf))


def rows_of(parallel: ParallelConfig, shape: Shape) -> BatchLayout:
    """Return how a parallel layout packs sequences into rows, balanced by the cost of a model of this shape."""
    return BatchLayout(
        data_ranks=parallel.data,
        budget_tokens=parallel.micro_batch_tokens,
        alignment=2 * parallel.context * parallel.tensor,
        sequence_alignment=2 * parallel.context if parallel.context > 1 else 1,
        rows_multiple=parallel.pipeline if parallel.virtual_pipeline > 1 else 1,
        cost=SequenceCost.of_decoder(shape.multiplied_weights, shape.attention_width),
    )
