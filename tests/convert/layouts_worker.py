"""Two ranks: Megatron's own loader reads a converted checkpoint at several layouts; a run of ours saves one, as does a
plain GPTModel of Megatron's with a padded vocabulary and stock layers. JSON from rank 0."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.saver import CheckpointSaver


def read(networks: Sequence[Any], checkpoint: Path) -> None:
    """Load with Megatron's loader. The linears' ``_extra_state``, empty without fp8, is not in the checkpoint."""
    state = {f"model{i}": network.sharded_state_dict() for i, network in enumerate(networks)}
    loaded, _, absent = dist_checkpointing.load(state, str(checkpoint), strict=StrictHandling.RETURN_ALL)
    assert all("_extra_state" in name for name in absent), absent
    for i, network in enumerate(networks):
        tensors = {name: value for name, value in loaded[f"model{i}"].items() if torch.is_tensor(value)}
        network.load_state_dict(tensors, strict=False)


def differing(hf: Path, checkpoint: Path, layout: dict[str, Any], run: Path | None) -> list[str]:
    """Return the parameters that Megatron's loader does not fill as the policy's own load from HF does.

    The policy's state, as a run would save it, goes to ``run``.
    """
    parallel_state.destroy_model_parallel()
    parallel = ParallelConfig(ranks=2, **layout)
    mesh = build_mesh(parallel, seed=1)
    policy = MegatronPolicy(ModelConfig(hf=hf, dtype="bfloat16"), parallel, OptimizerConfig(), mesh)
    if run is not None:
        CheckpointSaver(policy, asynchronous=False).save(run, {"steps_done": 3})
    parameters = [pair for network in policy.networks for pair in network.named_parameters()]
    expected = [parameter.detach().clone() for _, parameter in parameters]
    for name, parameter in parameters:  # the padding is zeros, and not in the checkpoint
        padded = parameter.shape[0] * mesh.tensor > 61 and ("embedding" in name or "output" in name)
        parameter.data.fill_(0.0 if padded else torch.nan)
    read(policy.networks, checkpoint)
    return [name for (name, p), wanted in zip(parameters, expected, strict=True) if not torch.equal(p, wanted)]


def plain(checkpoint: Path, out: Path, tensor: int, pipeline: int) -> None:
    """Fill Megatron's GPTModel with its own layers from ``checkpoint``, and save it as Megatron-LM does."""
    parallel_state.destroy_model_parallel()
    build_mesh(ParallelConfig(ranks=2, tensor=tensor, pipeline=pipeline), seed=1)
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
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
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
        vocab_size=128 * tensor,  # as --make-vocab-size-divisible-by pads it
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
    arguments = argparse.Namespace(num_layers=4, hidden_size=64, padded_vocab_size=128 * tensor)
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 20, **network.sharded_state_dict()}
    dist_checkpointing.save(state, str(folder))


def main() -> None:
    out, hf, checkpoint, layouts = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    start_process_group(60)
    runs = [out.with_name(f"run_{i}") / "checkpoints" / "step_000003" for i in range(len(layouts))]
    differ = [differing(hf, checkpoint, layout, run) for layout, run in zip(layouts, runs, strict=True)]
    plain(checkpoint, out.with_name("plain_tensor"), 2, 1)
    plain(checkpoint, out.with_name("plain_pipeline"), 1, 2)
    everyone: list[Any] = [None, None]
    torch.distributed.all_gather_object(everyone, differ)
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(everyone))
    stop_process_group()


if __name__ == "__main__":
    main()
