"""Handoffs of large models on paper: the planner's bytes over the links of a cluster. Nothing is sent.

    python benchmarks/handoff_forecast.py       (eight minutes)

What the busiest rank's link needs, in or out, in bf16: at 400 Gb/s, a link of each rank's own, and at the 450 GB/s in
each direction of a fourth-generation NVLink; packing, checksums and loading come on top. In two hops (engines on the
trainer's GPUs) what stays on a device is not counted. Beside it what the whole model takes through one rank's link,
which a broadcast from rank 0 needs at least, the gathering before it not counted; and what others have published,
measured from start to end on clusters of their own: to be read as an order of magnitude.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from result import ROOT, figure, write_result

from or1_megatron.config.load import load_config
from or1_megatron.config.schema import ParallelConfig
from or1_megatron.handoff.shard.forecast import HandoffForecast, forecast, forecast_of

GIGABITS_PER_S = 400.0
NVLINK_GIGABITS_PER_S = 3600.0
BUCKET_BYTES = 512 << 20

DENSE = "Qwen2ForCausalLM"
MOE = "Qwen3MoeForCausalLM"


def _dense(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "architectures": [DENSE],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064,
    }


def _moe(layers: int, hidden: int, expert: int, heads: int) -> dict[str, Any]:
    return {
        "architectures": [MOE],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "moe_intermediate_size": expert,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    }


QWEN_7B = _dense(28, 3584, 18944, 28, 4)
QWEN_32B = _dense(64, 5120, 27648, 40, 8)
QWEN_72B = _dense(80, 8192, 29568, 64, 8)
QWEN_30B_A3B = _moe(48, 2048, 768, 32)
QWEN_235B_A22B = _moe(94, 4096, 1536, 64)

SEPARATE, COLOCATED = "nccl", "nccl+cuda_ipc"


@dataclass(frozen=True)
class Run:
    """A layout of trainer and engines, one rank to a GPU."""

    shape: dict[str, Any]
    parallel: dict[str, int]
    engines: int
    tensor: int
    transport: str = SEPARATE
    published_s: tuple[float, float] | None = None
    """(least, most)"""


RUNS: dict[str, Run] = {
    "7B, TP2 DP4 to 8 of TP1": Run(QWEN_7B, {"ranks": 8, "tensor": 2}, 8, 1),
    "7B, TP2 DP4 to 8 of TP1, colocated": Run(QWEN_7B, {"ranks": 8, "tensor": 2}, 8, 1, COLOCATED),
    "7B, TP2 DP4 to 56 of TP1": Run(QWEN_7B, {"ranks": 8, "tensor": 2}, 56, 1),
    "32B, TP8 DP4 to 8 of TP4": Run(QWEN_32B, {"ranks": 32, "tensor": 8}, 8, 4, SEPARATE, (11.0, 18.0)),
    "32B, TP8 DP4 to 8 of TP4, colocated": Run(QWEN_32B, {"ranks": 32, "tensor": 8}, 8, 4, COLOCATED, (11.0, 18.0)),
    "32B, TP8 to 16 of TP4": Run(QWEN_32B, {"ranks": 8, "tensor": 8}, 16, 4),
    "72B, TP8 PP4 DP2 to 8 of TP8": Run(QWEN_72B, {"ranks": 64, "tensor": 8, "pipeline": 4}, 8, 8),
    "72B, TP8 PP4 DP2 to 8 of TP8, colocated": Run(
        QWEN_72B, {"ranks": 64, "tensor": 8, "pipeline": 4}, 8, 8, COLOCATED
    ),
    "30B-A3B, TP2 EP8 DP8 to 8 of TP2": Run(
        QWEN_30B_A3B, {"ranks": 16, "tensor": 2, "expert": 8}, 8, 2, SEPARATE, (0.74, 1.0)
    ),
    "235B-A22B, TP4 PP2 EP16 DP16 to 8 of TP8": Run(
        QWEN_235B_A22B, {"ranks": 128, "tensor": 4, "pipeline": 2, "expert": 16}, 8, 8, SEPARATE, (2.7, 3.1)
    ),
}


RECIPES = {
    # layout of configs/layouts: (recipe, shape, published)
    "7b_4_nodes_h800": ("or1_7b", "deepseek_r1_distill_qwen_7b", None),
    "7b_8_nodes_h800": ("or1_7b", "deepseek_r1_distill_qwen_7b", None),
    "7b_2_nodes_h200": ("or1_7b", "deepseek_r1_distill_qwen_7b", None),
    "32b_16_nodes_h800": ("or1_32b", "deepseek_r1_distill_qwen_32b", (11.0, 18.0)),
    "32b_32_nodes_h800": ("or1_32b", "deepseek_r1_distill_qwen_32b", (11.0, 18.0)),
    "32b_8_nodes_h200": ("or1_32b", "deepseek_r1_distill_qwen_32b", (11.0, 18.0)),
    "72b_32_nodes_h800": ("or1_72b", "qwen2_5_72b", None),
    "235b_32_nodes_h800": ("or1_235b", "qwen3_235b_a22b", (2.7, 3.1)),
}


def forecasts() -> Iterator[tuple[str, HandoffForecast, int, tuple[float, float] | None]]:
    """(name, forecast, engines' tensor parallelism, published seconds), the configured layouts first."""
    for layout, (recipe, shape, published_s) in RECIPES.items():
        os.environ["LAYOUT"] = layout
        config = load_config(ROOT / f"configs/recipes/{recipe}.yaml", [f"model.hf={ROOT}/configs/models/{shape}"])
        yield f"configs/layouts/{layout}", forecast_of(config), config.rollout.tensor_parallel, published_s
    for name, run in RUNS.items():
        layout_of = ParallelConfig(**run.parallel)
        made = forecast(run.shape, "bfloat16", layout_of, run.engines, run.tensor, BUCKET_BYTES, run.transport)
        yield name, made, run.tensor, run.published_s


def main() -> None:
    figures: dict[str, Any] = {}
    for name, made, tensor, published_s in forecasts():
        relays = {start for start, _ in made.links if start >= made.plan.trainers}
        shares = [made.received[rank] / wanted for rank, wanted in enumerate(made.wanted)]
        whole = sum(made.wanted[:tensor])
        row = {
            "busiest rank": figure(made.busiest / (1 << 30), "GiB"),
            "at 400 Gb/s": figure(made.seconds(GIGABITS_PER_S), "s"),
            "at NVLink": figure(made.seconds(NVLINK_GIGABITS_PER_S), "s"),
            "model through one link of 400 Gb/s": figure(whole * 8 / (GIGABITS_PER_S * 1e9), "s"),
            "engine ranks that pass on": figure(len(relays)),
            "received over shard, largest": figure(max(shares), at_most=1.05),
        }
        if published_s is not None:
            row["published, least"] = figure(published_s[0], "s")
            row["published, most"] = figure(published_s[1], "s")
        figures |= {f"{name}: {column}": value for column, value in row.items()}
        print(name, {column: value["value"] for column, value in row.items()}, flush=True)
    settings = {"Gb/s per rank": GIGABITS_PER_S, "NVLink Gb/s": NVLINK_GIGABITS_PER_S, "bucket bytes": BUCKET_BYTES}
    print(write_result("handoff_forecast", figures, settings))


if __name__ == "__main__":
    main()
