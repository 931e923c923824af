"""The tables of all families against what transformers says of the same configs, and their own inverses.

Not proven here: that Megatron computes with them what transformers computes (tests/parallel/test_families), and files
that lack tensors or have others (tests/train/test_bad_input).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import FAMILIES as TINY
from tiny_models import GPT_OSS
from transformers import GptOssConfig

from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.families import FAMILIES, ModelError, family_of, read_hf_config
from or1_megatron.weights.files import check_weight_files, is_draft
from or1_megatron.weights.qwen3_moe import QWEN3_MOE, sparse
from or1_megatron.weights.rope import context_tokens, rope_frequencies
from or1_megatron.weights.shape import Shape
from or1_megatron.weights.slicing import Cut, cut, join
from or1_megatron.weights.stacked_experts import file_shapes, joined, part_of, split

ALL = list(TINY)
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}


def trained(folder: Path, hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the folder's tensors but those that draft tokens."""
    return {at: tensor for at, tensor in load_file(folder / "model.safetensors").items() if not is_draft(at, hf)}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tied", [False, True])
def test_table_implies_just_what_transformers_saves(name: str, tied: bool, tiny: Callable[..., Path]) -> None:
    folder = tiny(name, tie_word_embeddings=tied) if tied else tiny(name)
    hf = read_hf_config(folder)
    saved = {at: tuple(tensor.shape) for at, tensor in trained(folder, hf).items()}
    assert file_shapes(family_of(hf).shapes(hf)) == saved
    adapted = [at.replace("lora_A.", "") for at in AdapterTable(family_of(hf), hf, 3, ()).names if ".lora_A." in at]
    assert {len(saved[at]) for at in adapted} == {2}  # a matrix: no convolution
    assert 1 <= sum(map(math.prod, saved.values())) / Shape.of(hf).parameters < 1.02  # biases, norms of heads
    check_weight_files(folder, hf)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_fuse_cut_join_split_is_the_identity(name: str, size: int, tiny: Callable[..., Path]) -> None:
    """Also with fewer key/value heads than ranks: the cut then goes through a group, and nothing is held twice."""
    folder = tiny(name)
    hf = read_hf_config(folder)
    saved = trained(folder, hf)
    tensors = split(saved)
    rows = list(family_of(hf).rows(hf))
    assert len({row.megatron for row in rows}) == len(rows)
    back: dict[str, torch.Tensor] = {}
    for row in rows:
        whole = row.layout.fuse([tensors[at] for at in row.hf], hf)
        parts = [cut(whole, row.cut, rank, size) for rank in range(size)]
        if row.cut is not Cut.WHOLE and row.cut is not Cut.VOCABULARY:
            assert sum(part.numel() for part in parts) == whole.numel()
        back.update(zip(row.hf, row.layout.split(join(parts, row.cut), hf), strict=True))
    assert back.keys() == tensors.keys()
    files = dict(joined(back.items(), file_shapes(family_of(hf).shapes(hf))))
    assert files.keys() == saved.keys()
    assert all(files[at].equal(tensor) for at, tensor in saved.items())  # type: ignore[union-attr]


