"""The released models' recipes say what the report's table says, and every layout of theirs works out on paper.

Not proven here: that they fit or run on the GPUs that they are for; none was at hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.sizing.memory import memory_short
from or1_megatron.sizing.run_plan import plan_run

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs/models"

# The report's table: steps, T, D_R, D_T, group size, N_SGD of each stage; whole steps of a run.
TABLE = {
    "or1_math_7b": [
        (740, 8192, 256, 128, 16, 2),
        (1000, 16384, 256, 128, 16, 2),
        (340, 32768, 256, 128, 16, 2),
        (80, 32768, 128, 64, 64, 2),
    ],
    "or1_7b": [(660, 16384, 256, 256, 16, 1), (660, 32768, 160, 160, 32, 1)],
    "or1_32b": [(760, 16384, 256, 256, 16, 1), (370, 24576, 160, 160, 32, 1)],
}
LAYOUTS = {
    "or1_math_7b": ("deepseek_r1_distill_qwen_7b", ["7b_4_nodes_h800", "7b_8_nodes_h800", "7b_2_nodes_h200"]),
    "or1_7b": ("deepseek_r1_distill_qwen_7b", ["7b_4_nodes_h800", "7b_8_nodes_h800", "7b_2_nodes_h200"]),
    "or1_32b": ("deepseek_r1_distill_qwen_32b", ["32b_16_nodes_h800", "32b_32_nodes_h800", "32b_8_nodes_h200"]),
    "or1_72b": ("qwen2_5_72b", ["72b_32_nodes_h800"]),
    "or1_235b": ("qwen3_235b_a22b", ["235b_32_nodes_h800"]),
}
RELEASED = [(740, 8192, 256, 256, 16, 1), (1000, 16384, 256, 256, 16, 1), (340, 32768, 256, 256, 16, 1)]
NODES_OF_8 = {layout: int(layout.split("_")[1]) for _, layouts in LAYOUTS.values() for layout in layouts}


def load(recipe: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("LAYOUT", layout)
    return load_config(ROOT / f"configs/recipes/{recipe}.yaml")


def test_every_recipe_is_looked_at_here() -> None:
    assert {path.stem for path in (ROOT / "configs/recipes").glob("*.yaml")} == set(LAYOUTS)
    assert {path.stem for path in (ROOT / "configs/recipes/released").glob("*.yaml")} == {"or1_7b", "or1_32b"}
    there = {path.stem for path in (ROOT / "configs/layouts").glob("*.yaml")}
    assert set(NODES_OF_8) | {"gpu", "cpu_2_ranks"} == there


@pytest.mark.parametrize("recipe", ["or1_7b", "or1_32b"])
def test_the_released_scripts_beside_the_papers_recipes(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' figures, by hand from commit 64e96af. The plan warns at most of rows."""
    config = load(f"released/{recipe}", LAYOUTS[recipe][1][0], monkeypatch)
    stages = [
        (s.steps, s.max_response_tokens, s.prompts_per_step, s.prompts_per_update, s.group_size, s.sgd_steps)
        for s in config.stages
    ]
    assert stages == RELEASED
    assert all(s.restart_optimizer and s.restart_controller and not s.filter_solved for s in config.stages[1:])
    entropy, evaluate = config.algorithm.entropy, config.evaluate
    assert (entropy.target, entropy.delta, entropy.maximum) == (0.2, 0.0001, 0.005)
    assert (entropy.coefficient, entropy.measured_on, entropy.gate) == (0.0, "kept", "late")
    assert (config.algorithm.loss.aggregation, config.verify.math.judge) == ("released-code", "math_verify")
    evaluated = [(data.path.name, data.temperature or evaluate.temperature) for data in evaluate.data]
    assert evaluated == [(f"aime{year}.jsonl", at) for at in (0.6, 1) for year in (24, 25)]
    assert (evaluate.every_steps, {data.samples_during for data in evaluate.data}) == (20, {8})
    assert {source.split: source.repeat for source in config.data.train} == {"math": 1, "code": 2}
    paper = load(recipe, LAYOUTS[recipe][1][0], monkeypatch)
    assert (config.optimizer, config.algorithm.advantage) == (paper.optimizer, paper.algorithm.advantage)
    warnings = plan_run(config, "cuda", MODELS / LAYOUTS[recipe][0]).warnings
    assert all("close to the longest sequence" in line for line in warnings)


@pytest.mark.parametrize("recipe", TABLE)
def test_the_released_models_are_trained_as_the_report_says(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(recipe, LAYOUTS[recipe][1][0], monkeypatch)
    stages = [
        (s.steps, s.max_response_tokens, s.prompts_per_step, s.prompts_per_update, s.group_size, s.sgd_steps)
        for s in config.stages
    ]
    assert stages == TABLE[recipe]
    assert all((s.temperature, s.top_p, s.reuse) == (1.0, 1.0, 1) for s in config.stages)
    optimizer = config.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.decay_steps) == (1e-6, 0, 0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.weight_decay, optimizer.clip_grad) == (0.9, 0.999, 0.01, 1.0)
    algorithm = config.algorithm
    assert (algorithm.loss.clip_low, algorithm.loss.clip_high) == (0.2, 0.2)
    assert (algorithm.entropy.mode, algorithm.entropy.target) == ("adaptive", 0.2)
    assert (algorithm.advantage.truncation_mask, algorithm.advantage.reject_uniform_groups) == ("none", True)
    assert config.model.dtype == "bfloat16"
    assert config.data.max_prompt_tokens == 2048
    mixture = {source.split: source.repeat for source in config.data.train}
    assert mixture == ({"math": 1} if recipe == "or1_math_7b" else {"math": 1, "code": 2})


@pytest.mark.parametrize(("recipe", "layout"), [(r, layout) for r, (_, ls) in LAYOUTS.items() for layout in ls])
def test_every_layout_works_out(recipe: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No conflict, no lack of memory; no warning of rows that pad, of a starved pipeline; nodes of 8 GPUs, all used."""
    config = load(recipe, layout, monkeypatch)
    planned = plan_run(config, "cuda", MODELS / LAYOUTS[recipe][0])
    assert not planned.warnings and config.cluster.gpu_memory_gb is not None
    assert not memory_short(config, planned.shape, "cuda", int(config.cluster.gpu_memory_gb * 1e9))
    parallel, rollout = config.parallel, config.rollout
    assert parallel.ranks == config.devices == 8 * NODES_OF_8[layout]
    assert rollout.engines * rollout.tensor_parallel == parallel.ranks
    assert 8 % rollout.tensor_parallel == 0 and 8 % parallel.tensor == 0  # neither spans nodes
