"""Duplicates by meaning, where a recipe asks for it: cosine similarity of a local model's embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from or1_megatron.data.pipeline.duplicates import DuplicateStep
from or1_megatron.data.pipeline.recipe import EmbeddingConfig
from or1_megatron.data.pipeline.records import read_column
from or1_megatron.types import Float32Array
from or1_verify.problems.rows import DataError

if TYPE_CHECKING:
    import torch

Embed = Callable[[Sequence[str]], Float32Array]
"""Texts to unit vectors [texts, dimension]."""

_BLOCK_ROWS = 4096
_LONGEST_TOKENS = 512


class EmbeddingDuplicates(DuplicateStep[EmbeddingConfig]):
    """Compares every pair of the chosen abilities, block by block: N² / 2 products of vectors.

    The vectors are in memory in half precision: 1M problems of dimension 768 are 1.5 GB.
    """

    name = "embedding_duplicates"
    reason = "embedding_duplicate"
    code = ("data/pipeline/embedding.py", "data/pipeline/duplicates.py")
    without_effect = frozenset({"batch"})

    def _find(self, shards: Sequence[Path]) -> dict[int, tuple[int, float]]:
        numbers, blocks = [], []
        embed: Embed | None = None
        for texts, rows in self._chosen(shards):
            embed = embed or load_embedder(self._config)
            numbers.append(rows)
            blocks.append(embed(texts).astype(np.float16))
        if not blocks:
            return {}
        vectors, rows = np.concatenate(blocks), np.concatenate(numbers)
        found: dict[int, tuple[int, float]] = {}
        for place, (original, similarity) in _first_alike(vectors, self._config.threshold).items():
            found[int(rows[place])] = (int(rows[original]), similarity)
        return found

    def _chosen(self, shards: Sequence[Path]) -> Iterator[tuple[list[str], np.ndarray]]:
        first = 0
        for shard in shards:
            for abilities, statements in read_column(shard, ("ability", "statement"), self._config.batch):
                places = [n for n, ability in enumerate(abilities) if ability in self._config.abilities]
                if places:
                    yield [statements[n] for n in places], first + np.array(places)
                first += len(abilities)


def _first_alike(vectors: np.ndarray, threshold: float) -> dict[int, tuple[int, float]]:
    """Return place -> (the most similar earlier place that stays, cosine), where the threshold is reached."""
    found: dict[int, tuple[int, float]] = {}
    stays = np.ones(len(vectors), dtype=bool)
    for start in range(0, len(vectors), _BLOCK_ROWS):
        block = vectors[start : start + _BLOCK_ROWS].astype(np.float32)
        best = np.full(len(block), -1.0, dtype=np.float32)
        best_at = np.full(len(block), -1)
        for other in range(0, start, _BLOCK_ROWS):
            cosines = block @ vectors[other : other + _BLOCK_ROWS].astype(np.float32).T
            cosines[:, ~stays[other : other + _BLOCK_ROWS]] = -1.0
            at = cosines.argmax(axis=1)
            value = cosines[np.arange(len(block)), at]
            better = value > best
            best[better], best_at[better] = value[better], other + at[better]
        own = block @ block.T
        for row in range(len(block)):  # within the block one after another, since who stays depends on those before
            earlier = np.where(stays[start : start + row], own[row, :row], -1.0)
            if row and earlier.max() > best[row]:
                best[row], best_at[row] = earlier.max(), start + int(earlier.argmax())
            if best[row] >= threshold:
                stays[start + row] = False
                found[start + row] = (int(best_at[row]), float(best[row]))
    return found


def load_embedder(config: EmbeddingConfig) -> Embed:
    """Load the model. Raises DataError when it or its library is not there."""
    if not config.model.is_dir():
        raise DataError(f"duplicates.embedding.model: {config.model}: no such folder; expected a local model")
    if config.backend == "sentence_transformers":
        return _sentence_transformers(config)
    import torch
    from transformers import AutoModel, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(config.model, local_files_only=True)
        model = AutoModel.from_pretrained(config.model, local_files_only=True).eval()
    except (OSError, ValueError) as error:
        raise DataError(f"duplicates.embedding.model: {config.model} cannot be loaded: {error}") from None
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return lambda texts: _mean_pooled(texts, tokenizer, model)


def _mean_pooled(texts: Sequence[str], tokenizer: Any, model: Any) -> Float32Array:
    import torch

    coded = tokenizer(list(texts), padding=True, truncation=True, max_length=_LONGEST_TOKENS, return_tensors="pt")
    inputs = {name: coded[name].to(model.device) for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        hidden: torch.Tensor = model(**inputs).last_hidden_state.float()
    weights = inputs["attention_mask"][..., None].to(hidden.dtype)
    mean = (hidden * weights).sum(dim=1) / weights.sum(dim=1)
    return torch.nn.functional.normalize(mean, dim=-1).cpu().numpy()


def _sentence_transformers(config: EmbeddingConfig) -> Embed:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise DataError(
            "duplicates.embedding.backend: sentence_transformers is not installed: pip install sentence-transformers, "
            "or set backend: transformers, which mean-pools the same model"
        ) from None
    try:
        model = SentenceTransformer(str(config.model), local_files_only=True)
    except Exception as error:  # its type depends on what is missing
        raise DataError(f"duplicates.embedding.model: {config.model} cannot be loaded: {error}") from None

    def embed(texts: Sequence[str]) -> Float32Array:
        return model.encode(list(texts), normalize_embeddings=True, convert_to_numpy=True)

    return embed
