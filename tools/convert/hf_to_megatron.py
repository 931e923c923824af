"""HF folder to Megatron checkpoint: ``or1 convert hf-to-megatron``, for those who look for a script."""

from __future__ import annotations

import typer

from or1_megatron.commands.convert import hf_to_megatron

if __name__ == "__main__":
    typer.run(hf_to_megatron)