def test_parts_of_a_stack_by_hand(tiny: Callable[..., Path]) -> None:
    """Columns of gate and up take turns in an expert's entry, which can have no adapters."""
    hf = read_hf_config(tiny("gpt_oss"))
    stack = load_file(tiny("gpt_oss") / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj"]  # [4, 64, 192]
    row = next(
        row for row in family_of(hf).rows(hf) if "layers.1.mlp.experts.local_experts.3.linear_fc1.w" in row.megatron
    )
    gate, up = (part.of(stack[3]) for part in map(part_of, row.hf) if part is not None)
    assert torch.equal(gate[5], stack[3, :, 10]) and torch.equal(up[5], stack[3, :, 11])
    with pytest.raises(ModelError, match=r"no linear of a GptOssForCausalLM ends in gate_up_proj; its linears are k_p"):
        AdapterTable(family_of(hf), hf, 3, ("gate_up_proj",))


def test_rows_of_a_mixture_by_hand(tiny: Callable[..., Path]) -> None:
    """Layer 1 is dense, the others have 4 experts, numbered in the layer."""
    hf = read_hf_config(tiny("qwen3_moe"))
    by_name = {row.megatron: row for row in QWEN3_MOE.rows(hf)}
    row = by_name["decoder.layers.2.mlp.experts.local_experts.3.linear_fc1.weight"]
    assert row.hf == ("model.layers.2.mlp.experts.3.gate_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight")
    assert (row.expert, row.cut) == (3, Cut.HALVES)
    with pytest.raises(ModelError, match=r"ends in experts.2.gate_proj; did you mean experts.gate_proj, "):
        AdapterTable(QWEN3_MOE, hf, 3, ("experts.2.gate_proj", "experts.up_proj"))
    assert by_name["decoder.layers.0.mlp.router.weight"].hf == ("model.layers.0.mlp.gate.weight",)
    assert "decoder.layers.1.mlp.linear_fc1.weight" in by_name
    assert "decoder.layers.1.mlp.router.weight" not in by_name
    assert "decoder.layers.0.mlp.linear_fc1.weight" not in by_name
    assert sum(row.expert is not None for row in by_name.values()) == 3 * 4 * 2
    assert sparse({"decoder_sparse_step": 2}, 1) and not sparse({"decoder_sparse_step": 2}, 2)


def _oracle(hf: dict[str, Any]) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(**{key: value for key, value in hf.items() if key != "architectures"})
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return found


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 1e6, "head_dim": 96},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        # Llama 3.1 and 3.2 as released
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        {"rope_theta": 5e5, "head_dim": 64, "rope_scaling": {"rope_type": "llama3", "factor": 32.0,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
        # Qwen's way to long contexts, and YaRN's other keys
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
         "original_max_position_embeddings": 32768}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0,
         "truncate": False, "original_max_position_embeddings": 4096}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5,
         "original_max_position_embeddings": 4096}},
        {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 1.5,
         "original_max_position_embeddings": 4096}},
    ],
)  # fmt: skip
def test_rope_equals_transformers(rope: dict[str, Any]) -> None:
    hf = {**BASE, **rope}
    found, factor = rope_frequencies(hf)
    expected, expected_factor = _oracle(json.loads(json.dumps(hf)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_llama3_bands_by_hand() -> None:
    """Over 8192 tokens the pair with frequency f turns 8192 f / 2 pi times: above 4 it stays, below 1 it is divided."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    hf = {**BASE, "rope_theta": 5e5, "rope_scaling": {**scaling, "original_max_position_embeddings": 8192}}
    plain, _ = rope_frequencies({**BASE, "rope_theta": 5e5})
    found, _ = rope_frequencies(hf)
    for a, b in zip(plain.tolist(), found.tolist(), strict=True):
        turns = 8192 * a / (2 * math.pi)
        if turns >= 4:
            assert b == a
        elif turns <= 1:
            assert b == pytest.approx(a / 8)
        else:
            assert a / 8 < b < a


HYBRID = {f"linear_{key}": 4 for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")}
HYBRID["linear_conv_kernel_dim"] = 4
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("LlamaForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; expected"),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "(full_attention)"),
    ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attn_factor": 0.7}}, "attn_factor = 0.7"),
    ("LlamaForCausalLM", {"attention_bias": True}, "attention_bias = true"),
    ("LlamaForCausalLM", {"mlp_bias": True}, "mlp_bias = true"),
    ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("Qwen3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window = true"),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
    ("MistralForCausalLM", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
    ("MistralForCausalLM", {}, "sliding_window = 4096 is not supported"),
    ("Qwen3NextForCausalLM", {}, "lacks linear_num_key_heads, linear_num_value_heads, linear_key_head_dim"),
    ("Qwen3NextForCausalLM", {**HYBRID, "attention_bias": True}, "attention_bias = true"),
    ("Qwen3_5ForCausalLM", {**HYBRID, "attn_output_gate": False}, "attn_output_gate = False is not supported"),
    ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 24}, "layer_types is not supported"),
    ("GptOssForCausalLM", {"attention_bias": False}, "attention_bias = False is not supported; expected True"),
    ("GptOssForCausalLM", {"swiglu_limit": 10.0}, "swiglu_limit = 10.0 is not supported; expected 7.0"),
    (
        "GptOssForCausalLM",
        {"sliding_window": None, "num_local_experts": None},
        "lacks num_local_experts, sliding_window",
    ),
    ("GptOssForCausalLM", {"rope_scaling": None}, "rope_type = default is not supported; expected yarn"),
    ("GptOssForCausalLM", {"rope_scaling": {**GPT_OSS["rope_scaling"], "mscale": 0.7}}, "mscale = 0.7 is not"),
    ("GptOssForCausalLM", {"quantization_config": {"quant_method": "mxfp4"}}, "says how to make them"),
    ("Qwen3_5ForCausalLM", {**HYBRID, "layer_scale": True}, "layer_scale = True is not supported"),
]


@pytest.mark.parametrize(("architecture", "change", "expected"), REFUSED)
def test_what_is_not_computed_is_refused(architecture: str, change: dict[str, Any], expected: str) -> None:
    base = GPT_OSS if architecture == "GptOssForCausalLM" else BASE
    hf = {**base, "max_position_embeddings": 32768, **change, "architectures": [architecture]}
    with pytest.raises(ModelError, match=re.escape(expected)) as raised:
        family_of(hf)
    assert architecture in str(raised.value)


def test_a_config_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """No groups of heads where num_key_value_heads is null, and where it is absent for Llama: transformers' default."""
    sizes = {"num_hidden_layers": 2, "intermediate_size": 8, "rms_norm_eps": 1e-6, "vocab_size": 9, **BASE}

    def read(**changes: Any) -> dict[str, Any]:
        (tmp_path / "config.json").write_text(json.dumps({**sizes, **changes}))
        return read_hf_config(tmp_path)

    assert read()["num_key_value_heads"] == 32
    assert read(architectures=["Qwen2ForCausalLM"], num_key_value_heads=None)["num_key_value_heads"] == 32
    windows = family_of(GPT_OSS).windowed(read(**{**GPT_OSS, "layer_types": None}))
    assert GptOssConfig().layer_types[::2] == ["sliding_attention"] * 18 and windows == range(0, 24, 2)
    with pytest.raises(ModelError, match="lacks num_key_value_heads"):
        read(architectures=["Qwen2ForCausalLM"])
    with pytest.raises(ModelError, match=r"Qwen3_5ForConditionalGeneration is not supported; known: "):
        read(architectures=["Qwen3_5ForConditionalGeneration"], text_config={}, hidden_size=None)
    for method in ("fp8", "awq", "compressed-tensors"):
        with pytest.raises(ModelError, match=rf"the weights are quantised \({method}\)"):
            read(quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=r"are quantised \(.*'bits': 4.*\): config.json has quantization;"):
        read(quantization={"group_size": 64, "bits": 4})  # as MLX writes it
    for heads in ("28", 0, None):
        with pytest.raises(ModelError, match=r"lacks num_attention_heads\b.* with a number above 0"):
            read(num_attention_heads=heads)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds the JSON of a list; expected that of an object"):
        read_hf_config(tmp_path)


@pytest.mark.parametrize(
    ("scaling", "tokens"),
    [
        (None, 32768),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"type": "linear", "factor": 2.0}, 65536),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 8192}, 32768
        ),
    ],
)  # fmt: skip
def test_longest_sequence(scaling: Any, tokens: int) -> None:
    """By hand, after vLLM's _get_and_verify_max_len: Qwen2.5's YaRN section allows 131,072 tokens."""
    assert context_tokens({**BASE, "max_position_embeddings": 32768, "rope_scaling": scaling}) == tokens


def test_a_window_that_never_cuts_is_no_window() -> None:
    for window in (None, 32768):
        hf = {**BASE, "architectures": ["MistralForCausalLM"], "sliding_window": window}
        assert family_of({**hf, "max_position_embeddings": 32768}) is FAMILIES["MistralForCausalLM"]
