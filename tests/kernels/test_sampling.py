"""What is drawn from logits: torch against float64 and exact distributions; Triton's kernel, interpreted, against it.

Not proven: anything about time, or a GPU (test_cubins.py compiles the kernel for one).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from or1_megatron.kernels.sampling import Sampled, _exponentials, sample
from or1_megatron.rollout.request_plan import row_keys

PROBABILITIES = torch.tensor([0.5, 0.2, 0.2, 0.06, 0.03, 0.01], dtype=torch.float64)
TINY_P = 1e-4  # seeds are fixed: a test that passes once passes always


def keys_of(seeds: range, position: int = 0) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.array(seeds, dtype=np.uint64), np.full(len(seeds), position)))


def chi_square_p(counts: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    expected = probabilities * counts.sum(dim=-1, keepdim=True)
    statistic = ((counts - expected) ** 2 / expected).sum(dim=-1)
    return torch.special.gammaincc(torch.tensor((len(probabilities) - 1) / 2, dtype=torch.float64), statistic / 2)


def kolmogorov_p(values: torch.Tensor) -> float:
    """Return the chance, for uniform values, of a larger distance from the diagonal (Kolmogorov's series)."""
    n, ordered = len(values), values.sort().values
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max()) * n**0.5
    return float(sum(2 * (-1) ** (k - 1) * np.exp(-2 * k**2 * distance**2) for k in range(1, 100)))


