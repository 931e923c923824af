"""The head against float64 autograd. Not proven here: speed, memory, bf16, GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from or1_megatron.kernels.head import (
    VocabularyShard,
    log_probs_and_entropies,
    reference_log_probs_and_entropies,
)


def problem(tokens: int, hidden: int, vocab: int, shift: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Random (hidden [T, H], weight [V, H], targets [T], two upstream gradients [T]) in fp32."""
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    x = torch.randn(tokens, hidden, generator=generator)
    x[:, 0] = 1.0
    weight = torch.randn(vocab, hidden, generator=generator)
    weight[:, 0] = shift  # moves all logits of a token alike
    targets = torch.randint(vocab, (tokens,), generator=generator)
    return x, weight, targets, torch.randn(tokens, generator=generator), torch.randn(tokens, generator=generator)


def oracle(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, up: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
    log_probs, entropies = reference_log_probs_and_entropies(x64, w64, targets, temperature)
    (log_probs @ up[0].double() + entropies @ up[1].double()).backward()
    assert x64.grad is not None and w64.grad is not None
    return log_probs.detach(), entropies.detach(), x64.grad, w64.grad


def relative(found: torch.Tensor, true: torch.Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


@pytest.mark.parametrize(
    ("tokens", "vocab", "temperature", "tile", "shift"),
    [
        (37, 101, 1.0, 8, 0.0),  # neither is a multiple of the tile
        (1, 7, 1.0, 4096, 0.0),
        (16, 64, 0.6, 16, 0.0),
        (5, 33, 1.0, 2, -1e4),  # every logit very negative
        (9, 50, 2.0, 4, 300.0),
    ],
)
def test_equals_float64(tokens: int, vocab: int, temperature: float, tile: int, shift: float) -> None:
    x, weight, targets, *up = problem(tokens, 24, vocab, shift)
    true = oracle(x, weight, targets, temperature, tuple(up))
    x.requires_grad_()
    weight.requires_grad_()
    shard = VocabularyShard(first_row=0, true_vocab_size=vocab)
    log_probs, entropies = log_probs_and_entropies(x, weight, targets, temperature, shard, tile)
    (log_probs @ up[0] + entropies @ up[1]).backward()
    # fp32 logits of size 1e4 carry an error of 1e-3 before the head has done anything
    bound = max(1e-5, abs(shift) * 1e-6)
    assert (log_probs.double() - true[0]).abs().max() < bound
    assert (entropies.double() - true[1]).abs().max() < bound
    if shift == 0.0:
        assert relative(x.grad, true[2]) < 1e-5
        assert relative(weight.grad, true[3]) < 1e-5


def test_uniform_by_hand() -> None:
    """Four equal logits: log-prob -ln 4, entropy ln 4, and gradients onehot - 1/4 and 0."""
    weight = torch.ones(4, 2, requires_grad=True)
    x = torch.ones(1, 2)
    log_probs, entropies = log_probs_and_entropies(x, weight, torch.tensor([2]), 1.0, VocabularyShard(0, 4))
    assert log_probs.item() == pytest.approx(-math.log(4))
    assert entropies.item() == pytest.approx(math.log(4))
    (log_probs + 5 * entropies).sum().backward()
    expected = torch.tensor([-0.25, -0.25, 0.75, -0.25])[:, None].expand(4, 2)
    torch.testing.assert_close(weight.grad, expected)


def test_padded_rows_get_no_probability() -> None:
    """Rows beyond the true vocabulary change nothing and receive no gradient, however large their weights."""
    x, weight, targets, *up = problem(6, 8, 10)
    true = oracle(x, weight, targets, 1.0, tuple(up))
    padded = torch.cat((weight, torch.full((3, 8), 50.0))).requires_grad_()
    log_probs, entropies = log_probs_and_entropies(x, padded, targets, 1.0, VocabularyShard(0, 10))
    (log_probs @ up[0] + entropies @ up[1]).backward()
    assert (log_probs.double() - true[0]).abs().max() < 1e-5
    assert relative(padded.grad[:10], true[3]) < 1e-5
    assert padded.grad[10:].abs().max() == 0.0


def test_no_tokens() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    x = torch.ones(0, 2, requires_grad=True)
    log_probs, entropies = log_probs_and_entropies(
        x, weight, torch.empty(0, dtype=torch.int64), 1.0, VocabularyShard(0, 4)
    )
    (log_probs.sum() + entropies.sum()).backward()
    assert log_probs.shape == (0,)
    assert weight.grad.abs().max() == 0.0


def _one_rank(rank: int, meeting: str, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    x, weight, targets, *up = problem(13, 16, 31)
    padded = torch.cat((weight, torch.zeros(1, 16)))  # 32 rows: 16 for each rank
    shard = VocabularyShard(first_row=16 * rank, true_vocab_size=31, group=dist.group.WORLD)
    x.requires_grad_()
    mine = padded[16 * rank : 16 * (rank + 1)].clone().requires_grad_()
    log_probs, entropies = log_probs_and_entropies(x, mine, targets, 0.8, shard, tile=5)
    (log_probs @ up[0] + entropies @ up[1]).backward()
    results.put((rank, log_probs.detach().numpy(), entropies.detach().numpy(), x.grad.numpy(), mine.grad.numpy()))
    dist.destroy_process_group()


def test_tensor_parallel_equals_whole(tmp_path: Path) -> None:
    """Vocabulary cut over two gloo ranks: equal statistics on both, input gradients that add up."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    processes = [
        context.Process(target=_one_rank, args=(rank, str(tmp_path / "meeting"), results)) for rank in range(2)
    ]
    for process in processes:
        process.start()
    found = {item[0]: [torch.from_numpy(a) for a in item[1:]] for item in (results.get() for _ in processes)}
    for process in processes:
        process.join()
    x, weight, targets, *up = problem(13, 16, 31)
    true = oracle(x, weight, targets, 0.8, tuple(up))
    for rank in range(2):
        assert (found[rank][0].double() - true[0]).abs().max() < 1e-5
        assert (found[rank][1].double() - true[1]).abs().max() < 1e-5
    assert relative(found[0][2] + found[1][2], true[2]) < 1e-5
    assert relative(torch.cat((found[0][3], found[1][3]))[:31], true[3]) < 1e-5
