"""Compares the plan with measured updates on a GPU: seconds and peak memory.

    python lab/benchmarks/plan_gpu.py

lab/benchmarks/throughput.py has measured the updates and written lab/results/throughput.json, so this needs no GPU. The
hardware file's ``update_share`` is fitted to one of these updates. Planned memory is without the trainer's reserve.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from result import RESULTS
from throughput import ROW_TOKENS, VARIANTS, lengths_of

from or1_megatron.config.hardware import Hardware, hardware_of
from or1_megatron.config.load import load_config
from or1_megatron.config.recipes import named
from or1_megatron.config.schema import Config
from or1_megatron.plan.update_time import update_time
from or1_megatron.selftest.setups import SHAPES, TIED
from or1_megatron.sizing.memory import activation_bytes, stage_weights, state_bytes
from or1_megatron.weights.shape import Shape

FITTED: Final = "1.5B, recompute none, head recompute"


def config_of(recompute: str, head: str) -> Config:
    ones = ("parallel.ranks", "parallel.tensor", "parallel.pipeline", "parallel.context", "rollout.engines",
            "rollout.tensor_parallel")  # fmt: skip
    own = ["parallel.layers=own", "parallel.sequence=false", f"parallel.micro_batch_tokens={ROW_TOKENS}"]
    chosen = [f"parallel.recompute={recompute}", f"parallel.head={head}"]
    return load_config(named("recipe")["or1_7b"], [*(f"{key}=1" for key in ones), *own, *chosen])


def planned(config: Config, shape: Shape, hardware: Hardware) -> tuple[float, float]:
    """Return the planned seconds and GiB of an update."""
    lengths = np.array(lengths_of(ROW_TOKENS))
    seconds = update_time(config, shape, hardware.rates(shape.parameters), [lengths], 1).seconds
    held = state_bytes(config, stage_weights(config.parallel, shape)[0]) + activation_bytes(config, shape, 0, "cuda")
    return seconds, held / 2**30


def rows(measured: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield (update, measured s, planned s, error, measured GiB, planned GiB, error)."""
    hardware = hardware_of(measured["device"])
    assert hardware is not None, f"no file in configs/hardware matches {measured['device']!r}"
    for size in ("0.5B", "1.5B"):
        shape = Shape.of({**SHAPES[size], "max_position_embeddings": 131072, "tie_word_embeddings": size in TIED})
        for recompute, head in VARIANTS:
            name = f"{size}, recompute {recompute}, head {head}"
            seconds, memory_gib = planned(config_of(recompute, head), shape, hardware)
            cells = [name + (" (fitted)" if name == FITTED else "")]
            for kind, value in (("update", seconds), ("peak memory", memory_gib)):
                found = measured["figures"][f"{name}: {kind}"]["value"]
                cells += [f"{found:.3g}", f"{value:.3g}", f"{value / found - 1:+.0%}"]
            yield tuple(cells)


def main() -> None:
    measured = json.loads((RESULTS / "throughput.json").read_text())
    print(f"{measured['device']}, commit {measured['commit']}, {measured['date'][:10]}\n")
    print("| update of 61,440 tokens | measured, s | plan, s | error | peak, GiB | plan, GiB | error |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(measured):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
