"""Writes a model as an HF folder: safetensors shards, their index, config and tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from or1_megatron.errors import AgreedError
from or1_megatron.weights.files import INDEX, drafts

CARRIED = (  # a model's files that do not depend on its weights
    *("config.json", "generation_config.json", "tokenizer*.json", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*.model", "*.tiktoken"),
    *("*.jinja", "additional_chat_templates/*.jinja"),
)


class ExportError(AgreedError, OSError):
    """The HF folder could not be written."""


class HFWriter:
    """Writes tensors as safetensors shards to a folder beside the target; ``finish`` renames this folder to the target.

    Args:
        source: the HF folder whose config, tokenizer, chat template, generation config and multi-token prediction
            layers are copied.
        target: the folder to make; an older folder there is replaced.
        shard_bytes: most bytes of tensors in a file, unless one tensor alone has more.

    If a method cannot write, it deletes the unfinished folder and raises ExportError.
    """

    def __init__(self, source: Path, target: Path, shard_bytes: int = 4 << 30) -> None:
        self._source, self._target, self._shard_bytes = source, target, shard_bytes
        self._aside = target.with_name(target.name + ".partial")
        shutil.rmtree(self._aside, ignore_errors=True)
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor under its HF name. Do not change the tensor before ``finish``: a host tensor is not copied."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            with self._writing():
                self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += size
        self._total_bytes += size
        self._dtype = tensor.dtype

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self._aside, ignore_errors=True)
            raise ExportError(
                f"the model could not be exported to {self._target}: {error}. The checkpoints are intact: when "
                "there is room, the same command exports it"
            ) from error

    def _flush(self) -> None:
        self._aside.mkdir(parents=True, exist_ok=True)
        path = self._aside / f"shard-{len(self._shards)}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        with path.open("rb") as file:
            os.fsync(file.fileno())
        self._shards.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self, adapters: Callable[[Path], None] | None = None) -> None:
        """Write the remaining tensors, name the files as HF does, copy the model's other files, rename the folder.

        ``adapters``: a function that makes a folder at the given path and writes LoRA's adapters there.
        """
        with self._writing():
            self._finish(adapters)

    def _finish(self, adapters: Callable[[Path], None] | None) -> None:
        dtype = self._dtype
        for name, tensor in drafts(self._source):
            self.add(name, tensor)
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shards):
            file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._aside / f"shard-{i}.safetensors").rename(self._aside / file)
            weight_map.update(dict.fromkeys(names, file))
        for pattern in CARRIED:
            for path in self._source.glob(pattern):
                copy = self._aside / path.relative_to(self._source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy2(path, copy)
        if count > 1:
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self._aside / INDEX).write_text(json.dumps(index, indent=2))
        record_dtype(self._aside, dtype)
        if adapters is not None:
            adapters(self._aside / "adapter")
        shutil.rmtree(self._target, ignore_errors=True)
        self._aside.rename(self._target)


def record_dtype(folder: Path, dtype: torch.dtype) -> None:
    """Write the weights' dtype into a folder's config.json, if the config has a field for the dtype."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    named = dict.fromkeys(config.keys() & {"torch_dtype", "dtype"}, str(dtype).removeprefix("torch."))
    path.write_text(json.dumps({**config, **named}, indent=2) + "\n")
