"""Responses in full, token by token, for the rows of a page that show them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from or1_megatron.report.page.embedding import packet
from or1_megatron.report.page.rollout_table import BATCH_ROWS
from or1_megatron.report.page.tokens import TokenTexts
from or1_megatron.runtime.rollout_store import open_rollouts

_TEXTS = ("prompt", "response", "ground_truth", "answer", "detail", "versions")
_TOKENS = {"log_probs": "log_prob", "log_prob_differences": "difference", "entropies": "entropy"}


def packets(files: Sequence[Path], rows: pd.DataFrame, tokens: TokenTexts | None) -> dict[int, str]:
    """Return by row index the packet of each response, for ``web/response.js``."""
    columns = [*_TEXTS, "response_token_ids", *_TOKENS]
    packed: dict[int, str] = {}
    for number, of_file in rows.groupby("file"):
        first = 0
        with open_rollouts(files[number]) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                here = of_file["place"][of_file["place"].between(first, first + batch.num_rows - 1)]
                records = batch.take(pa.array(here - first)).to_pylist()
                packed.update(
                    (index, _packed(record, tokens)) for index, record in zip(here.index, records, strict=True)
                )
                first += batch.num_rows
    return packed


def _packed(record: dict[str, Any], tokens: TokenTexts | None) -> str:
    header = {name: record[name] for name in _TEXTS}
    columns: dict[str, NDArray[Any]] = {}
    if tokens is not None:
        header["response"], columns["units"] = tokens.cut(record["response_token_ids"])
    columns |= {
        short: np.array(record[name], np.float32) for name, short in _TOKENS.items() if record[name] is not None
    }
    return packet(header, columns)
