"""Excludes duplicates by meaning, if a recipe asks for it: cosine similarity of a local model's embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from or1_megatron.data.pipeline.duplicates import DuplicateStep, Repeats, numbered
from or1_megatron.data.pipeline.recipe import EmbeddingConfig
from or1_megatron.types import Float32Array
from or1_verify.problems.rows import DataError

if TYPE_CHECKING:
    import torch

_BATCH_TEXTS = 64
_LONGEST_TOKENS = 512


class EmbeddingDuplicates(DuplicateStep[EmbeddingConfig]):
    """Excludes problems of the chosen abilities whose embedding is close to that of an earlier problem that stays.

    N problems take N^2 / 2 products of vectors. All vectors are in memory; 100,000 of dimension 768 take 300 MB.
    """

    name = "embedding_duplicates"
    reason = "embedding_duplicate"

    def _find(self, shards: Sequence[Path]) -> Repeats:
        chosen = [
            (row, statement)
            for row, (ability, statement) in numbered(shards, ("ability", "statement"))
            if ability in self._config.abilities
        ]
        if not chosen:
            return {}
        rows, texts = zip(*chosen, strict=True)
        alike = first_alike(embed(self._config.model, texts), self._config.threshold)
        return {rows[repeat]: (rows[original], similarity) for repeat, (original, similarity) in alike.items()}


def first_alike(vectors: Float32Array, threshold: float) -> Repeats:
    """Return row -> (most similar earlier row that stays, cosine) for the rows whose cosine reaches ``threshold``.

    Args:
        vectors: [rows, dimension], each of length 1.
    """
    repeats: dict[int, tuple[int, float]] = {}
    staying, stay = np.empty_like(vectors), list[int]()
    for row, vector in enumerate(vectors):
        cosines = staying[: len(stay)] @ vector
        if stay and cosines.max() >= threshold:
            repeats[row] = (stay[int(cosines.argmax())], float(cosines.max()))
        else:
            staying[len(stay)] = vector
            stay.append(row)
    return repeats


def embed(folder: Path, texts: Sequence[str]) -> Float32Array:
    """Return the texts' embeddings [texts, dimension]: a local model's mean-pooled hidden states, scaled to length 1.

    Raises DataError if the model is missing or cannot be loaded.
    """
    if not folder.is_dir():
        raise DataError(f"duplicates.embedding.model: {folder}: no such folder; expected a local model")
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModel.from_pretrained(folder, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise DataError(f"duplicates.embedding.model: {folder} cannot be loaded: {error}") from None
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    means: list[torch.Tensor] = []
    with torch.no_grad():
        for batch in batched(texts, _BATCH_TEXTS):
            coded = tokenizer(
                list(batch), padding=True, truncation=True, max_length=_LONGEST_TOKENS, return_tensors="pt"
            )
            inputs = {name: coded[name].to(model.device) for name in ("input_ids", "attention_mask")}
            hidden = model(**inputs).last_hidden_state.float()
            weights = inputs["attention_mask"][..., None].to(hidden.dtype)
            means.append((hidden * weights).sum(dim=1) / weights.sum(dim=1))
    return torch.nn.functional.normalize(torch.cat(means), dim=-1).cpu().numpy()
