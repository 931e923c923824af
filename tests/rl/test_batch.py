"""Packing: an example worked by hand, properties of any input, and that the cut does not change the gradient. Token
weights of each aggregation, by hand and against the steps that the released code takes.

These do not prove that a real model keeps packed sequences apart: that is the policy's own test. How well rows are
filled and balanced is test_packing's. That micro-batches are cut as the released code cuts them (largest differencing,
by tokens, the same number of responses on each GPU) is not shown here; docs/recipe.md says how it was compared with its
own functions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import Clock, TablePolicy, TableRollouts, completion, group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from or1_megatron.rl.aggregation import balanced, released_cut, weigh
from or1_megatron.rl.batch import make_batches, pack, real_tokens, split, to_samples
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import AdvantagedGroup, Aggregation, MicroBatch, Sample


def sample(prompt: list[int], response: list[int], advantage: float = 0.0, mask: list[bool] | None = None) -> Sample:
    """Log-probs -1, -2, ... along the response."""
    return Sample(
        np.array(prompt, dtype=np.int32),
        np.array(response, dtype=np.int32),
        advantage,
        np.array([True] * len(response) if mask is None else mask, dtype=np.bool_),
        -np.arange(1, len(response) + 1, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("sequence_alignment", "position_ids", "cu_seqlens"), [(1, [0, 1, 2, 3, 0, 1], [0, 4, 6]), (3, [*range(6)], [0, 6])]
)
def test_docstring_example(sequence_alignment: int, position_ids: list[int], cu_seqlens: list[int]) -> None:
    """With an alignment of sequences to 3 the sequence itself reaches to 6."""
    layout = BatchLayout(data_ranks=1, budget_tokens=6, alignment=6, sequence_alignment=sequence_alignment)
    batch = pack([sample([5, 6], [7, 8], 0.5)], layout)
    ((row,),) = batch.ranks
    np.testing.assert_array_equal(row.token_ids, [5, 6, 7, 8, 0, 0])
    np.testing.assert_array_equal(row.target_ids, [6, 7, 8, 0, 0, 0])
    np.testing.assert_array_equal(row.position_ids, position_ids)
    np.testing.assert_array_equal(row.cu_seqlens, cu_seqlens)
    np.testing.assert_array_equal(row.loss_mask, [0, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(row.advantages, [0, 0.5, 0.5, 0, 0, 0])
    np.testing.assert_array_equal(row.engine_log_probs, [0, -1, -2, 0, 0, 0])
    np.testing.assert_array_equal(row.sample_index, [0])
    np.testing.assert_array_equal(row.lengths, [4])
    assert (batch.token_count, batch.sample_count, real_tokens(batch)) == (2, 1, 4)


def test_two_sequences_fill_a_row_without_padding() -> None:
    """The last position of the first predicts nothing: its target is not the second's first token."""
    batch = pack([sample([1], [2, 3]), sample([4], [5])], BatchLayout(1, 5, 1))
    ((row,),) = batch.ranks
    np.testing.assert_array_equal(row.token_ids, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(row.target_ids, [2, 3, 0, 5, 0])
    np.testing.assert_array_equal(row.position_ids, [0, 1, 2, 0, 1])
    np.testing.assert_array_equal(row.cu_seqlens, [0, 3, 5])
    np.testing.assert_array_equal(row.loss_mask, [1, 1, 0, 1, 0])


SAMPLES = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 14)), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    SAMPLES,
    st.integers(1, 4),
    st.integers(20, 64),
    st.sampled_from([(1, 1), (2, 1), (4, 4), (8, 1), (8, 4), (6, 3)]),
    st.randoms(),
)
def test_properties(
    shapes: list[tuple[int, int]], ranks: int, budget: int, alignments: tuple[int, int], random: object
) -> None:
    """Nothing lost, doubled or cut; one row length; equal counts; the budget kept."""
    alignment, sequence_alignment = alignments
    samples = []
    for i, (p, n) in enumerate(shapes):
        tokens = np.arange(p + n) + 100 * i
        mask = [random.random() < 0.9 for _ in range(n)]  # type: ignore[attr-defined]
        samples.append(sample(tokens[:p].tolist(), tokens[p:].tolist(), advantage=i + 0.5, mask=mask))
    layout = BatchLayout(ranks, budget, alignment, sequence_alignment)
    counted = sum(int(s.loss_mask.sum()) for s in samples)
    if counted == 0:
        with pytest.raises(ValueError, match="no counted token"):
            pack(samples, layout)
        return
    batch = pack(samples, layout)
    rows: list[MicroBatch] = [row for rank in batch.ranks for row in rank]
    assert len(batch.ranks) == ranks and len({len(rank) for rank in batch.ranks}) == 1
    (row_tokens,) = {row.token_ids.size for row in rows}
    assert row_tokens % alignment == 0 and row_tokens <= layout.capacity_tokens
    assert sorted(i for row in rows for i in row.sample_index) == list(range(len(samples)))
    assert sum(int(row.loss_mask.sum()) for row in rows) == batch.token_count == counted
    assert real_tokens(batch) == sum(p + n for p, n in shapes)
    for row in rows:
        assert row.cu_seqlens[0] == 0 and row.cu_seqlens[-1] == row_tokens
        assert not (row.cu_seqlens % sequence_alignment).any()
        padded = int(row.cu_seqlens[row.sample_index.size]) < row_tokens
        assert row.cu_seqlens.size == row.sample_index.size + 1 + padded
        for s, i in enumerate(row.sample_index):
            start, end = (int(bound) for bound in row.cu_seqlens[s : s + 2])
            length = int(row.lengths[s])
            assert 0 <= end - start - length < sequence_alignment
            check_sequence(row, samples[i], start, start + length)
            assert row.position_ids[start:end].tolist() == list(range(end - start))
            for values in (row.token_ids, row.target_ids, row.loss_mask, row.advantages, row.engine_log_probs):
                assert not values[start + length : end].any()
        tail = slice(int(row.cu_seqlens[row.sample_index.size]), None)
        assert not row.loss_mask[tail].any()


