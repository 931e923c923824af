"""``or1 convert``: converts between HF folders and Megatron checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from or1_megatron.commands.user_errors import report_user_errors

if TYPE_CHECKING:
    import torch

convert = typer.Typer(no_args_is_help=True, help="Convert between HF folders and Megatron checkpoints, on the CPU.")

_Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; as the source, if not given.")]


@convert.command()
def hf_to_megatron(
    hf: Annotated[Path, typer.Option(help="An HF folder: config.json, safetensors.")],
    out: Annotated[Path, typer.Option(help="The checkpoint to make; must not exist.")],
    dtype: _Dtype = None,
) -> None:
    """Convert an HF folder to a Megatron checkpoint, which loads at any parallel layout."""
    with report_user_errors():
        from or1_megatron.convert.to_megatron import hf_to_megatron as run

        run(hf, out, Console(stderr=True), dtype=_dtype(dtype))


@convert.command()
def megatron_to_hf(
    megatron: Annotated[
        Path, typer.Option(help="A converted checkpoint, a run's step_N, or Megatron-LM's torch_dist.")
    ],
    out: Annotated[Path, typer.Option(help="The HF folder to make; must not exist.")],
    hf: Annotated[
        Path | None, typer.Option(help="Where config and tokenizer come from, if the checkpoint does not say.")
    ] = None,
    dtype: _Dtype = None,
) -> None:
    """Convert a Megatron checkpoint to an HF folder that transformers loads."""
    with report_user_errors():
        from or1_megatron.convert.to_hf import megatron_to_hf as run

        run(megatron, out, Console(stderr=True), hf=hf, dtype=_dtype(dtype))


def _dtype(name: str | None) -> torch.dtype | None:
    from or1_megatron.convert.hf_folder import DTYPES

    known = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    if name is not None and name not in known:
        raise typer.BadParameter(f"'{name}' is none of {', '.join(known)}", param_hint="--dtype")
    return known[name] if name is not None else None