def rows(count: int, vocabulary: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_tokens_have_softmax_as_their_distribution(temperature: float) -> None:
    """Over requests at one position, and over positions of one request: chi-square; over 1,000 requests of 200
    positions: their p-values are uniform (Kolmogorov-Smirnov)."""
    exact = (PROBABILITIES.log() / temperature).softmax(dim=0)
    count, positions = 1_000, 200
    logits = PROBABILITIES.log().float().expand(count * positions, -1)
    seeds, places = np.repeat(np.arange(count, dtype=np.uint64), positions), np.tile(np.arange(positions), count)
    keys = torch.from_numpy(row_keys(seeds, places))
    tokens = sample(logits, keys, torch.full((len(keys),), temperature)).tokens.view(count, positions)
    counts = torch.nn.functional.one_hot(tokens, len(exact)).double()
    assert chi_square_p(counts.sum(dim=(0, 1)), exact) > TINY_P
    assert chi_square_p(counts.sum(dim=(0, 1)), exact.flip(0)) < TINY_P
    by_position = chi_square_p(counts.sum(dim=0), exact)
    assert kolmogorov_p(by_position) > 0.001
    merged = torch.stack((counts[..., 0], counts[..., 1], counts[..., 2:].sum(-1)), dim=-1).sum(dim=1)
    assert kolmogorov_p(chi_square_p(merged, torch.stack((exact[0], exact[1], exact[2:].sum())))) > 0.001


def test_noise_is_independent_over_indices_rows_and_positions() -> None:
    """Correlations of neighbours are within four standard deviations of 0, and the variables are exponential."""
    at_zero, at_one = (_exponentials(keys_of(range(64), at), 4096).neg().double() for at in (0, 1))
    n = at_zero.numel()
    assert abs(float(at_zero.mean()) - 1) < 4 / n**0.5 and abs(float(at_zero.var()) - 1) < 4 * (8 / n) ** 0.5
    pairs = {
        "indices": (at_zero[:, 1:], at_zero[:, :-1]),
        "rows": (at_zero[1:], at_zero[:-1]),
        "positions": (at_zero, at_one),
    }
    for name, (one, other) in pairs.items():
        assert abs(float(((one - 1) * (other - 1)).mean())) < 4 / n**0.5, name


def test_a_token_depends_on_its_own_row_alone() -> None:
    """Whole, row by row, in another order, and as rows of a wider buffer; enough for several parts."""
    logits, keys, temperatures = rows(40, 5000), keys_of(range(40)), torch.linspace(0, 1.5, 40)
    whole = sample(logits, keys, temperatures)
    order = torch.randperm(40)
    wide = torch.cat((logits, logits), dim=1)[:, :5000]
    assert torch.equal(sample(logits[order], keys[order], temperatures[order]).tokens, whole.tokens[order])
    assert torch.equal(sample(wide, keys, temperatures).tokens, whole.tokens)
    for row in range(40):
        alone = sample(logits[row, None], keys[row, None], temperatures[row, None])
        assert alone.tokens == whole.tokens[row]


def exact_scores(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return (logits.double() / torch.where(temperatures > 0, temperatures, 1.0)[:, None].double()).log_softmax(dim=1)


def check_scores(found: Sampled, logits: torch.Tensor, temperatures: torch.Tensor) -> None:
    log_probs = exact_scores(logits, temperatures)
    of_tokens = log_probs.gather(1, found.tokens[:, None])[:, 0]
    entropies = -(log_probs.exp() * log_probs.clamp(min=-1e300)).sum(dim=1)
    torch.testing.assert_close(found.log_probs.double(), of_tokens, atol=3e-6, rtol=3e-6)
    torch.testing.assert_close(found.entropies.double(), entropies, atol=3e-6, rtol=3e-6)


def test_log_probs_and_entropies_equal_float64_and_greedy_is_argmax() -> None:
    logits, temperatures = rows(30, 700), torch.tensor([0.0, 0.3, 1.0]).repeat(10)
    logits[:, 5] = -torch.inf  # one that may not be drawn
    found = sample(logits, keys_of(range(30)), temperatures)
    check_scores(found, logits, temperatures)
    assert torch.equal(found.tokens[::3], logits[::3].argmax(dim=1)) and not (found.tokens == 5).any()


def test_tokens_below_the_floor_are_not_drawn() -> None:
    """Log-probs stay those of the whole distribution."""
    count = 3_000
    logits, temperatures = PROBABILITIES.log().float().repeat(count, 1), torch.full((count,), 1.3)
    found = sample(logits, keys_of(range(count)), temperatures, logits[:, 2])
    check_scores(found, logits, temperatures)
    shares = (PROBABILITIES[:3].log() / 1.3).softmax(dim=0)
    assert chi_square_p(torch.bincount(found.tokens, minlength=3).double(), shares) > TINY_P


def awkward() -> tuple[torch.Tensor, ...]:
    """Return 120 rows of 100 logits: also greedy, with floors, with -inf, and four that have no distribution."""
    logits, temperatures = rows(120, 100, seed=1), torch.tensor([0.0, 0.7, 1.0, 1.0]).repeat(30)
    logits[::5, ::3] = -torch.inf
    logits[-4], logits[-3, 7], logits[-2, 7], logits[-1, 99] = -torch.inf, torch.nan, torch.inf, torch.nan
    return logits, keys_of(range(120), 9), temperatures, torch.linspace(-3, 3, 120)


def test_triton_draws_the_same_tokens(tmp_path: Path) -> None:
    """Interpreted, in blocks of 16 so that there are several and a tail; all logits, and those above a floor; bf16."""
    given = awkward()
    cases = [given[:3], given, (given[0].bfloat16(), *given[1:3])]
    torch.save(cases, tmp_path / "cases.pt")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path / "cases.pt"), str(tmp_path / "found.pt")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-4000:]
    for case, found in zip(cases, torch.load(tmp_path / "found.pt"), strict=True):
        expected, found = sample(*case), Sampled(*found)
        assert torch.equal(found.tokens[:-4], expected.tokens[:-4])
        check_scores(Sampled(*(each[:-4] for each in found)), case[0][:-4], case[2][:-4])
        for each in (expected, found):
            assert each.log_probs[-4:].isnan().all() and each.entropies[-4:].isnan().all()
            assert ((each.tokens >= 0) & (each.tokens < 100)).all()


def interpret(cases: str, found: str) -> None:
    from or1_megatron.kernels import sampling, sampling_triton

    sampling_triton._BLOCK = 16
    sampling.with_triton = lambda epilogue, device: True  # type: ignore[assignment]
    torch.save([tuple(sample(*case)) for case in torch.load(cases)], found)


if __name__ == "__main__":
    interpret(*sys.argv[1:])
