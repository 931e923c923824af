"""Every layout, packing, order of samples and variant against transformers and torch's own AdamW.

Two layouts in every run, and more in the slow tests, go through the command that a user runs; the others use its ranks.
Not proven here: NCCL, Transformer Engine, sizes beyond a few layers. bfloat16 is compared within its own rounding only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from at_layouts import compare_and_export
from typer.testing import CliRunner

from or1_megatron.commands.app import app
from or1_megatron.config.schema import ModelConfig
from or1_megatron.parallel import parity
from or1_megatron.parallel.parity import Deviation, Numbers, cast, compare, load_network, record_probe, reference
from or1_megatron.rl.objectives.clipped import ClippedPolicyLoss
from or1_megatron.rl.objectives.loss_faults import probe_objective
from or1_megatron.rl.objectives.whole_batch import inputs_of
from or1_megatron.selftest.checks.layouts import TOLERANCE, beyond
from or1_megatron.types import Sample

LAYOUTS = [
    "1",
    "1 rows96",  # two or three sequences to a row
    "1 rows160 shuffled",
    "1 rows1200",  # all in one row
    "PP2 VPP2",
    "PP2 layers=3+1",
    "CP2 distopt shuffled response_mean",
    "DP2 distopt buckets20000",
    "TP2 PP2 SP distopt",
    "full",
    "one_pass",
]
TIED = ["TP2", "PP2 VPP2 one_pass overlap"]
MORE = [
    "TP2",
    "DP2 overlap response_mean",
    "PP2 VPP2 DP2 distopt full",
    "selective",
    "TP2 SP one_pass shuffled response_mean",
    "PP2 VPP2 one_pass overlap",
]
MORE_TIED = ["PP2 one_pass", "PP2 VPP2 distopt", "one_pass overlap"]
OBJECTIVES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "gspo": ("gspo", {}, ["CP2 PP2 shuffled response_mean", "DP2 rows64"]),
    "gspo on policy": ("gspo", {"on_policy": True, "correction": "off"}, ["TP2 one_pass"]),
    "gspo on policy, corrected": ("gspo", {"on_policy": True}, ["DP2 one_pass"]),
    "cispo": ("cispo", {}, ["TP2 SP CP2"]),
    "dr_grpo": ("dr_grpo", {}, ["PP2 one_pass"]),
    "dapo": ("dapo", {}, ["DP2 CP2"]),
    "sequence": ("clipped", {"correction_level": "sequence"}, ["CP2 PP2 shuffled"]),
    "geometric": ("clipped", {"correction_level": "geometric", "correction_cap": 1.05}, ["PP2 one_pass"]),
}
"""An objective, parameters beside ``probe_objective``'s, and layouts. gspo and the last two need whole sequences."""
MIXED = [
    "CP4",
    "TP2 CP2 PP2 SP distopt",
    "CP2 PP2 VPP2 full",
    "CP2 DP2 distopt selective",
    "TP2 DP2 SP distopt one_pass overlap",
    "PP4 layers=1+1+1+1",
]
"""Several kinds at once, on up to eight ranks."""


STRICT = """
from or1_megatron.selftest.checks import layouts
layouts.TOLERANCE["bfloat16"] = dict.fromkeys(layouts.TOLERANCE["bfloat16"], 1e-5)
layouts._ROUNDINGS["bfloat16"] = 0.0
"""


def check_parity(model: Path, out: Path, *arguments: str, before: str = "") -> tuple[int, str, dict[str, Any]]:
    """Run ``or1 check-parity`` in the folder of ``out``; return (exit status, output, rows by layout)."""
    program = f"{before}\nfrom or1_megatron.commands.app import app\napp()"
    command = [sys.executable, "-c", program, "check-parity", str(model), "--out", str(out), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=out.parent)
    rows = {row["name"]: row for row in json.loads(out.read_text())} if out.is_file() else {}
    return done.returncode, done.stdout + done.stderr, rows


def named(layouts: list[str]) -> list[str]:
    return [argument for layout in layouts for argument in ("--layout", layout)]