def check_sequence(row: MicroBatch, of: Sample, start: int, end: int) -> None:
    """Token by token: the response token at ``t`` finds its values at ``t - 1``."""
    tokens = [*of.prompt_ids, *of.response_ids]
    assert row.token_ids[start:end].tolist() == tokens and row.position_ids[start:end].tolist() == list(
        range(len(tokens))
    )
    seen = 0
    for t in range(start, end):
        place = t + 1 - start - of.prompt_ids.size  # of the predicted token in the response
        if not 0 <= place < of.response_ids.size:
            assert not row.loss_mask[t]
            continue
        assert row.target_ids[t] == of.response_ids[place]
        assert row.loss_mask[t] == of.loss_mask[place]
        assert (row.advantages[t], row.engine_log_probs[t]) == (of.advantage, of.engine_log_probs[place])
        seen += 1
    assert seen == of.response_ids.size


@pytest.mark.parametrize("aggregation", ["token_mean", "response_mean"])
def test_gradient_is_the_same_for_every_cut(aggregation: Aggregation) -> None:
    """The global token mean (eq. 3.1) and the mean over responses, of unequal ones, with bonus and KL, in float64,
    under several ranks, budgets and alignments, against a plain loop over samples that knows nothing of rows."""
    rng = np.random.default_rng(3)
    samples = []
    for i in range(13):
        n = int(rng.integers(1, 9))
        made = sample([8 + i % 4], rng.integers(0, 8, n).tolist(), advantage=float(rng.normal()))
        samples.append(replace(made, reference_log_probs=rng.normal(-2, 0.3, n).astype(np.float32)))
    objective = ClippedPolicyLoss(
        0.2, 0.2, entropy_coefficient=0.01, temperature=0.7, on_policy=False, kl_coefficient=0.2
    )
    table = torch.zeros(12, 8, dtype=torch.float64)
    table.copy_(torch.from_numpy(rng.normal(size=(12, 8))))
    total = 0
    oracle = table.clone().requires_grad_()
    losses = []
    for s in samples:
        loss = torch.zeros((), dtype=torch.float64)
        tokens = [*s.prompt_ids.tolist(), *s.response_ids.tolist()]
        for t in range(len(tokens) - 1):
            log_p = (oracle[tokens[t]] / 0.7).log_softmax(-1)
            rho = (log_p[tokens[t + 1]] - float(s.engine_log_probs[t])).exp()
            advantage = float(np.float32(s.advantage))
            loss = loss - torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage)
            loss = loss + 0.01 * (log_p.exp() * log_p).sum()
            behind = float(s.reference_log_probs[t]) - log_p[tokens[t + 1]]
            loss = loss + 0.2 * (behind.exp() - behind - 1)
            total += 1
        losses.append(loss if aggregation == "token_mean" else loss / s.response_ids.size)
    loss = torch.stack(losses).sum() / (total if aggregation == "token_mean" else len(samples))
    loss.backward()
    exact = 1e-12 if aggregation == "token_mean" else 1e-6  # weights are fp32
    for layout in (
        *(BatchLayout(1, 1024, 1), BatchLayout(1, 10, 1), BatchLayout(3, 12, 4), BatchLayout(7, 9, 2)),
        *(BatchLayout(2, 16, 8, sequence_alignment=4), BatchLayout(2, 10, 2, rows_multiple=4)),
    ):
        policy = TablePolicy(4, TableRollouts(Clock()), Clock())
        with torch.no_grad():
            policy.table.copy_(table)
        batch = pack(weigh(samples, aggregation, 8), layout)
        sums = policy.gradient(batch, objective)
        assert batch.token_count == total
        assert sums["loss"] / batch.token_count == pytest.approx(loss.item(), rel=exact)
        torch.testing.assert_close(policy.table.grad, oracle.grad, rtol=exact, atol=1e-14 + exact / 100)


