"""The plan's arithmetic against figures worked by hand, and every refusal with its numbers.

Not proven here: that a plan which is accepted fits in memory (test_memory has the estimate of it), and that the model
needs the multiples of a layout (the layout invariance tests run them).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.console import Console

from or1_megatron.config.recipes import named
from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.plan.tables import evaluations_within, render, stage_rows
from or1_megatron.sizing.conflicts import longest_row
from or1_megatron.sizing.memory import ProcessMemory
from or1_megatron.sizing.parallel_layouts import batch_layout
from or1_megatron.sizing.run_plan import PlanError, plan
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.shape import Shape

QWEN_7B = read_hf_config(named("shape")["deepseek_r1_distill_qwen_7b"])


def or1_7b(**changes: Any) -> Config:
    """Stage 1 and 2 of OR1-7B (RECIPE section 4) on 32 GPUs, with sections replaced by ``changes``."""
    sections: dict[str, Any] = {
        "run": {"dir": "runs/x"},
        "model": {"hf": "m"},
        "data": {"train": [{"path": "a.jsonl"}]},
        "stages": [
            {"name": "1", "steps": 660, "max_response_tokens": 16384, "prompts_per_step": 256,
             "prompts_per_update": 256, "group_size": 16},
            {"name": "2", "steps": 660, "max_response_tokens": 32768, "prompts_per_step": 160,
             "prompts_per_update": 80, "group_size": 32},
        ],
        "parallel": {"ranks": 32, "tensor": 2, "sequence": True, "micro_batch_tokens": 36864},
        "rollout": {"engines": 32},
        "handoff": {"probe_bound": 0.3},
        "evaluate": {"data": [{"path": "e.jsonl"}]},
    }  # fmt: skip
    return Config.model_validate(sections | changes)


def _state(rank: ProcessMemory) -> int:
    return rank.parts["weights"] + rank.parts["gradients, optimizer"]


def conflicts(
    config: Config, hf: dict[str, Any] = QWEN_7B, prompts: list[int] | None = None, device: Any = "cuda"
) -> list[str]:
    with pytest.raises(PlanError) as error:
        plan(config, hf, prompts, device)
    return [line.removeprefix("  - ") for line in str(error.value).splitlines()[1:]]


def test_the_batch_arithmetic_of_or1_7b() -> None:
    mix = {"train": [{"path": "math.jsonl"}, {"path": "code.jsonl", "repeat": 2}]}
    found = plan(or1_7b(data=mix), QWEN_7B, problems=[105_055, 14_057], device="cuda")
    rows = stage_rows(found)
    assert rows["responses per step"] == ["4,096", "5,120"]
    assert rows["samples per SGD step"] == ["4,096", "2,560"] and rows["  per data-parallel rank"] == ["256", "160"]
    assert rows["tokens per step, at most"] == [f"{4096 * (2048 + 16384):,}", f"{5120 * (2048 + 32768):,}"]
    # A row of 36864 tokens holds two sequences of 18432: 256 samples need 128 rows.
    assert rows["micro-batches per rank, at most"] == ["128", "160"]
    assert rows["engine waves per step"] == [f"{4096 / (32 * 256):.2f}", f"{5120 / (32 * 256):.2f}"]
    assert rows["  in epochs"] == [f"{660 * 256 / 133_169:.2f}", f"{660 * 160 / 133_169:.2f}"]
    assert (found.config.devices, longest_row(found.config)) == (32, 34816)
    (warning,) = found.warnings
    assert "micro_batch_tokens = 36864 is close to the longest sequence" in warning


def test_parameters_and_bytes_of_a_7b() -> None:
    """The published count is 7,615,616,512, of which q, k and v biases are 28 * 4608 = 129,024."""
    shape = Shape.of(QWEN_7B)
    assert shape.parameters == 7_615_616_512 - 129_024
    # Keys and values: 2 * 28 layers * 4 heads * 128 * 2 bytes.
    assert shape.kv_bytes_per_token("bfloat16") == 57_344
    found = plan(or1_7b(), QWEN_7B, device="cuda")
    # Half the weights: 2 + 4 bytes each, and 12 bytes each over 16 data-parallel ranks.
    half = shape.parameters / 2
    assert _state(found.memory[0]) == pytest.approx(half * 6 + half * 12 / 16, abs=2)


QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


def test_parameters_of_a_mixture() -> None:
    """The published count is 30,532,122,624, of which the norms of queries and keys are 48 * 2 * 128 = 12,288.

    A token is computed by 8 of 128 experts: the other 120, of 3 * 2048 * 768 weights each in 48 layers, and the
    embedding multiply nothing.
    """
    shape = Shape.of(QWEN3_30B_A3B)
    assert shape.parameters == 30_532_122_624 - 12_288
    assert shape.expert_parameters() == 48 * 128 * 3 * 2048 * 768
    assert shape.multiplied_weights == shape.parameters - 151_936 * 2048 - 48 * 120 * 3 * 2048 * 768


def test_linear_attention_keeps_a_state_and_few_keys() -> None:
    """By hand: 12 of 48 layers have full attention, with 2 key/value heads of 256. In each of the others a sequence has
    32 matrices of 128 * 128 in fp32, and 3 tokens of 2 * 16 * 128 + 32 * 128 convolved channels in bf16. The model card
    says 80B parameters, of which 3B work."""
    hf = read_hf_config(named("shape")["qwen3_next_80b_a3b"])
    shape = Shape.of(hf)
    assert shape.kv_bytes_per_token("bfloat16") == 12 * 2 * 2 * 256 * 2
    assert shape.state_bytes("bfloat16") == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert shape.attention_width == 12 * 16 * 256
    other = Shape.of(read_hf_config(named("shape")["gpt_oss_20b"]))  # 12 layers see 128 tokens, 12 all; 8 heads of 64
    assert (other.kv_bytes_per_token("bfloat16"), other.state_bytes("bfloat16")) == (24576, 128 * 24576)
    exact = sum(math.prod(size) for size in family_of(hf).shapes(hf).values())
    assert exact == pytest.approx(79.7e9, rel=1e-3) and shape.parameters == pytest.approx(exact, rel=1e-4)
    assert 3e9 < shape.multiplied_weights < 4e9
    tight = or1_7b(rollout={"kv_cache_bytes": 32 * shape.state_bytes("bfloat16"), "max_concurrent": 32})
    assert any(
        f"holds 0 tokens, fewer than one sequence of {tight.longest_sequence}" in x for x in conflicts(tight, hf)
    )
    (line,) = [x for x in conflicts(or1_7b(), {**hf, "linear_key_head_dim": 64}, device="cpu") if "linear_key" in x]
    assert "are bfloat16, 64, 128; vLLM's linear attention on CPU computes bfloat16, 64, 64 or bfloat16, 128" in line
    split = or1_7b(parallel={"ranks": 32, "tensor": 16, "context": 2, "sequence": True, "micro_batch_tokens": 36864})
    assert any("context = 32 does not divide the model's linear_num_key_heads = 16" in x for x in conflicts(split, hf))


def test_experts_are_spread() -> None:
    """Dense weights: 6 bytes, and 12 over 16 ranks. Experts: an eighth of them on each rank, 12 bytes over 2 ranks."""
    parallel = {"ranks": 16, "expert": 8, "micro_batch_tokens": 36864}
    shape = Shape.of(QWEN3_30B_A3B)
    experts, dense = shape.expert_parameters() / 8, shape.parameters - shape.expert_parameters()
    found = plan(or1_7b(parallel=parallel, rollout={"engines": 16}), QWEN3_30B_A3B, device="cuda")
    assert _state(found.memory[0]) == pytest.approx(dense * (6 + 12 / 16) + experts * (6 + 12 / 2), abs=2)
    lines = conflicts(or1_7b(parallel={**parallel, "ranks": 24, "expert": 12}), QWEN3_30B_A3B)
    assert any("expert = 12 does not divide the model's 128 experts" in line for line in lines)
    lines = conflicts(or1_7b(parallel={"ranks": 4, "tensor": 4, "micro_batch_tokens": 36864}), QWEN3_30B_A3B)
    assert any("needs parallel.sequence=true for a mixture of experts" in line for line in lines)


def test_separate_placement_adds_devices() -> None:
    config = or1_7b(rollout={"engines": 8, "tensor_parallel": 4, "placement": "separate"})
    plan(config, QWEN_7B, device="cuda")
    assert config.devices == 64


STAGE = {"name": "s", "steps": 60, "max_response_tokens": 64, "prompts_per_step": 64, "prompts_per_update": 64,
         "group_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"parallel": {"ranks": 8, "tensor": 8, "micro_batch_tokens": 36864}},
         ["tensor = 8 does not divide", "num_attention_heads = 28", "1, 2, 4, 7, 14, 28"]),
        ({"parallel": {"ranks": 14, "tensor": 14, "micro_batch_tokens": 36864}},
         ["tensor = 14 neither divides", "num_key_value_heads = 4", "a multiple"]),
        ({"parallel": {"ranks": 2, "expert": 2, "micro_batch_tokens": 36864}}, ["expert = 2, but the model has no"]),
        ({"parallel": {"ranks": 8, "pipeline": 8, "micro_batch_tokens": 36864}},
         ["8 * 1 = 8 does not divide", "num_hidden_layers = 28"]),
        ({"parallel": {"ranks": 8, "pipeline": 4, "virtual_pipeline": 2, "micro_batch_tokens": 36864}},
         ["4 * 2 = 8 does not divide", "num_hidden_layers = 28"]),
        ({"parallel": {"ranks": 4, "pipeline": 4, "layers_per_stage": [6, 8, 8, 5], "micro_batch_tokens": 36864}},
         ["layers_per_stage = [6, 8, 8, 5] holds 27 layers", "is 28"]),
        ({"parallel": {"ranks": 32, "micro_batch_tokens": 20000}},
         ["stage '2'", "micro_batch_tokens = 20000", "2048 + max_response_tokens 32768", "34816"]),
        ({"rollout": {"engines": 1, "tensor_parallel": 8}}, ["tensor_parallel = 8", "num_attention_heads = 28"]),
        ({"rollout": {"engines": 4, "tensor_parallel": 14}}, ["tensor_parallel = 14 neither divides", "= 4"]),
        ({"rollout": {"router_replay": True}}, ["router_replay = true, but the model has no experts"]),
        ({"rollout": {"engines": 64}}, ["64 * rollout.tensor_parallel 1 = 64 GPUs", "share the 32"]),
        ({"rollout": {"kv_cache_bytes": 57344 * 1000}}, ["holds 1000 tokens", "34816", str(57344 * 34816)]),
        ({"evaluate": {"every_steps": 10}}, ["every_steps = 10, but evaluate.data is empty"]),
        ({"evaluate": {"data": [{"path": "e"}], "max_response_tokens": 131072}}, ["133120 exceeds"]),
        ({"evaluate": {"data": [{"path": "e", "max_response_tokens": 131072}]}}, ["133120 exceeds"]),
        ({"stages": [{**STAGE, "refill_prompts": 8}], "algorithm": {"advantage": {"reject_uniform_groups": False}}},
         ["stage 's': refill_prompts = 8", "reject_uniform_groups=false"]),
        ({"rollout": {"max_staleness": 1}}, ["max_staleness = 1", "placement=separate"]),
        ({"stages": [{**STAGE, "evaluate": {"every_steps": 5}}], "evaluate": {}},
         ["stage 's': evaluate.every_steps = 5", "is empty"]),
        ({"stages": [{**STAGE, "plateau": {"metric": "accuracy"}}]}, ["'accuracy' is no metric of this run"]),
        ({"stages": [{**STAGE, "plateau": {"metric": "evaluation/e/accuracy"}}], "evaluate": {"data": [{"path": "e"}]}},
         ["is no metric of this run", "['e']"]),
        ({"stages": [{**STAGE, "plateau": {"metric": "evaluation/accuracy"}}], "evaluate": {"data": [{"path": "e"}]}},
         ["needs evaluations within the stage"]),
        ({"stages": [{**STAGE, "plateau": {"window": 31}}]}, ["plateau.window = 31", "60 steps", "no second block"]),
    ],
)  # fmt: skip
def test_refusals_name_their_numbers(changes: dict[str, Any], parts: list[str]) -> None:
    lines = conflicts(or1_7b(**changes))
    assert any(all(part in line for part in parts) for line in lines), lines


def test_more_refusals_of_batch_and_length() -> None:
    short = {**QWEN_7B, "max_position_embeddings": 32768}
    assert any("= 34816 exceeds" in line and "by 2048" in line for line in conflicts(or1_7b(), short))
    assert any("has 200 problems" in line for line in conflicts(or1_7b(), prompts=[200]))
    thin = {**STAGE, "prompts_per_step": 4, "prompts_per_update": 1}
    assert any("8 samples cannot feed 16" in line for line in conflicts(or1_7b(stages=[thin])))


def test_all_conflicts_are_told_at_once() -> None:
    lines = conflicts(or1_7b(parallel={"ranks": 8, "tensor": 8, "micro_batch_tokens": 512}))
    assert len(lines) >= 4


def test_on_cpu_the_cache_must_be_sized_and_the_head_dimension_known() -> None:
    tiny = {**QWEN_7B, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    lines = conflicts(or1_7b(), tiny, device="cpu")
    assert any("kv_cache_bytes is not set" in line for line in lines)
    assert any("head_dim = 16" in line for line in lines)


def test_warnings() -> None:
    stage = {**STAGE, "steps": 1, "prompts_per_update": 16}
    found = plan(or1_7b(stages=[stage], handoff={}, evaluate={}), QWEN_7B, device="cuda")
    text = "\n".join(found.warnings)
    assert "N_SGD = 4" in text
    assert "evaluate.data is empty" in text and "decay_steps" not in text
    for decay, expected in {3: "optimizer.decay_steps = 3 of up to 4 SGD steps: the learning rate is 0", 4: ""}.items():
        falling = plan(or1_7b(stages=[stage], optimizer={"decay_steps": decay}), QWEN_7B, device="cuda")
        assert ("the learning rate is 0" in "\n".join(falling.warnings)) == bool(expected)
        assert expected in "\n".join(falling.warnings)


def test_a_step_draws_problems_that_all_differ() -> None:
    """256 a step of 200 problems twice each, or of 300 of which the stage's mixture leaves 200: too few. With 280 and
    20 an epoch of stage 1 (twice the second) has 320, of a mixture without the second 280."""
    twice = {"train": [{"path": "a.jsonl", "repeat": 2}]}
    assert any("has 200 problems, and those of a step" in x for x in conflicts(or1_7b(data=twice), prompts=[200]))
    mix = {"train": [{"path": "a.jsonl"}, {"path": "b.jsonl", "repeat": 2}]}
    stages: list[Any] = [{**STAGE, "steps": 10, "prompts_per_step": 256, "prompts_per_update": 256}]
    stages.append({**stages[0], "name": "2", "mixture": {"a": 1, "b": 0}})
    (line,) = conflicts(or1_7b(data=mix, stages=stages), prompts=[200, 100])
    assert "stage '2'" in line and "200 problems in the sources of the stage's mixture" in line
    found = plan(or1_7b(data={**mix, "difficulty_model": "m"}, stages=stages), QWEN_7B, [280, 20], "cuda")
    rows = stage_rows(found)
    assert rows["problems per epoch"] == ["320", "280"]
    assert rows["  in epochs"] == [f"{2560 / 320:.2f}", f"{2560 / 280:.2f}"]
    stages[0]["refill_prompts"] = 100
    said = plan(or1_7b(data=mix, stages=stages), QWEN_7B, [280, 20], "cuda").warnings
    assert sum("refill_prompts = 100, but there are 44 problems beyond" in line for line in said) == 1


def test_the_head_dimensions_are_those_of_the_installed_engine() -> None:
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    from or1_megatron.sizing.conflicts import CPU_HEAD_DIMS

    assert list(CPU_HEAD_DIMS) == backend.CPUAttentionBackend.get_supported_head_sizes()


def shown(config: Config, problems: list[int] | None) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(plan(config, QWEN_7B, problems, "cuda")))
    return console.export_text()


def test_the_plan_can_be_read() -> None:
    text = shown(or1_7b(), [133_169])
    for part in (
        "32 ranks = TP 2 x PP 1 x CP 1 x DP 16", "7,615.5 M", "4,096", "D_R", "N_SGD", "1.27",
        "133,169 a", "the recipe's",
    ):  # fmt: skip
        assert part in text, part
    assert "refill" not in text and "plateau" not in text  # no stage has one


def test_what_differs_from_the_recipe_is_shown() -> None:
    algorithm = {"loss": {"clip_high": 0.25}, "entropy": {"maximum": 0.01}}
    stages = [{**STAGE, "reuse": 2, "temperature": 0.6, "refill_prompts": 8, "plateau": {"window": 3}}]
    config = or1_7b(algorithm=algorithm, stages=stages, optimizer={"warmup_steps": 10})
    text = shown(config, None)
    for part in ("loss.clip_high 0.25, entropy.maximum 0.01", "warmup_steps 10", "accuracy/all"):
        assert part in text, part
    rows = stage_rows(plan(config, QWEN_7B, None, "cuda"))
    assert (rows["temperature"], rows["refill, prompts at most"]) == (["0.6"], ["8"])


def test_how_often_a_stage_is_evaluated() -> None:
    """Stage 1 has steps 1 to 660, of which 16 are multiples of 40; stage 2 has steps 661 to 1,320, of which 16 are (680
    to 1,280; the last step is evaluated as a whole instead), and 7 are multiples of 100."""
    evaluate = {"data": [{"path": "a.jsonl"}], "every_steps": 40}
    config = or1_7b(evaluate=evaluate)
    assert [evaluations_within(config, index) for index in (0, 1)] == [16, 16]
    stages = [stage.model_dump() for stage in config.stages]
    stages[1]["evaluate"] = {"every_steps": 100}
    assert evaluations_within(or1_7b(evaluate=evaluate, stages=stages), 1) == 7


def test_multiples_of_the_layout() -> None:
    parallel = ParallelConfig(
        ranks=32, tensor=2, context=2, pipeline=4, virtual_pipeline=7, sequence=True, micro_batch_tokens=65536
    )
    found = batch_layout(parallel, QWEN_7B)
    assert (found.data_ranks, found.budget_tokens, found.rows_multiple) == (2, 65536, 4)
    assert (found.alignment, found.sequence_alignment) == (8, 4)
    plain = batch_layout(ParallelConfig(ranks=4, tensor=2, pipeline=2), QWEN_7B)
    assert (plain.data_ranks, plain.alignment, plain.sequence_alignment, plain.rows_multiple) == (1, 4, 1, 1)


def test_cost_of_the_model() -> None:
    """Attention overtakes the rest where 2 * 28 * 3584 * L = 2 * 7.07e9: at 70K tokens. A tied output layer is still
    multiplied with, so untying changes nothing; biases (below 0.1%) are left out."""
    cost = batch_layout(ParallelConfig(), QWEN_7B).cost
    assert cost.linear == pytest.approx(2 * (7_615_616_512 - 544_997_376), rel=1e-3)
    assert cost.quadratic == 2 * 28 * 3584
    assert cost.linear / cost.quadratic == pytest.approx(70_450, rel=1e-3)
    assert batch_layout(ParallelConfig(), {**QWEN_7B, "tie_word_embeddings": True}).cost == cost
