"""Checks the safetensors files of an HF folder against its config: reads their headers, loads no tensor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from or1_megatron.weights.families import ModelError, family_of, what_holds
from or1_megatron.weights.stacked_experts import file_shapes
from or1_megatron.weights.table import EMBEDDING, OUTPUT, HFConfig, tied

INDEX = "model.safetensors.index.json"
"""The file of an HF folder that says which safetensors file holds each tensor."""
_WHOLE = "model.safetensors"
_LFS_POINTER = b"version https://git-lfs"
DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes of weights, as a safetensors file names them."""
(_EMBEDDING,), (_OUTPUT,) = EMBEDDING.hf, OUTPUT.hf


def check_weight_files(folder: Path, hf: HFConfig) -> None:
    """Check that ``folder`` holds exactly the tensors that the config implies, complete and in the implied shapes.

    Raises:
        ModelError: the folder does not fit the config, or the architecture is unknown. The message names the file, or
            the tensor with what was found and what was expected.
    """
    family = family_of(hf)
    wanted = file_shapes(family.shapes(hf))
    stored: dict[str, tuple[Path, Any]] = {}
    for path in weight_files(folder):
        file = open_weights(path)
        if twice := sorted(stored.keys() & set(file.keys())):
            raise ModelError(f"{twice[0]} is in {stored[twice[0]][0]} and in {path}; expected it in one file")
        stored |= {name: (path, file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
    for name, (path, tensor) in stored.items():
        if (dtype := tensor.get_dtype()) not in DTYPES:
            raise ModelError(
                f"{path}: the weights are quantised: {name} is of dtype {dtype}; expected {', '.join(DTYPES)}"
            )
    for name, shape in wanted.items():
        if name not in stored:
            missing = len(wanted.keys() - stored.keys())
            raise ModelError(f"{folder}: its safetensors lack {name} ({missing} of {len(wanted)} tensors are missing)")
        path, tensor = stored[name]
        if (there := tuple(tensor.get_shape())) != shape:
            raise ModelError(f"{path}: {name} has shape {there}; config.json implies {shape}")
    # A tied model's files may hold the output layer too, and old files hold RoPE's frequencies.
    extra = {_OUTPUT} if tied(hf) else set()
    others = stored.keys() - wanted.keys() - extra
    unknown = sorted(name for name in others if not name.endswith("inv_freq") and not is_draft(name, hf))
    if unknown:
        raise ModelError(f"{stored[unknown[0]][0]}: {unknown[0]} is no tensor of a {family.architecture}")
    if tied(hf) and _OUTPUT in stored and not _same_bytes(stored[_OUTPUT][0], stored[_EMBEDDING][0]):
        raise ModelError(
            f"{folder}: config.json ties word embeddings, but {_OUTPUT} is not {_EMBEDDING}; set tie_word_embeddings "
            "to false if the two are meant to differ"
        )


def is_draft(name: str, hf: HFConfig) -> bool:
    """Return whether a tensor belongs to the multi-token-prediction layers, with which engines draft tokens. They are
    the ``num_nextn_predict_layers`` layers after the last decoder layer; in Qwen3-Next and Qwen3.5 their names start
    with ``mtp.``. These layers are not trained, and exports copy their tensors unchanged."""
    if name.startswith("mtp.") and "linear_conv_kernel_dim" in hf:
        return True
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return match is not None and 0 <= int(match[1]) - hf["num_hidden_layers"] < (
        hf.get("num_nextn_predict_layers") or 0
    )


def drafts(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for the multi-token-prediction layers of an HF folder (``is_draft``)."""
    hf = json.loads((folder / "config.json").read_text())
    may_have = hf.get("num_nextn_predict_layers") or "linear_conv_kernel_dim" in hf
    for path in weight_files(folder) if may_have else ():
        with safe_open(path, framework="pt") as file:
            yield from ((name, file.get_tensor(name)) for name in file.keys() if is_draft(name, hf))  # noqa: SIM118


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers and vLLM read: the files that the index names, or model.safetensors.

    If there is neither, return all *.safetensors except adapters and Mistral's consolidated files.

    Raises:
        ModelError: a file is missing, the index is unreadable, or transformers and vLLM would read different files.
    """
    index, whole = folder / INDEX, folder / _WHOLE
    if index.is_file():
        try:
            named = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelError(f"{index} cannot be read ({error!r}); expected a JSON object with weight_map") from error
        if missing := [name for name in named if not (folder / name).is_file()]:
            raise ModelError(
                f"{folder / missing[0]} is missing ({len(missing)} of {len(named)} files that {INDEX} names): "
                "the download may be incomplete"
            )
        if whole.is_file() and _WHOLE not in named:
            raise ModelError(
                f"{folder} holds {_WHOLE}, which transformers reads, and {INDEX}, whose files vLLM reads; "
                "remove the one that is not the model"
            )
        return [folder / name for name in named]
    if whole.is_file():
        return [whole]
    others = ("consolidated", "adapter_model")
    paths = [path for path in sorted(folder.glob("*.safetensors")) if not path.name.startswith(others)]
    if not paths:
        raise ModelError(f"{folder} lacks model.safetensors or its index; expected the weights so{what_holds(folder)}")
    return paths


def base_digest(folder: Path) -> str:
    """Return a digest of all tensors' names, dtypes, shapes and first rows, which are quick to read."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                first = file.get_slice(name)[:1]
                digest.update(f"{name} {first.dtype} {file.get_slice(name).get_shape()}".encode())
                digest.update(first.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _same_bytes(one: Path, other: Path) -> bool:
    """Return whether the output layer in ``one`` and the embedding in ``other`` have equal dtype, shape and bytes."""
    with safe_open(one, framework="pt") as first, safe_open(other, framework="pt") as second:
        output, embedding = first.get_tensor(_OUTPUT), second.get_tensor(_EMBEDDING)  # pages of the files
    same_form = (output.dtype, output.shape) == (embedding.dtype, embedding.shape)
    return same_form and torch.equal(output.view(torch.uint8), embedding.view(torch.uint8))


def is_lfs_pointer(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_LFS_POINTER)) == _LFS_POINTER


def open_weights(path: Path) -> Any:
    """Open a safetensors file, mapped into memory. The library checks the header against the file's size.

    Raises:
        ModelError: the file cannot be read, or is not a complete safetensors file.
    """
    if is_lfs_pointer(path):
        raise ModelError(f"{path} is a Git LFS pointer, not the weights: run git lfs pull, or hf download")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path} is no safetensors file, or cut: it has {path.stat().st_size} bytes; the download may be "
            f"incomplete ({error})"
        ) from error
