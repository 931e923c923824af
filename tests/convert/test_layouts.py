"""Megatron's own loader reads converted checkpoints at any layout; checkpoints of others convert to the HF folder.

Two ranks start anew for each layout: the threads of a mesh end with its processes. Not proven here: Transformer
Engine's layers, ranks over several machines, checkpoints of real Megatron-LM runs (with optimizer state and
fp8's extra state).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import problem
import pytest
import ranks
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from rich.console import Console
from safetensors.torch import load_file

from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.config.load import resolved_yaml
from or1_megatron.config.schema import Config, ParallelConfig
from or1_megatron.convert.job import ConvertError
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.convert.to_megatron import hf_to_megatron
from or1_megatron.parallel.mesh import build_mesh

QUIET = Console(quiet=True)
MIXTURES = {"tensor": {"tensor": 2, "sequence": True}, "experts": {"expert": 2}}
LAYOUTS = {"tensor": {"tensor": 2}, "virtual": {"pipeline": 2, "virtual_pipeline": 2}, "data": {}}


def read(networks: Sequence[Any], checkpoint: Path) -> None:
    """Load with Megatron's loader. The linears' ``_extra_state``, empty without fp8, is not in the checkpoint."""
    state = {f"model{i}": network.sharded_state_dict() for i, network in enumerate(networks)}
    loaded, _, absent = dist_checkpointing.load(state, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    assert all("_extra_state" in name for name in absent), absent
    for i, network in enumerate(networks):
        tensors = {name: value for name, value in loaded[f"model{i}"].items() if torch.is_tensor(value)}
        network.load_state_dict(tensors, strict=False)


def differing(hf: Path, checkpoint: Path, layout: dict[str, Any], run: Path) -> list[str]:
    """Return the parameters that Megatron's loader does not fill as the policy's own load from HF does.

    The policy's state, as a run would save it, goes to ``run``.
    """
    policy = problem.make_policy(hf, "bfloat16", ranks=2, **layout)
    CheckpointSaver(policy, asynchronous=False).save(run, {"steps_done": 3})
    parameters = [pair for network in policy.networks for pair in network.named_parameters()]
    expected = [parameter.detach().clone() for _, parameter in parameters]
    for name, parameter in parameters:  # the padding is zeros, and not in the checkpoint
        padded = parameter.shape[0] * policy.mesh.tensor > 61 and ("embedding" in name or "output" in name)
        parameter.data.fill_(0.0 if padded else torch.nan)
    read(policy.networks, checkpoint)
    return [name for (name, p), wanted in zip(parameters, expected, strict=True) if not torch.equal(p, wanted)]


def plain(checkpoint: Path, out: Path) -> None:
    """Fill Megatron's GPTModel of TP 2, with its own layers, from ``checkpoint``, and save it as Megatron-LM does."""
    build_mesh(ParallelConfig(ranks=2, tensor=2), seed=1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=True,
        tensor_model_parallel_size=2,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    network = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=256,  # as --make-vocab-size-divisible-by pads it
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    for name, parameter in network.named_parameters():
        parameter.data.fill_(0.0 if "embedding" in name or "output" in name else torch.nan)
    read([network], checkpoint)
    assert not any(parameter.isnan().any() for parameter in network.parameters())
    folder = out / "iter_0000020"
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
        (out / "latest_checkpointed_iteration.txt").write_text("20")
    torch.distributed.barrier()
    arguments = argparse.Namespace(num_layers=4, hidden_size=64, padded_vocab_size=256)
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 20, **network.sharded_state_dict()}
    dist_checkpointing.save(state, str(folder))


@pytest.fixture(scope="module")
def hf(make_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("layouts") / "hf", "Qwen2ForCausalLM")


@pytest.fixture(scope="module")
def megatron(hf: Path) -> Path:
    out = hf.with_name("megatron")
    hf_to_megatron(hf, out, QUIET, file_bytes=40_000)
    return out


def assert_same_tensors(a: Path, b: Path) -> None:
    mine, theirs = ({n: t for p in x.glob("*.safetensors") for n, t in load_file(p).items()} for x in (a, b))
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_loads_it_and_a_runs_checkpoint_converts(hf: Path, megatron: Path, name: str) -> None:
    """Every parameter of both ranks is what the policy loads from the HF folder itself. A run's checkpoint has
    parameters among masters and moments, cut as the layout cuts them; config and tokenizer are from the run's base
    model, whose card stays behind."""
    run = hf.with_name(f"run_{name}")
    checkpoint = run / "checkpoints" / "step_000003"
    assert ranks.call(differing, 2, hf, megatron, LAYOUTS[name], checkpoint) == [[], []]
    stage = {"name": "only", "steps": 5, "max_response_tokens": 96, "prompts_per_step": 8, "prompts_per_update": 8}
    config = {
        "run": {"dir": run},
        "model": {"hf": hf},
        "data": {"train": [{"path": "math.jsonl"}]},
        "stages": [{**stage, "group_size": 4}],
    }
    (run / "config.yaml").write_text(resolved_yaml(Config.model_validate(config)))
    out = hf.with_name(f"back_{name}")
    megatron_to_hf(checkpoint, out, QUIET)
    assert_same_tensors(hf, out)
    assert (out / "config.json").read_text() == (hf / "config.json").read_text()
    assert (out / "tokenizer.json").read_text() == (hf / "tokenizer.json").read_text()
    assert not (out / "README.md").exists()  # the base model's card does not describe this model


@pytest.mark.parametrize("layout", MIXTURES)
@pytest.mark.parametrize(("family", "changes"), [("Qwen3Moe", {"mlp_only_layers": []}), ("GptOss", {})])
def test_mixtures_whose_layers_are_alike(
    family: str, changes: Any, layout: str, make_model: Any, tmp_path: Path
) -> None:
    """Megatron's loader finds each layer by its number; a run's checkpoint converts to the HF model."""
    hf, checkpoint = make_model(tmp_path / "hf", f"{family}ForCausalLM", **changes), tmp_path / "step_000003"
    hf_to_megatron(hf, tmp_path / "megatron", QUIET)
    assert ranks.call(differing, 2, hf, tmp_path / "megatron", MIXTURES[layout], checkpoint) == [[], []]
    megatron_to_hf(checkpoint, tmp_path / "back", QUIET, hf=hf)
    assert_same_tensors(hf, tmp_path / "back")


def test_what_megatron_lm_saves(hf: Path, megatron: Path) -> None:
    """A torch_dist checkpoint of stock layers, its vocabulary padded; the folder above is as good as the checkpoint.

    transformers computes the same with what it converts to.
    """
    from transformers import AutoModelForCausalLM

    checkpoint, out = hf.with_name("plain"), hf.with_name("back_plain")
    ranks.call(plain, 2, megatron, checkpoint)
    with pytest.raises(ConvertError, match="does not say what model it is of"):
        megatron_to_hf(checkpoint, out, QUIET)
    megatron_to_hf(checkpoint, out, QUIET, hf=hf)
    assert_same_tensors(hf, out)
    ids = torch.arange(60)[None]
    mine, theirs = (AutoModelForCausalLM.from_pretrained(x, dtype=torch.float32)(ids).logits for x in (hf, out))
    assert torch.equal(mine, theirs)
