"""Handoffs of large models on paper: the planner's bytes over links of 400 Gb/s. Nothing is sent.

    python benchmarks/handoff_forecast.py

What the busiest rank's link needs, in or out, in bf16, each rank with a link of its own; packing, checksums and loading
come on top. Beside it what the whole model takes through one rank's link: what a broadcast from rank 0 to all engines
needs at least, and the gathering on rank 0 before it once more.
"""

from __future__ import annotations

from typing import Any

from result import figure, write_result

from or1_megatron.config import ParallelConfig
from or1_megatron.plan_handoff import forecast

GIGABITS_PER_S = 400.0
BUCKET_BYTES = 512 << 20

Run = tuple[dict[str, int], dict[str, int], int, int]
"""(shape, trainer layout, engines, their tensor parallelism)"""


def _shape(layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": 152064,
    }


RUNS: dict[str, Run] = {
    "7B, TP2 DP4 to 8 engines of TP1": (_shape(28, 3584, 18944, 28, 4), {"ranks": 8, "tensor": 2}, 8, 1),
    "7B, TP2 DP16 to 32 engines of TP1": (_shape(28, 3584, 18944, 28, 4), {"ranks": 32, "tensor": 2}, 32, 1),
    "32B, TP8 DP4 to 8 engines of TP4": (_shape(64, 5120, 27648, 40, 8), {"ranks": 32, "tensor": 8}, 8, 4),
    "32B, TP4 PP2 DP4 to 8 engines of TP4": (
        _shape(64, 5120, 27648, 40, 8),
        {"ranks": 32, "tensor": 4, "pipeline": 2},
        8,
        4,
    ),
    "72B, TP8 PP4 DP2 to 8 engines of TP8": (
        _shape(80, 8192, 29568, 64, 8),
        {"ranks": 64, "tensor": 8, "pipeline": 4},
        8,
        8,
    ),
}


def main() -> None:
    figures: dict[str, Any] = {}
    for name, (shape, layout, engines, tensor) in RUNS.items():
        hf = {**shape, "architectures": ["Qwen2ForCausalLM"]}
        made = forecast(hf, "bfloat16", ParallelConfig(**layout), engines, tensor, BUCKET_BYTES)
        figures[f"{name}: busiest rank"] = figure(made.busiest / (1 << 30), "GiB")
        figures[f"{name}: seconds"] = figure(made.seconds(GIGABITS_PER_S), "s")
        shares = [made.received[rank] / wanted for rank, wanted in enumerate(made.wanted)]
        figures[f"{name}: received over shard, largest"] = figure(max(shares), at_most=1.05)
        average = sum(made.sent.values()) / made.plan.trainers
        figures[f"{name}: busiest sender over average"] = figure(max(made.sent.values()) / average)
        whole = sum(made.wanted[:tensor])
        figures[f"{name}: whole model through one link"] = figure(whole * 8 / (GIGABITS_PER_S * 1e9), "s")
        print(name, {key: value["value"] for key, value in figures.items() if key.startswith(name)}, flush=True)
    print(write_result("handoff_forecast", figures, {"Gb/s per rank": GIGABITS_PER_S, "bucket bytes": BUCKET_BYTES}))


if __name__ == "__main__":
    main()