@pytest.mark.parametrize(
    ("groups", "parts", "expected"),
    [
        (7, 3, [[0, 1, 2], [3, 4], [5, 6]]),
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [1]]),
        (3, 1, [[0, 1, 2]]),
        (0, 4, []),
    ],
)
def test_split(groups: int, parts: int, expected: list[list[int]]) -> None:
    assert split(range(groups), parts) == expected


def test_make_batches_keeps_groups_whole_and_repeats_passes() -> None:
    """Three groups of 2 responses of 2 tokens, D_R / D_T = 2, reuse 2: T_k 8, 4, 8, 4."""
    groups = [to_samples(AdvantagedGroup(group_of([1, 0], j=j), np.array([1, -1], dtype=np.float32))) for j in range(3)]
    batches = make_batches(groups, 2, 2, BatchLayout(1, 64, 1), "token_mean", 2)
    assert [batch.token_count for batch in batches] == [8, 4, 8, 4]
    assert [batch.sample_count for batch in batches] == [4, 2, 4, 2]
    assert make_batches([], 2, 2, BatchLayout(1, 64, 1), "token_mean", 2) == []


def test_to_samples_counts_truncated_responses_too() -> None:
    group = group_of([1, 0], truncated=[False, True])
    first, second = to_samples(AdvantagedGroup(group, np.array([1, 0], dtype=np.float32)))
    assert (first.advantage, second.advantage) == (1.0, 0.0)
    assert second.loss_mask.all() and second.loss_mask.size == 2
    np.testing.assert_array_equal(second.engine_log_probs, completion([5, 5]).log_probs)


def test_refusals() -> None:
    layout = BatchLayout(1, 8, 4)
    with pytest.raises(ValueError, match=r"sample 1 has 9 tokens .* budget of 8; raise parallel.micro_batch_tokens"):
        pack([sample([1], [2]), sample([1], [2] * 8)], layout)
    with pytest.raises(ValueError, match="sample 0 has an empty prompt"):
        pack([sample([], [2])], layout)
    with pytest.raises(ValueError, match="0 samples hold no counted token"):
        pack([], layout)


def test_all_log_probs_lie_where_their_token_is_predicted() -> None:
    samples = [sample([1, 2], [3, 4]), sample([5], [6, 7, 8])]
    for i, one in enumerate(samples):
        assert one.engine_log_probs is not None
        more = {"policy_log_probs": one.engine_log_probs - 10, "reference_log_probs": one.engine_log_probs - 20}
        samples[i] = replace(one, **more)
    (row,) = pack(samples, BatchLayout(1, 16, 1)).ranks[0]
    for log_probs, shift in ((row.engine_log_probs, 0), (row.policy_log_probs, 10), (row.reference_log_probs, 20)):
        assert log_probs is not None
        np.testing.assert_array_equal(log_probs[row.loss_mask] + shift, [-1, -2, -1, -2, -3])
        assert not log_probs[~row.loss_mask].any()
    with pytest.raises(ValueError, match=r"1 of 2 samples have reference_log_probs; expected all or none"):
        pack([samples[0], replace(samples[1], reference_log_probs=None)], BatchLayout(1, 16, 1))
    bare = [replace(one, engine_log_probs=None) for one in samples]
    assert pack(bare, BatchLayout(1, 16, 1)).ranks[0][0].engine_log_probs is None


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
