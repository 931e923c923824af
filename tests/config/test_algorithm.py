"""The algorithm's switches at the door: what cannot go together is refused with its numbers and a way out.

Not proven here: what the switches do (tests/rl), and that a reference's weights can be read (tests/convert).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from or1_megatron.config.load import ConfigError, load_config
from or1_megatron.config.schema import Config
from or1_megatron.sizing.memory import STATE
from or1_megatron.sizing.run_plan import PlanError, check_reference, plan

BASE = """\
run: {dir: runs/x}
model: {hf: model, dtype: float32}
data: {train: [{path: a.jsonl}]}
stages:
  - {name: one, steps: 5, max_response_tokens: 64, prompts_per_step: 8, prompts_per_update: 8, group_size: 4}
rollout: {kv_cache_bytes: 67108864}
"""
MODEL: dict[str, Any] = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 61,
    "max_position_embeddings": 4096, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip


def load(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    return load_config(path, overrides)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("algorithm.loss.dual_clip=1.0", "dual_clip: found 1.0 (number), expected greater than 1"),
        ("algorithm.loss.clip_low=-0.2", "clip_low: found -0.2 (number), expected greater than or equal to 0"),
        ("algorithm.loss.clip_low=1.5", "clip_low: found 1.5 (number), expected less than or equal to 1"),
        ("algorithm.loss.aggregation=mean", "expected 'token_mean', 'response_mean' or 'released-code'"),
        ("algorithm.correction.cap=0.5", "cap: found 0.5 (number), expected greater than 1"),
        ("algorithm.kl.coefficient=1e-3", "kl: coefficient = 0.001 needs a policy to keep to; set algorithm.kl.ref"),
        ("algorithm.entropy={mode: adaptive, delta: 0.0}", "delta = 0 and coefficient = 0 (c_0) never acts"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(tmp_path, override)
    assert f"--set {override.split('=')[0]}" in str(error.value) and expected in str(error.value)


def test_what_works_on_clipped_tokens_needs_several_sgd_steps(tmp_path: Path) -> None:
    setting = "algorithm.loss.dual_clip=3.0"
    with pytest.raises(PlanError, match=r"algorithm\.loss\.dual_clip = 3\.0 works on tokens whose ratio has moved"):
        plan(load(tmp_path, setting), MODEL)
    plan(load(tmp_path, setting, "stages.0.reuse=2"), MODEL)
    # Stale rollouts without a correction: rho is against the engines' log-probs, and the clip closes at N_SGD 1 too.
    stale = load(tmp_path, setting, "rollout.max_staleness=1", "rollout.placement=separate")
    plan(stale, MODEL)
    corrected = ("rollout.max_staleness=1", "rollout.placement=separate", "algorithm.correction.mode=truncated")
    with pytest.raises(PlanError, match="works on tokens whose ratio has moved"):
        plan(load(tmp_path, setting, *corrected), MODEL)


def test_what_the_objective_cannot_be_computed_with_is_refused_at_once(tmp_path: Path) -> None:
    """The objective's own contradictions, and a penalty on length that is longer than a response."""
    overrides = ("algorithm.objective.name=gspo", "algorithm.advantage.overlong_tokens=99999")
    with pytest.raises(PlanError, match="gspo is a mean over responses") as error:
        plan(load(tmp_path, *overrides), MODEL)
    assert "overlong_tokens = 99999 is not less than max_response_tokens = " in str(error.value)
    with pytest.raises(PlanError, match="unknown objective; did you mean gspo"):
        plan(load(tmp_path, "algorithm.objective.name=gsop"), MODEL)


def test_warnings_of_what_has_no_effect_or_a_hidden_one(tmp_path: Path) -> None:
    overrides = ("algorithm.loss.clip_high=0.28", "stages.0.top_p=0.9")
    said = "\n".join(plan(load(tmp_path, *overrides), MODEL).warnings)
    assert "clip_low = 0.2 and clip_high = 0.28 have no effect" in said
    assert "top_p = 0.9: responses are drawn from the nucleus" in said
    assert not any("no effect" in line for line in plan(load(tmp_path, "stages.0.reuse=2"), MODEL).warnings)
    gspo = ("algorithm.objective.name=gspo", "algorithm.loss.aggregation=response_mean")
    bounds = ("algorithm.loss.clip_low=3e-4", "algorithm.loss.clip_high=4e-4")
    clips = [
        any("they clip nothing" in line for line in plan(load(tmp_path, *overrides_seen), MODEL).warnings)
        for overrides_seen in (gspo, (*gspo, *bounds))
    ]
    assert clips == [True, False]
    separate = ("rollout.placement=separate", "rollout.max_staleness=2")
    for wrong, right, expected in (
        (
            (*separate, "stages.0.refill_prompts=4"),
            "stages.0.refill_prompts=0",
            "works as 1, because with refill_prompts",
        ),
        (("algorithm.objective.name=cispo",), "algorithm.loss.clip_low=1", "its paper has no lower bound"),
    ):
        for overrides_seen, warned in ((wrong, True), ((*wrong, right), False)):
            assert any(expected in line for line in plan(load(tmp_path, *overrides_seen), MODEL).warnings) == warned


def test_the_references_weights_count(tmp_path: Path) -> None:
    """fp32: weights 4, gradients 4, moments 8 bytes, and 4 more for a reference."""
    alone = plan(load(tmp_path), MODEL).memory[1].parts[STATE]
    with_reference = plan(load(tmp_path, "algorithm.kl.reference=model"), MODEL).memory[1].parts[STATE]
    assert with_reference == alone * 20 // 16


def test_a_reference_of_another_architecture_is_refused(tmp_path: Path) -> None:
    def folder(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(MODEL | changes))
        return tmp_path

    check_reference(folder(max_position_embeddings=512, sliding_window=4096, use_sliding_window=False), MODEL)
    with pytest.raises(PlanError, match=r"hidden 128 \(the model has 64\), head_dim 64 \(the model has 32\)"):
        check_reference(folder(hidden_size=128), MODEL)
    with pytest.raises(PlanError, match=r"model_type llama \(the model has qwen2\)"):
        check_reference(folder(model_type="llama", architectures=["LlamaForCausalLM"]), MODEL)
