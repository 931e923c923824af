"""Makes the quickstart's base model: a Qwen2 from scratch, warmed up on demonstrations of mixed habits. With
``--experts`` it is a Qwen3-MoE, as in examples/quickstart_moe.

The supervised steps go through the very policy that reinforcement learning trains: Megatron under torchrun, with
cross-entropy in the place of the clipped loss.

    torchrun --standalone --nproc-per-node 2 examples/quickstart/make_base.py --out examples/quickstart/base_model
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.interfaces import TokenInputs
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy, export_hf
from or1_megatron.rl.batch import pack
from or1_megatron.rl.objectives.estimators import weighted
from or1_megatron.rl.packing import BatchLayout
from or1_megatron.types import Sample

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the folder of an example is not a package
from demonstrations import Demonstration, demonstrations
from tokenizer import MODEL_MAX_LENGTH, build_tokenizer

SEED = 0
STEPS = 3600
BATCH_DEMONSTRATIONS = 128
CAREFUL_FIRST = 2 / 3  # of the steps
MAX_RESPONSE_TOKENS = 97
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
BETA2 = 0.98
ROW_TOKENS = 4096
REPORT_EVERY_STEPS = 50


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Supervised loss on the path of the policy gradient: - sum_t weight_t log pi_theta(target_t)."""

    temperature: float = 1.0

    def __call__(
        self, log_probs: Tensor, entropies: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss = -weighted(log_probs, tokens.weights).sum()
        return loss, {"loss": loss.detach(), "entropy": entropies.detach().sum()}


def create_model(folder: Path, seed: int, experts: int) -> None:
    """A randomly initialised model of 0.8M parameters with the tokenizer, as an HF folder; two experts of a layer
    compute a token."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    common = {
        "vocab_size": len(tokenizer),
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MODEL_MAX_LENGTH,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config: PretrainedConfig = Qwen2Config(hidden_size=128, **common)
    if experts:
        config = Qwen3MoeConfig(
            hidden_size=96,
            head_dim=32,
            num_experts=experts,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            norm_topk_prob=True,
            **common,
        )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def samples(folder: Path, drawn: Iterable[Demonstration]) -> Iterator[Sample]:
    """Demonstrations as the policy trains on them: the loss counts the response and its end token.

    Responses are cut off at MAX_RESPONSE_TOKENS.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for demonstration in drawn:
        prompt = tokenizer.apply_chat_template(
            demonstration.prompt_messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        response = [*tokenizer.encode(demonstration.response), tokenizer.eos_token_id][:MAX_RESPONSE_TOKENS]
        yield Sample(
            prompt_ids=np.array(prompt, dtype=np.int32),
            response_ids=np.array(response, dtype=np.int32),
            advantage=0.0,
            loss_mask=np.ones(len(response), dtype=np.bool_),
        )


def warm_up(policy: MegatronPolicy, supply: Iterator[Sample], steps: int) -> float:
    """Supervised steps over all ranks; returns the last reported loss per token."""
    mesh = policy.mesh
    layout = BatchLayout(data_ranks=mesh.data, budget_tokens=ROW_TOKENS, alignment=2)
    started_s, loss = time.monotonic(), float("nan")
    for step in range(1, steps + 1):
        batch = pack(list(itertools.islice(supply, BATCH_DEMONSTRATIONS)), layout)
        report = policy.update(batch.ranks[mesh.data_rank], CrossEntropy(), batch.token_count)
        loss = report.sums["loss"] / batch.token_count
        if mesh.rank == 0 and step % REPORT_EVERY_STEPS == 0:
            elapsed_s = time.monotonic() - started_s
            print(f"step {step}/{steps}  loss {loss:.4f}  grad norm {report.grad_norm:.2f}  {elapsed_s:.0f} s")
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the HF folder to make")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--experts", type=int, default=0, help="in each layer of a mixture; 0: a dense model")
    parser.add_argument("--one-wording", action="store_true", help="careful steps in one order and one wording")
    arguments = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    start_process_group(timeout_s=600)
    parallel = ParallelConfig(ranks=ranks)
    mesh = build_mesh(parallel, arguments.seed)
    scratch = Path(tempfile.gettempdir()) / f"or1_base_{os.environ.get('TORCHELASTIC_RUN_ID', 'single')}"
    if mesh.rank == 0:
        create_model(scratch, arguments.seed, arguments.experts)
    torch.distributed.barrier()
    optimizer = OptimizerConfig(lr=LEARNING_RATE, beta2=BETA2, warmup_steps=WARMUP_STEPS, decay_steps=arguments.steps)
    policy = MegatronPolicy(ModelConfig(hf=scratch, dtype="float32"), parallel, optimizer, mesh)
    drawn = demonstrations(
        arguments.seed, round(CAREFUL_FIRST * arguments.steps) * BATCH_DEMONSTRATIONS, arguments.one_wording
    )
    loss = warm_up(policy, samples(scratch, drawn), arguments.steps)
    export_hf(policy, arguments.out)
    if mesh.rank == 0:
        if arguments.experts:  # half the size
            AutoModelForCausalLM.from_pretrained(arguments.out, dtype=torch.bfloat16).save_pretrained(arguments.out)
        record = {
            "command": f"examples/quickstart{'_moe' if arguments.experts else ''}/make_base.sh",
            "seed": arguments.seed,
            "steps": arguments.steps,
            "one_wording": arguments.one_wording,
            **({"experts": arguments.experts} if arguments.experts else {}),
            "loss_per_token": loss,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
        }
        (arguments.out / "how_made.json").write_text(json.dumps(record, indent=2) + "\n")
        shutil.rmtree(scratch)
    stop_process_group()


if __name__ == "__main__":
    main()