@pytest.fixture(scope="module")
def measured(tiny_qwen2: Path, tied_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The rows by layout of both models and of each objective, from the ranks that the command runs."""
    size, smaller = {"sequences": 24, "longest": 48}, {"sequences": 16, "longest": 32}
    cases = {
        "untied": {"model": tiny_qwen2, "layouts": LAYOUTS, **size},
        "tied": {"model": tied_qwen2, "layouts": TIED, **size},
    }
    for key, (name, args, layouts) in OBJECTIVES.items():
        cases[key] = {"model": tiny_qwen2, "layouts": layouts, "objective": name, "args": args, **smaller}
    return ranks.call(compare_and_export, 4, cases, tmp_path_factory.mktemp("measured"), joined=False)[0]


def assert_equal(row: dict[str, Any]) -> None:
    """Within the bounds asked of fp32: 1e-5 on log-probs, entropies and loss, 1e-4 relative on gradients, and ten times
    that on what three steps move: transformers' own fp32 is up to 3e-4 from float64 there."""
    difference = row["difference"]
    assert max(difference["log_prob"], difference["entropy"], difference["loss"]) <= 1e-5, row
    assert max(difference["grad_norm"], difference["gradient"], 0.1 * difference["parameters"]) <= 1e-4, row


@pytest.mark.parametrize(
    ("case", "layout"),
    [("untied", at) for at in LAYOUTS] + [("tied", at) for at in TIED]
    + [(name, at) for name, (_, _, layouts) in OBJECTIVES.items() for at in layouts],
)  # fmt: skip
def test_equals_transformers(case: str, layout: str, measured: dict[str, dict[str, Any]]) -> None:
    """Tied embeddings are one tensor with two uses: under PP its two copies share their gradient; a head that writes
    main_grad keeps both. Objectives are cut by TP, PP, CP, DP and packing, in both heads: evaluated by the ranks, or
    before (``rl.objectives.whole_batch``); the reference sees all tokens at once; tests/rl compares with the papers."""
    assert_equal(measured[case][layout])


def test_rows_differ_between_packings(measured: dict[str, dict[str, Any]]) -> None:
    """The packings compared are not the same one by another name; an interleaved pipeline gets multiples of PP."""
    rows = {layout: measured["untied"][layout]["micro_batches"] for layout in LAYOUTS}
    assert rows["1 rows1200"] == 1
    assert rows["1"] < rows["1 rows160 shuffled"] < rows["1 rows96"]
    assert rows["PP2 VPP2"] % 2 == 0


def test_an_objective_of_ones_own_at_several_layouts(tiny_qwen2: Path, tmp_path: Path) -> None:
    """The command itself, with the guide's objective in the working folder: the layouts that it is asked for, in the
    table, in the file and in its exit status."""
    guide = (Path(__file__).parents[2] / "docs/changing_the_objective.md").read_text()
    (tmp_path / "my_objectives.py").write_text(guide.split("```python\n")[1].split("```")[0])
    own = ["--objective", "my_objectives:WReinforce", "--arg", "positive_weight=0.3"]
    layouts = ["CP2", "TP2 SP one_pass"]
    status, printed, rows = check_parity(tiny_qwen2, tmp_path / "out.json", *own, *named(layouts))
    assert status == 0, printed[-4000:]
    assert printed.count(" equal") == len(layouts) and list(rows) == layouts
    for row in rows.values():
        assert_equal(row)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layouts"), [("tiny_qwen2", MORE), ("tied_qwen2", MORE_TIED), ("tiny_qwen2", MIXED)])
def test_more_layouts_equal_transformers(
    model: str, layouts: list[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder = request.getfixturevalue(model)
    status, printed, rows = check_parity(folder, tmp_path / "out.json", *named(layouts))
    assert status == 0, printed[-4000:]
    for layout in layouts:
        assert_equal(rows[layout])


@pytest.mark.slow
def test_bfloat16_and_what_a_difference_looks_like(tiny_qwen2: Path, tmp_path: Path) -> None:
    """bf16 passes at its own bounds. At stricter ones it fails, as the status and the output say."""
    given = ["--dtype", "bfloat16", *named(["TP2 SP", "PP2", "PP2"])]
    status, printed, rows = check_parity(tiny_qwen2, tmp_path / "out.json", *given, before=STRICT)
    assert status == 1
    assert "PP2: log-prob differs by" in printed
    assert "PP2: gradient of model.layers." in printed
    for row in rows.values():
        difference = row["difference"]
        assert all(difference[kind] <= bound for kind, bound in TOLERANCE["bfloat16"].items()), row


def test_layouts_that_cannot_work_are_explained_before_any_rank_starts(tiny_qwen2: Path) -> None:
    for layout, expected in {
        "TP3": "does not divide the model's num_attention_heads = 4",
        "PP3": "does not divide the model's num_hidden_layers = 4",
        "PP2 layers=3+2": "holds 5 layers; the model's num_hidden_layers is 4",
        "PP2 layers=4": "has 1 numbers; expected one for each",
        "VPP2": "needs pipeline > 1",
        "SP": "sequence needs tensor > 1",
        "TQ2": "'TQ2' is not known",
        "rows40": "rows of 40 tokens do not hold the longest sequence, 48",
    }.items():
        refused = CliRunner().invoke(app, ["check-parity", str(tiny_qwen2), "--layout", layout])
        assert refused.exit_code == 2 and expected in refused.stderr, layout


def test_an_objective_with_a_fault_is_named_and_nothing_is_measured(
    tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's objective that returns a mean, given as on the command line; and a name that there is none of."""
    code = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mean:\n    scale: float\n"
    code += "    temperature: float = 1.0\n    def __call__(self, log_probs, entropies, tokens):\n"
    code += "        loss = -self.scale * (log_probs * tokens.advantages).sum() / max(len(log_probs), 1)\n"
    (tmp_path / "faulty_of_test.py").write_text(f"{code}        return loss, {{}}\n")
    monkeypatch.chdir(tmp_path)
    for given, status, said in (
        (
            ["faulty_of_test:Mean", "--arg", "scale=0.5"],
            1,
            "faulty_of_test:Mean: Mean returns a mean: its loss is",
        ),
        (["cisop"], 2, "did you mean cispo"),
        (["clipped", "--arg", "scale"], 2, "--arg scale: expected NAME=VALUE"),
    ):
        ended = CliRunner().invoke(app, ["check-parity", str(tiny_qwen2), "--objective", *given])
        assert ended.exit_code == status and said in ended.output, given


def reference_numbers(
    folder: Path, samples: list[Sample], mean: str = "tokens"
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Compute log-probs by sample and the gradient of the clipped objective in float64, by the recipe's formula and
    without the package: with the probe's dual clip, correction, KL and bonus; ``mean`` over tokens or responses."""
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float64)
    rows = []
    for i, sample in enumerate(samples):
        ids = torch.tensor([*sample.prompt_ids.tolist(), *sample.response_ids.tolist()])
        log_p = (model(ids[None]).logits[0] / 0.8).log_softmax(-1)
        for k in sample.loss_mask.nonzero()[0]:
            at = len(sample.prompt_ids) + int(k)
            entropy = -(log_p[at - 1].exp() * log_p[at - 1]).sum()
            recorded = [float(getattr(sample, f"{of}_log_probs")[k]) for of in ("engine", "policy", "reference")]
            rows.append((i, sample.advantage, log_p[at - 1, ids[at]], entropy, *recorded))
    of, a, log_probs, _, engine, policy, reference = (
        torch.tensor([float(row[c]) for row in rows], dtype=torch.float64) for c in range(7)
    )
    new, entropy = (torch.stack([row[c] for row in rows]) for c in (2, 3))
    ratio, weight = (new - policy).exp(), (policy - engine).exp()
    term = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    term = torch.where(a < 0, term.clamp(min=1.3 * a), term)
    weight = torch.where((weight < 1 / 1.5) | (weight > 1.5), 0.0, weight)
    assert 0 < (weight == 0).sum() < len(weight), "the cap decides nothing"
    behind, counts = reference - new, torch.bincount(of.long(), minlength=len(samples))
    share = 1 / len(of) if mean == "tokens" else 1 / counts[of.long()] / (counts > 0).sum()
    (share * (-weight * term + 0.1 * (behind.exp() - behind - 1) - 0.3 * entropy)).sum().backward()
    by_sample = [log_probs[of == i].numpy() for i in range(len(samples))]
    return by_sample, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mean", ["tokens", "responses"])
def test_reference_is_what_it_says(mean: str, tiny_qwen2: Path) -> None:
    """For both aggregations; measured twice on the same network, which is restored in between."""
    network = load_network(ModelConfig(hf=tiny_qwen2, dtype="float32"))
    samples, objective = record_probe(network, 24, 48, 1), probe_objective("float32")
    log_probs, gradient = reference_numbers(tiny_qwen2, samples, mean=mean)
    for _ in range(2):
        numbers = reference(network, samples, objective, "float32", mean == "responses")
        for computed, expected in zip(numbers.log_probs, log_probs, strict=True):
            np.testing.assert_allclose(computed, expected, atol=1e-5)
        assert gradient.keys() == numbers.gradient.keys()
        for name, expected in gradient.items():
            torch.testing.assert_close(numbers.gradient[name].double(), expected, rtol=1e-4, atol=1e-6)
        norm = torch.cat([g.flatten() for g in gradient.values()]).norm()
        assert numbers.grad_norms[0] == pytest.approx(float(norm), rel=1e-5)


def test_compare_names_the_tensor_and_the_kind() -> None:
    def numbers(**changes: Any) -> Numbers:
        same: dict[str, Any] = {
            "log_probs": [np.zeros(2, np.float32)],
            "entropies": [np.ones(2, np.float32)],
            "losses": [1.0],
            "grad_norms": [2.0],
            "gradient": {"a": torch.ones(4), "b": torch.full((4,), 2.0)},
            "moved": {"a": torch.ones(4), "b": torch.ones(4)},
        }
        return Numbers(**{**same, **changes})

    def said_of(difference: Deviation, **rounding: float) -> Iterator[str]:
        row = {"difference": difference, "rounding": dict.fromkeys(TOLERANCE["float32"], 0.0) | rounding}
        return beyond(row, "float32")

    assert not list(said_of(compare(numbers(), numbers())))
    # ||(0, 0, 0, 0.01)|| / ||(2, 2, 2, 2)|| = 0.0025
    other = numbers(gradient={"a": torch.ones(4), "b": torch.tensor([2.0, 2.0, 2.0, 2.01])}, losses=[1.5])
    difference = compare(other, numbers())
    assert (difference["gradient"], difference["gradient_at"]) == (pytest.approx(0.0025, rel=1e-4), "b")
    said = list(said_of(difference))
    assert [line.split(" differs")[0] for line in said] == ["loss", "gradient of b"]
    assert [line.split(" differs")[0] for line in said_of(difference, gradient=0.0025 / 7)] == ["loss"]
    assert len(list(said_of(difference, gradient=0.0025 / 9))) == 2  # eight times what rounding makes is allowed
    assert compare(numbers(losses=[1000.004]), numbers(losses=[1000.0]))["loss"] == pytest.approx(4e-6)
    assert compare(numbers(grad_norms=[1.0]), numbers())["grad_norm"] == 0.5
    unscored = numbers(log_probs=[np.zeros(2, np.float32), np.array([np.nan], np.float32)])
    whole = numbers(log_probs=[np.zeros(2, np.float32), np.zeros(1, np.float32)])
    assert next(said_of(compare(unscored, whole))).startswith("log-prob differs by nan")
    broken = numbers(moved={"a": torch.full((4,), float("nan")), "b": torch.ones(4)})
    assert "3 steps of a differs by inf" in next(said_of(compare(broken, numbers())))


def test_the_probe_puts_everything_to_work(tiny_qwen2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ratios inside and outside the clip range, advantages of both signs, tokens not counted, the entropy bonus, dual
    clip, correction weights that are masked and not, and the KL."""
    network = load_network(ModelConfig(hf=tiny_qwen2, dtype="float32"))
    samples = record_probe(network, 24, 48, 1)
    log_probs, _ = reference_numbers(tiny_qwen2, samples)
    scores, objective = torch.tensor(np.concatenate(log_probs)), probe_objective("float32")
    tokens = inputs_of(samples, scores)
    assert tokens.policy_log_probs is not None
    ratio = (scores - tokens.policy_log_probs).exp()
    assert 0.2 < ((ratio > 0.8) & (ratio < 1.2)).double().mean() < 0.8
    assert tokens.advantages.min() < 0 < tokens.advantages.max()
    assert isinstance(objective, ClippedPolicyLoss) and not objective.on_policy and objective.entropy_coefficient > 0
    assert not all(sample.loss_mask.all() for sample in samples)
    sums = objective(scores, torch.zeros_like(scores), tokens)[1]
    seen = {
        name: float(sums[name]) / len(scores)
        for name in ("clipped_low", "clipped_high", "clipped_dual", "weight_cut", "kl")
    }
    assert all(0.01 < value < 0.5 for value in seen.values()), seen
    monkeypatch.setattr(parity, "_FLOAT64_BYTES", 1 << 60)  # too many: bf16 is measured, and scaled
    found = parity.references(network, samples, objective, "float32", {"token_mean"})
    assert 0 < found["token_mean"][1]["log_prob"] < 1e-5


def test_a_cast_keeps_rotary_frequencies(tiny_qwen2: Path) -> None:
    network = load_network(ModelConfig(hf=tiny_qwen2, dtype="float32"))
    cast(network, torch.bfloat16)
    assert {each.dtype for each in network.parameters()} == {torch.bfloat16}
    assert {each.dtype for each in network.buffers()} == {torch.float32}
