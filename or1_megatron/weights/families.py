"""The known model families; reads an HF folder's config, and refuses models and settings that are not supported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from or1_megatron.weights.deepseek_v3 import DEEPSEEK_V3
from or1_megatron.weights.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from or1_megatron.weights.glm4_moe import GLM4_MOE
from or1_megatron.weights.gpt_oss import GPT_OSS
from or1_megatron.weights.qwen3_moe import QWEN3_MOE
from or1_megatron.weights.qwen3_next import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from or1_megatron.weights.rope import rope_conflicts
from or1_megatron.weights.table import HFConfig, ModelFamily
from or1_verify.errors import UserError

FAMILIES: dict[str, ModelFamily] = {
    family.architecture: family
    for family in (
        *(QWEN2, QWEN3, LLAMA, MISTRAL, QWEN3_MOE, GLM4_MOE, DEEPSEEK_V3),
        *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, GPT_OSS),
    )
}

_NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
    "max_position_embeddings",
)


class ModelError(UserError, ValueError):
    """A model folder cannot be used. The message names the file or key, what was found and what was expected."""


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read config.json of an HF folder.

    Raises:
        ModelError: the folder or file does not exist, is not JSON, or lacks a key that every decoder needs; or
            ``family_of`` refuses the model.
    """
    path = folder / "config.json"
    if not folder.is_dir():
        hub = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(folder))
        get = f"; if it is a model on the hub: hf download {folder} --local-dir {folder}" if hub else ""
        raise ModelError(f"model folder {folder} does not exist; expected an HF folder with config.json{get}")
    if not path.is_file():
        raise ModelError(f"{path} is missing; expected an HF folder of a whole model{what_holds(folder)}")
    try:
        hf: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(hf, dict):
        raise ModelError(f"{path} holds the JSON of a {type(hf).__name__}; expected that of an object")
    family = _named(hf)
    hf = {**family.defaults, **hf}
    heads = hf.get("num_attention_heads")
    if hf.get("num_key_value_heads", None if family is LLAMA else 0) is None:
        hf["num_key_value_heads"] = heads  # as transformers reads it: no groups
    if missing := [key for key in _NEEDED if not isinstance(hf.get(key), int | float) or hf[key] <= 0]:
        expected = "expected the config of a decoder-only language model, with a number above 0 for each"
        raise ModelError(f"{path} lacks {', '.join(missing)}; {expected}")
    family_of(hf)
    return hf


def what_holds(folder: Path) -> str:
    """Return a clause for an error message: what the folder holds instead of a model."""
    held = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    merge = "; merge the adapter into its base model first" if "adapter_model" in held else ""
    return f"; it holds {held}{merge}"


def family_of(hf: HFConfig) -> ModelFamily:
    """Return the family that ``architectures`` names.

    Raises:
        ModelError: the architecture is unknown (the message lists the known ones), or the config has settings that are
            not supported, such as quantised weights, a kind of RoPE scaling or a sliding window (all are listed).
    """
    family = _named(hf)
    if conflicts := [*_quantised(hf), *rope_conflicts(hf), *family.conflicts(hf)]:
        raise ModelError(f"this {family.architecture} cannot be trained here: {'; '.join(conflicts)}")
    return family


def _named(hf: HFConfig) -> ModelFamily:
    architecture = (hf.get("architectures") or ["(none)"])[0]
    if architecture not in FAMILIES:
        text = architecture.replace("ForConditionalGeneration", "ForCausalLM")
        inside = "; its text model alone can be trained: docs/converting.md takes it out" if text in FAMILIES else ""
        raise ModelError(f"architecture {architecture} is not supported; known: {', '.join(sorted(FAMILIES))}{inside}")
    return FAMILIES[architecture]


def _quantised(hf: HFConfig) -> Iterator[str]:
    for key in ("quantization_config", "quantization"):  # the second is MLX's
        if settings := hf.get(key):
            method = settings.get("quant_method", settings) if isinstance(settings, dict) else settings
            how = " (docs/adding_a_model.md says how to make them)" if method == "mxfp4" else ""
            yield (
                f"the weights are quantised ({method}): config.json has {key}; expected weights in bf16 or fp32, "
                f"without that key{how}"
            )


def known_family(hf: HFConfig) -> ModelFamily | None:
    """Return the family that ``architectures`` names, whatever its settings; None for an unknown architecture."""
    return FAMILIES.get((hf.get("architectures") or ["(none)"])[0])
