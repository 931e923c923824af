"""Choosing an objective: names, a user's own class, parameters, contradictions; and faults that ``check`` names."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from or1_megatron.config.base import ConfigError
from or1_megatron.config.schema import AlgorithmConfig, StageConfig
from or1_megatron.interfaces import Sequences, TokenInputs
from or1_megatron.rl.objectives.dr_grpo import DrGRPO
from or1_megatron.rl.objectives.loss_faults import faults, probe_objective
from or1_megatron.rl.objectives.registry import BUILT_IN, find, make_objective, objective_conflicts

STAGE = StageConfig(name="s", steps=1, max_response_tokens=40, prompts_per_step=8, prompts_per_update=4, group_size=2)

MINE = """
from dataclasses import dataclass

from or1_megatron.rl.objectives.policy_gradient import PolicyGradientLoss, Surrogate
from or1_megatron.rl.objectives.estimators import no_tokens, ratio_of


@dataclass(frozen=True)
class Mine(PolicyGradientLoss):
    positive: float

    def surrogate(self, log_probs, old, tokens):
        ratio = ratio_of(log_probs, old)
        advantages = tokens.advantages.clamp(max=0) + self.positive * tokens.advantages.clamp(min=0)
        return Surrogate(ratio * advantages, ratio, no_tokens(log_probs))


@dataclass(frozen=True)
class Bounded(Mine):
    positive: float = 1.0
    bounds: tuple[float, float] = (0.1, 0.2)
    seed: int = 0
    elsewhere: object = None


class Plain:
    pass
"""


def algorithm(**sections: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(sections)


def lines(**sections: Any) -> list[str]:
    return list(objective_conflicts(algorithm(**sections), STAGE))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a module of the user's."""
    (tmp_path / "mine_of_test.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_default_contradicts_nothing_and_every_name_is_found() -> None:
    assert not lines()
    for name, kind in BUILT_IN.items():
        assert find(name) is kind
        assert isinstance(probe_objective("float32", name), BUILT_IN[name])


def test_every_built_in_has_no_fault() -> None:
    for name in BUILT_IN:
        assert not list(faults(probe_objective("float32", name))), name
        assert not list(faults(probe_objective("bfloat16", name))), name


def test_unknown_names_and_parameters_name_the_nearest(here: Path) -> None:
    assert lines(objective={"name": "gpso"}) == [
        "algorithm.objective.name = gpso: unknown objective; did you mean gspo?; expected clipped, gspo, cispo, "
        "dr_grpo, dapo, or package.module:Name of your own"
    ]
    assert (
        "was removed: take clipped with algorithm.entropy.mode = adaptive" in lines(objective={"name": "clip_cov"})[0]
    )
    (line,) = lines(objective={"name": "mine_of_test:Bounded", "args": {"positiv": 1}})
    assert "args.positiv: objective mine_of_test:Bounded has no such parameter; did you mean positive?" in line
    (line,) = lines(objective={"name": "clipped", "args": {"clip_low": 0.1}})
    assert (
        line == "algorithm.objective.args.clip_low: this parameter is set by algorithm.loss.clip_low; take it out here"
    )
    assert "did you mean dapo?" in lines(objective={"name": "DAPO"})[0]
    for wrong, expected in (("abc", "valid number"), (True, "valid number")):
        (line,) = lines(objective={"name": "mine_of_test:Bounded", "args": {"positive": wrong}})
        assert line == f"algorithm.objective.args.positive: found {wrong!r}, expected a {expected}"
    for name, expected in {
        "mine_of_test:Nine": "AttributeError",
        "no_such_module:Mine": "ModuleNotFoundError",
        "mine_of_test:Plain": "expected a dataclass with __call__",
        "mine_of_test:Mine": "algorithm.objective.args.positive: missing",
    }.items():
        (line,) = lines(objective={"name": name})
        assert expected in line, name


def test_arguments_get_the_types_of_their_fields(here: Path) -> None:
    made = probe_objective("float32", "mine_of_test:Bounded", {"bounds": [0.3, 0.4]})
    assert vars(made)["bounds"] == (0.3, 0.4)
    with pytest.raises(ConfigError, match=r"args\.bounds: found \['a', 0.4\], expected a valid number"):
        probe_objective("float32", "mine_of_test:Bounded", {"bounds": ["a", 0.4]})


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"objective": {"name": "gspo"}, "loss": {"dual_clip": 3.0, "clip_high": 0.3}, "advantage": {"scale": "none"}},
         ["algorithm.loss.dual_clip = 3.0, but objective gspo does not read it; set it to null",
          "loss.aggregation = token_mean counts a response by its tokens"]),
        ({"objective": {"name": "gspo", "args": {"share": 0.1}}}, ["args.share", "loss.aggregation"]),
        ({"objective": {"name": "dr_grpo"}}, ["algorithm.advantage.scale = std divides by the group's deviation"]),
        ({"objective": {"name": "dapo"}, "loss": {"aggregation": "response_mean"}},
         ["is a mean over tokens", "clips higher", "overlong_tokens is not set"]),
    ],
)  # fmt: skip
def test_contradictions_are_named_all_at_once(sections: dict[str, Any], expected: list[str]) -> None:
    sentences = lines(**sections)
    assert len(sentences) == len(expected) and all(
        part in line for part, line in zip(expected, sentences, strict=True)
    ), sentences


