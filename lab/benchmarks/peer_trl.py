"""Trains the quickstart's model with TRL's GRPOTrainer, for lab/benchmarks/peers.py, in an environment with TRL.

    python lab/benchmarks/peer_trl.py --out FILE --seed 1 --steps 12 --tokens 56 --micro-batch 256
    torchrun --nproc-per-node 2 lab/benchmarks/peer_trl.py ...      # the same prompts dealt to two processes

Prompts, numbers of prompts and responses, T (``--tokens``) and optimizer are those of peers.py's runs. An answer is
judged by its text, which costs less than a verifier. FILE gets ``start_s``, the seconds of each step (``step_s``) and
the accuracy after it (``accuracy``), which is measured between the steps.
"""

from __future__ import annotations

import time

BEGAN_S = time.monotonic()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import datasets  # noqa: E402
import torch  # noqa: E402
from transformers import AutoTokenizer, GenerationConfig, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, GROUP, SAMPLES, EVALUATED = 128, 8, 2, 96
"""Prompts of a step, responses to each, and in an evaluation; tokens of a response in an evaluation."""
END = 1
"""The token that ends a response."""


def right(text: str, gold: str) -> bool:
    """Return whether the answer after the reasoning is ``gold``."""
    _, closed, answer = text.rpartition("</think>")
    boxes = re.findall(r"\\boxed\{(\d+)\}", answer)
    return bool(closed and boxes) and boxes[-1] == gold


def reward(completions: list[Any], completion_ids: list[list[int]], gold: list[str], **_: Any) -> list[float]:
    """Return 1 for each right answer that is not cut off."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(ids[-1] == END and right(text, truth))
        for text, ids, truth in zip(texts, completion_ids, gold, strict=True)
    ]


def problems(name: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (ROOT / "runs" / "quickstart_data" / name).read_text().splitlines()]
    return [{"prompt": row["prompt"], "gold": json.loads(row["reward_model"]["ground_truth"])[0]} for row in rows]


class Measure(TrainerCallback):  # type: ignore[misc]
    """Times steps, and measures accuracy on the held-out problems after each."""

    def __init__(self, model: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.held_out = problems("heldout.jsonl")
        self.step_s: list[float] = []
        self.accuracy: list[float] = []
        self.start_s = self._step_began_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_began_s = time.monotonic()
        self.start_s = self.start_s or self._step_began_s - BEGAN_S

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        self.step_s.append(time.monotonic() - self._step_began_s)
        rows = self.held_out[int(os.environ.get("RANK", 0)) :: int(os.environ.get("WORLD_SIZE", 1))]
        encoded = self.tokenizer.apply_chat_template(
            [row["prompt"] for row in rows for _ in range(SAMPLES)],
            add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        sampling = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=EVALUATED,
            eos_token_id=END, pad_token_id=0,
        )  # fmt: skip
        plain = getattr(model, "module", model)
        training = plain.training
        with torch.no_grad():
            found = plain.eval().generate(**encoded, generation_config=sampling)
        plain.train(training)
        found = found[:, encoded["input_ids"].shape[1] :]
        ended = (found == END).any(dim=1).tolist()
        texts = self.tokenizer.batch_decode(found, skip_special_tokens=True)
        golds = [row["gold"] for row in rows for _ in range(SAMPLES)]
        verdicts = [done and right(text, gold) for done, text, gold in zip(ended, texts, golds, strict=True)]
        self.accuracy.append(sum(verdicts) / len(verdicts))
        print(f"step {len(self.step_s)}: {self.step_s[-1]:.2f} s, accuracy {self.accuracy[-1]:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=56, help="T: of a response in training")
    parser.add_argument("--micro-batch", type=int, default=256, help="responses per forward and backward pass")
    arguments = parser.parse_args()
    processes = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(2 // processes)
    model = ROOT / "examples" / "quickstart" / "base_model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    measure = Measure(model)
    config = GRPOConfig(
        output_dir=str(arguments.out.with_suffix("")), seed=arguments.seed, max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=PROMPTS * GROUP // processes // arguments.micro_batch,
        num_generations=GROUP, max_completion_length=arguments.tokens, temperature=1.0, top_p=1.0, top_k=0,
        loss_type="dapo", scale_rewards="group", beta=0.0, epsilon=0.2, num_iterations=1,
        learning_rate=2e-4, lr_scheduler_type="constant", weight_decay=0.01, adam_beta2=0.999, max_grad_norm=1.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        save_strategy="no", report_to=[], logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model), reward_funcs=reward, args=config,
        train_dataset=datasets.Dataset.from_list(problems("train.jsonl")), processing_class=tokenizer,
        callbacks=[measure],
    )  # fmt: skip
    trainer.train()
    if int(os.environ.get("RANK", 0)) == 0:
        found = {"start_s": measure.start_s, "step_s": measure.step_s, "accuracy": measure.accuracy}
        arguments.out.write_text(json.dumps(found) + "\n")
    if torch.distributed.is_initialized():  # a process whose peer is gone may abort when it ends
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
