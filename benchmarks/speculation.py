"""What drafts of tokens save in a rollout on CPU: ``rollout.speculation`` ngram and suffix against none, by turns.

    python benchmarks/speculation.py        (about four minutes; suffix is left out where arctic_inference is missing)

Three workloads, each on one engine per way with one thread, the others idle meanwhile:

    quickstart         a step of the quickstart's base model: 128 prompts, 8 responses each, T 56, temperature 1
    loops              32 responses of up to 512 tokens of a model with random weights, 7 times as large, at a low
                       temperature, at which some fall into loops
    loops, 4 at once   4 such responses, as at the end of a step

Every turn has new prompts, the same for all ways. The first turn warms up; times are medians of the others.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import ray
import torch
import transformers
from result import ROOT, figure, write_result

from or1_megatron.config.schema import RolloutConfig
from or1_megatron.data.template import ChatTemplate, load_tokenizer
from or1_megatron.rollout.cluster import start_ray, stop_ray
from or1_megatron.rollout.pool import EnginePool
from or1_megatron.runtime.message import pack, unpack
from or1_megatron.types import Completion, Message, Problem, Prompt, Request, Sampling

sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
import task

BASE: Final = ROOT / "examples" / "quickstart" / "base_model"
TURNS: Final = 4
LONG: Final = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "layer_types": ["full_attention"] * 8,
    "max_position_embeddings": 2048, "initializer_range": 0.05,
}  # fmt: skip
WAYS: Final[Mapping[str, dict[str, Any] | None]] = {
    "none": None,
    "ngram": {"method": "ngram", "draft_tokens": 4, "match_tokens": 3},
    "suffix": {"method": "suffix", "draft_tokens": 8},
}


@dataclass(frozen=True)
class Workload:
    name: str
    prompts: int
    each: int
    sampling: Sampling

    def requests(self, turn: int) -> list[Request]:
        """Return a turn's requests: problems of the quickstart, drawn with the turn as the seed."""
        template = ChatTemplate(load_tokenizer(BASE))
        made = []
        for index, drawn in enumerate(islice(task.draw_problems(turn, held_out=False), self.prompts)):
            messages = (Message("user", drawn.text),)
            problem = Problem(f"{turn}-{index}", "", "math", messages, "0", {}, "")
            prompt = Prompt(problem, template.token_ids(messages))
            seed = (turn * self.prompts + index) * self.each
            made += [Request(prompt, sample, self.sampling, seed + sample) for sample in range(self.each)]
        return made


WORKLOADS: Final = (
    Workload("quickstart", 128, 8, Sampling(1.0, 1.0, 56)),
    Workload("loops", 32, 1, Sampling(0.05, 1.0, 512)),
    Workload("loops, 4 at once", 4, 1, Sampling(0.05, 1.0, 512)),
)


def long_model(folder: Path) -> Path:
    """Write random weights of the quickstart's architecture, larger and for longer responses, with its tokenizer."""
    torch.manual_seed(1)
    shutil.copytree(BASE, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = transformers.AutoConfig.from_pretrained(BASE, **LONG)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def roll_out(handle: Any, requests: Sequence[Request]) -> list[Completion]:
    ray.get(handle.submit.remote(pack(requests)))
    found: dict[int, Completion] = {}
    while len(found) < len(requests):
        harvest = unpack(ray.get(handle.harvest.remote(5.0)))
        found.update((completion.seed, completion) for completion in harvest.completions)
    return [found[request.seed] for request in requests]


def start(model: Path, max_model_tokens: int) -> dict[str, EnginePool]:
    """Start an engine per way."""
    pools = {}
    for way, speculation in WAYS.items():
        if way != "suffix" or find_spec("arctic_inference"):
            config = RolloutConfig(kv_cache_bytes=512 << 20, speculation=speculation)
            pools[way] = EnginePool(config, model, "float32", max_model_tokens, f"{model.name}-{way}", on_cpu=True)
    for pool in pools.values():
        pool.wait_ready()
    return pools


def measure(workload: Workload, pools: Mapping[str, EnginePool]) -> dict[str, Any]:
    """Return the workload's figures."""
    ways = list(pools)
    turns: dict[str, list[list[Completion]]] = {way: [] for way in ways}
    for turn in range(TURNS):
        requests = workload.requests(turn)
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            turns[way].append(roll_out(pools[way].handles[0], requests))
    plain = [each.token_ids for turn in turns["none"] for each in turn]
    figures = {}
    for way, done in turns.items():
        completions = [each for turn in done for each in turn]
        tokens = sum(len(each.token_ids) for each in completions)
        accepted = sum(each.accepted_tokens for each in completions)
        drafted = sum(each.drafted_tokens for each in completions)
        row = f"{workload.name}, {way}"
        figures[f"{row}: mean length"] = figure(tokens / len(completions), "tokens")
        figures[f"{row}: rollout"] = figure(seconds(done), "s")
        figures[f"{row}: over none"] = figure(seconds(done) / seconds(turns["none"]))
        if way != "none":
            figures[f"{row}: acceptance"] = figure(accepted / max(drafted, 1), "share")
            figures[f"{row}: tokens per pass"] = figure(tokens / (tokens - accepted))
            equal = np.mean([np.array_equal(a, b.token_ids) for a, b in zip(plain, completions, strict=True)])
            figures[f"{row}: responses as without"] = figure(float(equal), "share", at_least=0.99)
        print(
            row,
            {name.split(": ")[1]: each["value"] for name, each in figures.items() if name.startswith(f"{row}:")},
            flush=True,
        )
    return figures


def seconds(turns: Sequence[Sequence[Completion]]) -> float:
    """Return the median time of the turns but the first."""
    spent = [max(each.finished_s for each in turn) - min(each.started_s for each in turn) for turn in turns]
    return statistics.median(spent[1:])


def main() -> None:
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        long = long_model(Path(folder, "long"))
        start_ray(None, "benchmark")
        try:
            for model, max_model_tokens, workloads in ((BASE, 128, WORKLOADS[:1]), (long, 640, WORKLOADS[1:])):
                pools = start(model, max_model_tokens)
                for workload in workloads:
                    figures |= measure(workload, pools)
                for pool in pools.values():
                    pool.close()
        finally:
            stop_ray()
    settings = {
        "turns": TURNS - 1, "shown": "median", "engines": "one per way, one thread, fp32", "ngram": WAYS["ngram"],
        "suffix": WAYS["suffix"], "loops": LONG,
    }  # fmt: skip
    print(f"written to {write_result('speculation', figures, settings)}")


if __name__ == "__main__":
    main()