def test_a_step_sets_what_an_objective_reads(here: Path) -> None:
    """The seed of one that draws, the length of dr_grpo (mean 10 of T 40)."""
    kl = {"coefficient": 0.1, "reference": "folder"}
    chosen = {"name": "mine_of_test:Bounded", "args": {"positive": 0.5}}
    mine = make_objective(algorithm(objective=chosen, kl=kl), STAGE, 0.1, seed=7)
    read = ("seed", "positive", "kl_coefficient", "entropy_coefficient")
    assert [getattr(mine, name) for name in read] == [7, 0.5, 0.1, 0.1]
    constant = make_objective(algorithm(objective={"name": "dr_grpo"}), STAGE, 0.0, mean_length=10.0)
    assert isinstance(constant, DrGRPO) and constant.length_share == 0.25


def test_an_objective_of_ones_own(here: Path) -> None:
    """Found in the working folder, made with its parameter and the common keys, pickled, without a fault."""
    chosen = {"name": "mine_of_test:Mine", "args": {"positive": 0.25}}
    assert not lines(objective=chosen)
    made = make_objective(algorithm(objective=chosen, kl={"coefficient": 0.2, "reference": "f"}), STAGE, 0.1)
    assert pickle.loads(pickle.dumps(made)) == made
    assert (made.positive, made.kl_coefficient) == (0.25, 0.2)  # type: ignore[attr-defined]  # a class of the test's file
    assert not list(faults(made))
    (line,) = lines(objective=chosen, loss={"clip_low": 0.1})
    assert "loss.clip_low = 0.1, but objective mine_of_test:Mine does not read it; set it to 0.2" in line
    with pytest.raises(ConfigError, match="no such parameter; did you mean positive"):
        probe_objective("float32", "mine_of_test:Mine", {"positiv": 1})


