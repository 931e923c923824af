"""The head against float64 autograd: both modes, in torch and in Triton's kernels under its interpreter, whole and cut
over two ranks.

Not proven here: anything on a GPU (`or1 selftest kernels`), where Triton compiles its kernels and GEMMs take bf16
factors; speed; memory (test_head_plan.py).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from head_cases import in_both_modes, random_case, run_interpreted

from or1_megatron.kernels.head import VocabularyShard, log_probs_and_entropies, one_pass_loss
from or1_megatron.kernels.statistics import Scores, merge
from or1_megatron.kernels.tiles_torch import TorchEpilogue
from or1_megatron.selftest.checks.kernels import (
    NORMAL_CASES,
    HeadCase,
    HeadNumbers,
    fp32_bounds,
    normal_case,
    oracle,
    relative,
    run_head,
)

CASES = in_both_modes(
    {
        "tails everywhere": random_case(37, 101),
        "one token": random_case(1, 7, tile=4096),
        "one tile": random_case(16, 64, tile=4096, temperature=0.6),
        "temperature 0.6": random_case(9, 150, temperature=0.6),
        "all logits near -10^4": random_case(5, 133, shift=-1e4),
        "all logits near 10^4": random_case(5, 133, shift=1e4),
        "padded rows of large weight": random_case(11, 90, padding=38),
        "no entropy term": random_case(19, 77, entropy=False),
        "no tokens": random_case(0, 40),
    }
)


def check(found: HeadNumbers, true: HeadNumbers) -> None:
    """The bounds for fp32 inputs."""
    assert found.log_probs.shape == true.log_probs.shape
    if len(true.log_probs):
        assert (found.log_probs.double() - true.log_probs).abs().max() <= 1e-5
        assert (found.entropies.double() - true.entropies).abs().max() <= 1e-5
        assert found.log_probs.max() <= 0.0
    assert relative(found.of_hidden, true.of_hidden) <= 1e-5
    assert relative(found.of_weight, true.of_weight) <= 1e-5


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadNumbers]:
    pytest.importorskip("triton")
    return run_interpreted(CASES, tmp_path_factory.mktemp("interpreted"))


@pytest.mark.parametrize("name", CASES)
def test_torch_equals_float64(name: str) -> None:
    check(run_head(CASES[name]), oracle(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_triton_equals_float64(name: str, interpreted: dict[str, HeadNumbers]) -> None:
    check(interpreted[name], oracle(CASES[name]))


def tf32(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 to the 10 bits of mantissa that a tensor core reads of it."""
    return ((values.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_the_bounds_of_fp32_exclude_tf32() -> None:
    """Matrix products in TF32, the likeliest way to lose digits on a GPU, miss both bounds by twice or more."""
    case = normal_case(**NORMAL_CASES["tails everywhere"])
    found, true = run_head(replace(case, hidden=tf32(case.hidden), weight=tf32(case.weight))), oracle(case)
    of_log_probs, of_entropies = fp32_bounds(case.hidden, case.weight[: case.true_vocab_size], case.temperature)
    assert (found.log_probs.double() - true.log_probs).abs().max() > 2 * of_log_probs
    assert (found.entropies.double() - true.entropies).abs().max() > 2 * of_entropies


@pytest.mark.parametrize("mode", ["recompute", "one_pass"])
def test_bfloat16_inputs_lose_nothing_in_between(mode: str) -> None:
    """Scores as if all were fp32; gradients are rounded to bf16 (2^-9) once, at the end."""
    case = replace(random_case(37, 101, dtype=torch.bfloat16), mode=mode)
    found, true = run_head(case), oracle(case)
    assert (found.log_probs.double() - true.log_probs).abs().max() <= 1e-5
    assert (found.entropies.double() - true.entropies).abs().max() <= 1e-5
    assert found.of_hidden.dtype == found.of_weight.dtype == torch.bfloat16
    assert relative(found.of_hidden, true.of_hidden) <= 2**-9
    assert relative(found.of_weight, true.of_weight) <= 2**-9


def test_near_certain_target_keeps_its_gradient_in_bf16() -> None:
    """Logits 10 and 0, target the first: p - 1 = -1 / (1 + e^10) = -4.54e-5. p itself is 1 in bf16."""
    logits = torch.zeros(1, 64)[:, :2]
    logits[0, 0] = 10.0
    statistics = torch.empty(4, 1)
    epilogue, columns = TorchEpilogue(torch.empty(64)), torch.tensor([0])
    offset = epilogue.statistics(logits, columns, statistics)
    scores = Scores.of(statistics)
    gradient = epilogue.gradient(logits, columns, offset, scores, torch.ones(1), None, torch.bfloat16)
    expected = 1 / (1 + math.exp(10))
    assert gradient.dtype == torch.bfloat16
    assert gradient.flatten().tolist() == pytest.approx([expected, -expected], rel=2**-8)


def test_statistics_merge_with_none_at_all() -> None:
    """A rank that holds padding alone adds nothing: logits 1 and 3 by hand, beside no logits."""
    total, moment = 1 + math.exp(-2), -2 * math.exp(-2)
    part = torch.tensor([3.0, total, moment, 1.0])[:, None]
    found = merge(torch.stack((merge(part.new_empty(0, 4, 1)), part)))
    torch.testing.assert_close(found, part)


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


def test_one_pass_adds_sums_and_takes_the_largest_of_max() -> None:
    """Seven tokens in tiles of two: their positions as values. Without gradients the same, and none is computed."""
    case = random_case(7, 64)
    weight = case.weight.requires_grad_()
    parts = []

    def pointwise(log_probs: Any, entropies: Any, part: slice) -> Any:
        at = torch.arange(7.0)[part]
        parts.append(len(at))
        return -log_probs.sum(), {"at": at.sum(), "max_at": at.max(), "entropy": entropies.detach().sum()}

    def call() -> Any:
        return one_pass_loss(
            case.hidden, weight, case.targets, 1.0, VocabularyShard(0, 64), pointwise, budget_bytes=4 * 64 * 4
        )

    true = oracle(case)
    for loss, sums in (call(), torch.no_grad()(call)()):
        assert float(loss) == pytest.approx(-float(true.log_probs.sum()))
        assert {name: float(value) for name, value in sums.items()} == {
            "at": 21.0,
            "max_at": 6.0,
            "entropy": pytest.approx(float(true.entropies.sum())),
        }
    assert parts == [2, 2, 2, 1] * 2
    assert not loss.requires_grad


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_one_pass_with_one_input_frozen(wanted: str) -> None:
    case = replace(random_case(13, 50), mode="one_pass")
    inputs = {"hidden": case.hidden, "weight": case.weight}
    inputs[wanted].requires_grad_()
    loss, _ = one_pass_loss(
        *inputs.values(),
        case.targets,
        1.0,
        VocabularyShard(0, 50),
        lambda p, h, part: (p @ case.a[part] + h @ case.c[part], {}),
    )
    (3 * loss).backward()
    true = oracle(case)
    expected = {"hidden": true.of_hidden, "weight": true.of_weight}[wanted]
    assert relative(inputs[wanted].grad, 3 * expected) <= 1e-5


def test_what_does_not_fit_is_refused() -> None:
    shard = VocabularyShard(0, 4)
    with pytest.raises(TypeError, match=r"hidden is torch\.bfloat16 and weight torch\.float32"):
        log_probs_and_entropies(torch.ones(1, 2).bfloat16(), torch.ones(4, 2), torch.tensor([2]), 1.0, shard)
    with pytest.raises(ValueError, match=r"\[T, H\], \[V/tp, H\] and \[T\]"):
        log_probs_and_entropies(torch.ones(3, 2), torch.ones(4, 2), torch.tensor([2]), 1.0, shard)


CUT = in_both_modes(
    {"cut": random_case(13, 31, padding=1, temperature=0.8), "padding alone": random_case(13, 14, padding=18)}
)


def run_on_a_rank() -> dict[str, HeadNumbers]:
    rank, found = dist.get_rank(), {}
    for name, case in CUT.items():
        shard = VocabularyShard(16 * rank, case.true_vocab_size, dist.group.WORLD)
        mine: HeadCase = replace(case, weight=case.weight[16 * rank : 16 * (rank + 1)])
        found[name] = HeadNumbers(*(tensor.detach() for tensor in run_head(mine, shard=shard)))
    return found


def test_tensor_parallel_equals_whole() -> None:
    """Vocabulary cut over two gloo ranks, the second of which may hold padding alone: equal scores on both, hidden
    gradients that add up."""
    both = ranks.call(run_on_a_rank, 2)
    for name, case in CUT.items():
        first, second = (found[name] for found in both)
        assert torch.equal(first.log_probs, second.log_probs)
        assert torch.equal(first.entropies, second.entropies)
        whole = HeadNumbers(
            first.log_probs,
            first.entropies,
            first.of_hidden + second.of_hidden,
            torch.cat((first.of_weight, second.of_weight)),
        )
        check(whole, oracle(case))
