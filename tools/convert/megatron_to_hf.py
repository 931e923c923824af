"""Megatron checkpoint to HF folder: ``or1 convert megatron-to-hf``, for those who look for a script."""

from __future__ import annotations

import typer

from or1_megatron.commands.convert import megatron_to_hf

if __name__ == "__main__":
    typer.run(megatron_to_hf)
