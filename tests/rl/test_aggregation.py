"""Token weights of each aggregation, by hand and against the steps that the released code takes.

That micro-batches are cut as the released code cuts them (largest differencing, by tokens, the same number of responses
on each GPU) is not shown here; docs/recipe.md says how it was compared with its own functions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_batch import sample

from or1_megatron.rl.aggregation import balanced, released_cut, weigh
from or1_megatron.rl.batch import pack
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Sample


def weights_of(samples: list[Sample]) -> list[float | None]:
    return [response.weight for response in samples]


def test_weights_by_hand() -> None:
    """Responses of 1 and 3 tokens (the docstring's), and one of 4 of which none counts: T_k = 4. Response weights 2 and
    2/3. The released rule puts each on a GPU of its own, so its weights are the same; the token mean has none."""
    silent = replace(sample([1], [2, 3, 4, 5]), loss_mask=np.zeros(4, dtype=np.bool_))
    samples = [sample([1], [2]), sample([1], [2, 3, 4]), silent]
    assert weights_of(weigh(samples, "response_mean", 4)) == pytest.approx([2, 2 / 3, 0])
    assert weights_of(weigh(samples, "released-code", 4)) == pytest.approx([2, 2 / 3, 0])
    assert weights_of(weigh(samples, "token_mean", 4)) == [None] * 3


def test_rows_hold_the_weights_of_their_samples() -> None:
    """Sample i weighs i + 1, wherever its row is; without weights the rows have none."""
    samples = [replace(sample([1], [2] * (i + 1)), weight=i + 1.0) for i in range(5)]
    for layout in (BatchLayout(1, 64, 1), BatchLayout(2, 8, 2)):
        for row in (row for rank in pack(samples, layout).ranks for row in rank):
            assert row.weights is not None
            for k, index in enumerate(row.sample_index):
                part = slice(row.cu_seqlens[k], row.cu_seqlens[k + 1])
                assert row.weights[part][row.loss_mask[part]].tolist() == [index + 1.0] * (index + 1)
    bare = [replace(response, weight=None) for response in samples]
    assert pack(bare, BatchLayout(1, 64, 1)).ranks[0][0].weights is None
    with pytest.raises(ValueError, match="4 of 5 samples have weight; expected all or none"):
        pack([*samples[:4], replace(samples[4], weight=None)], BatchLayout(1, 64, 1))


def test_aggregations_are_the_means_they_say() -> None:
    """Losses 5 (one token) and 1, 2, 3: response mean (5 + 2) / 2, by the weighted sum over T_k."""
    short, long = weigh([sample([1], [2]), sample([1], [2, 3, 4])], "response_mean", 3)
    assert short.weight is not None and long.weight is not None
    assert (5 * short.weight + 6 * long.weight) / 4 == pytest.approx(3.5)


def test_the_released_rule_against_its_own_steps() -> None:
    """Recomputed in float64 as the released code goes about it, by autograd on one number per token: each GPU sums
    (token mean of a micro-batch) * R_m / (its share of the configured mini-batch), and gradients are averaged over the
    GPUs. With 4096 responses of 4096 configured the gradient is ours; with 4096 of 8192 it is half of ours."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(64, rng.lognormal(3, 0.8, 4096).astype(int) + 1)
    samples = [sample([1] * int(p), [2] * int(n)) for p, n in zip(rng.integers(1, 9, 4096), lengths, strict=True)]
    whole = np.array([response.prompt_ids.size + response.response_ids.size for response in samples])
    ours = weigh(samples, "released-code", 64)
    cut, gpus = released_cut(whole, 64 + 3048), 32
    per_gpu = len(cut) // gpus
    assert len(cut) == per_gpu * gpus and per_gpu > 1
    losses = [torch.full((int(n),), float(n), dtype=torch.float64, requires_grad=True) for n in lengths]
    for configured in (4096, 8192):
        of_gpus = [
            sum(
                torch.cat([losses[i] for i in part]).mean() * len(part) / (configured / gpus)
                for part in cut[gpu * per_gpu : (gpu + 1) * per_gpu]
            )
            for gpu in range(gpus)
        ]
        gradients = torch.autograd.grad(torch.stack(of_gpus).mean(), losses)
        for response, gradient in zip(ours, gradients, strict=True):
            assert response.weight is not None
            expected = response.weight / lengths.sum() * 4096 / configured
            assert gradient.tolist() == pytest.approx([expected] * len(gradient), rel=1e-9)


def test_the_released_cut() -> None:
    """Every sample is in one micro-batch, GPUs differ by at most one sample, those of a GPU hold nearly equally many
    tokens and so hardly more than the budget; with fewer samples than GPUs each has its own."""
    lengths = np.minimum(8192, np.random.default_rng(2).lognormal(8.5, 0.7, 1023).astype(np.int64))
    cut = released_cut(lengths, 11_240)
    assert sorted(i for part in cut for i in part) == list(range(1023))
    sums = np.array([lengths[part].sum() for part in cut])
    per_gpu = len(cut) // 32
    assert len(cut) == 32 * per_gpu and sums.max() < 1.25 * 11_240
    counts = [sum(len(part) for part in cut[gpu * per_gpu : (gpu + 1) * per_gpu]) for gpu in range(32)]
    assert set(counts) == {31, 32}
    assert sorted(released_cut(np.array([5, 9, 7]), 100)) == [[0], [1], [2]]
    one_long = released_cut(np.array([90, 1, 2, 3, 4, 5, 6, 7]), 1000, gpus=2)
    assert [len(part) for part in one_long] == [4, 4]


@pytest.mark.parametrize(
    ("sizes", "parts", "sums"),
    [
        ([8, 7, 6, 5, 4], 2, [14, 16]),  # Karmarkar and Karp's own example; the best would be 15 and 15
        ([9, 7, 5, 4], 3, [7, 9, 9]),  # (9, 7, 0), (9, 7, 5), then 4 to the 5
        ([3], 4, [0, 0, 0, 3]),
    ],
)
def test_largest_differencing(sizes: list[int], parts: int, sums: list[int]) -> None:
    split = balanced(np.array(sizes), parts)
    assert sorted(i for part in split for i in part) == list(range(len(sizes)))
    assert sorted(sum(sizes[i] for i in part) for part in split) == sums


def test_largest_differencing_with_equal_counts_by_hand() -> None:
    """Neighbours (1, 2), (3, 9): the wider pair is taken first, and its 9 meets the 1. Sums 10 and 5."""
    assert sorted(map(sorted, balanced(np.array([1, 9, 2, 3]), 2, same_count=True))) == [[0, 1], [2, 3]]