def test_the_guides_example_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/changing_the_objective.md: its file is loaded by name without a fault, and its test passes; 40 lines."""
    text = (Path(__file__).parents[2] / "docs/changing_the_objective.md").read_text()
    code, check = (block.split("```")[0] for block in text.split("```python\n")[1:3])
    assert len((code + check).strip().splitlines()) <= 40
    (tmp_path / "my_objectives.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = probe_objective("float32", "my_objectives:WReinforce", {"positive_weight": 0.3})
    assert not list(faults(made))
    names = {"WReinforce": type(made), "math": math, "torch": torch, "TokenInputs": TokenInputs}
    exec(check, names)
    names["test_positive_weight_against_float64"]()  # type: ignore[operator]  # from the guide


@dataclass(frozen=True)
class Faulty:
    """-sum A log pi with one fault."""

    fault: str
    scope: str = "token"
    temperature: float = 1.0

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        terms = -tokens.advantages * log_probs
        loss = terms.sum()
        match self.fault:
            case "mean":
                loss = terms.mean() if len(terms) else loss
            case "raises":
                raise KeyError("advantage")
            case "nan":
                loss = loss * float("nan")
            case "nan gradient":
                loss = loss + (log_probs * 0).abs().sqrt().sum()
            case "bare":
                return loss
            case "vector":
                loss = terms
            case "centred":
                loss = ((terms - terms.mean()) ** 2).sum()
            case "sequences":
                loss = tokens.whole.mean(terms).sum()
            case "constant":
                loss = loss + 1.0
            case "wants a reference":
                loss = (tokens.reference_log_probs * log_probs).sum()
            case "asks for a reference":
                if tokens.reference_log_probs is None:
                    raise ValueError("set algorithm.kl.reference")
            case "mean in the sums":
                return loss, {"largest": terms.detach().max() if len(terms) else loss.detach()}
            case "any":
                return loss, {"any": (terms > 0).any()}
            case "attached":
                return loss, {"terms": terms.sum()}
            case "mean of ratios":
                loss = -(tokens.advantages * ((log_probs - log_probs.detach()).exp() - 1)).mean()
            case "mean bonus":
                loss = loss - 0.3 * entropies.mean()
            case "mean reported":
                return loss, {"entropy": entropies.detach().mean()}
            case "drawn":
                loss = (terms * (torch.rand(len(terms)) < 0.5)).sum()
            case "detached":
                loss = loss.detach()
        return loss, {}


@pytest.mark.parametrize(
    ("fault", "scope", "expected"),
    [
        ("none", "token", ""),
        ("mean", "token", "returns a mean: its loss is"),
        ("mean", "batch", "returns a mean: its loss is"),
        ("raises", "token", "raised KeyError: 'advantage' ("),
        ("nan", "token", "returns a loss that is not finite"),
        ("nan gradient", "token", "returns a gradient that is not finite"),
        ("bare", "token", "expected a pair (loss, sums by name)"),
        ("vector", "token", "expected a tensor without dimensions"),
        ("centred", "token", "a term depends on more than its token"),
        ("centred", "sequence", 'depends on more than its sequence; give the objective a wider scope than "sequence"'),
        ("centred", "batch", ""),
        ("sequences", "token", "has no sequences; give the objective the scope"),
        ("sequences", "sequence", ""),
        ("wants a reference", "token", "where the inputs that a run need not have are None"),
        ("asks for a reference", "token", ""),
        ("constant", "token", "returns 1 for no tokens; expected 0"),
        ("mean in the sums", "token", "the sum 'largest' is"),
        ("any", "token", "the sum 'any' is 1"),
        ("attached", "token", "returns the sum 'terms' with a gradient; detach it"),
        ("mean of ratios", "batch", "its gradient by the log-probs is half as large"),
        ("mean bonus", "batch", "its gradient by the entropies is half as large"),
        ("mean reported", "batch", "the sum 'entropy' is"),
        ("drawn", "batch", "is not deterministic: its loss is"),
        ("detached", "token", "returned a loss without a gradient"),
        ("none", "page", ".scope is 'page'; expected token, sequence, batch"),
    ],
)
def test_faults_are_named(fault: str, scope: str, expected: str) -> None:
    sentences = list(faults(Faulty(fault, scope)))
    assert any(expected in line for line in sentences) if expected else not sentences, sentences
    assert all(line.startswith("Faulty") for line in sentences)
    assert all("finite" in line for line in sentences) or "nan" not in fault


@dataclass(frozen=True)
class OnlyOffPolicy(Faulty):
    on_policy: bool = False

    def __call__(self, log_probs: Any, entropies: Any, tokens: Any) -> Any:
        return (log_probs.mean() * 0 + log_probs[1] if self.on_policy else -(tokens.advantages * log_probs).sum()), {}


def test_an_objective_is_tried_on_policy_and_off() -> None:
    assert list(faults(OnlyOffPolicy("none"))), "the fault shows only on policy"


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_the_probe_lets_each_objectives_own_part_act(name: str) -> None:
    """With no parameters given: tokens are clipped, a few and not all. Dr. GRPO's part is its divisor."""
    generator = torch.Generator().manual_seed(4)
    old = -torch.rand(300, generator=generator) - 0.1
    log_probs = old + 0.2 * torch.randn(300, generator=generator)
    advantages = torch.randn(30, generator=generator).repeat_interleave(10)
    index = torch.arange(30).repeat_interleave(10)
    sequences = Sequences(index, torch.full((30,), 10))
    tokens = TokenInputs(advantages, old, old, old, sequences=sequences)
    _, sums = probe_objective("float32", name)(log_probs, torch.ones(300), tokens)
    if name == "dr_grpo":
        _, whole = probe_objective("float32", name, {"length_share": 1.0})(log_probs, torch.ones(300), tokens)
        assert sums["loss"] != whole["loss"]
    assert 0 < sums["clipped"] < 300
