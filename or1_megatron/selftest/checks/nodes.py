"""Several nodes: the facts of each are gathered over gloo and compared, clocks too, and the network is measured."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from or1_megatron.config.hardware import hardware_of
from or1_megatron.runtime.gloo_interface import choose_gloo_interface
from or1_megatron.selftest.context import CheckFailed, Context, write_json
from or1_megatron.selftest.facts import differences, facts, host
from or1_megatron.selftest.plans import DEADLINE_S
from or1_megatron.selftest.registry import RESULTS

_SHOWN = 20
_NETWORK_SHARE = 0.6  # of the adapter that a GPU has to itself


def nodes(context: Context) -> None:
    """Gather and compare; every node comes to the same result."""
    cuda = context.machine.cuda
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    mine = {"facts": facts(), "host": host(), "results": _results()}  # first: a chosen interface may differ
    choose_gloo_interface()
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=DEADLINE_S))
    count = dist.get_world_size()
    everyone: list[Any] = [None] * count
    dist.all_gather_object(everyone, mine)
    names = [f"node {index} ({each['host']})" for index, each in enumerate(everyone)]
    write_json(context.out / "nodes.json", dict(zip(names, everyone, strict=True)))
    skew_s, exchange_s = clocks()
    context.measure("nodes", count)
    context.measure("hosts", len({each["host"] for each in everyone}), at_least=count)
    context.require("clocks apart", skew_s, "s", at_most=2.0)
    context.measure("smallest message to all and back", exchange_s * 1e3, "ms")
    context.measure("all-gather over gloo, from each node", all_gather_gb_s("cpu"), "GB/s")
    if cuda:
        name, expected = "all-gather over NCCL, one GPU of each node", network_gb_s(torch.cuda.get_device_name())
        context.measure(f"{name}, from each node", all_gather_gb_s("cuda"), "GB/s", at_least=expected)
    found = differences([each["facts"] for each in everyone], names)
    found += differences([each["results"] for each in everyone], names)
    context.require("facts that differ between nodes", len(found), at_most=0)
    dist.destroy_process_group()
    if found:
        more = f"; and {len(found) - _SHOWN} more in nodes.json" if len(found) > _SHOWN else ""
        raise CheckFailed("; ".join(found[:_SHOWN]) + more)


def _results() -> dict[str, str]:
    """Return how the checks before this one ended here."""
    ended = os.environ.get(RESULTS, "")
    return {f"check {name}": status for name, _, status in (each.partition("=") for each in ended.split(",")) if name}


def clocks(rounds: int = 10) -> tuple[float, float]:
    """Return how far the nodes' clocks are apart, and the seconds of an exchange, which bound the error: the best of
    some rounds."""
    apart, took = [], []
    for _ in range(rounds):
        dist.all_reduce(torch.zeros(1))  # a barrier that leaves GPUs alone
        now_s = time.time()
        started_s = time.perf_counter()
        everyone: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(everyone, now_s)
        took.append(time.perf_counter() - started_s)
        apart.append(max(everyone) - min(everyone))
    best = torch.tensor([min(apart), min(took)], dtype=torch.float64)
    dist.all_reduce(best, op=dist.ReduceOp.MAX)
    return float(best[0]), float(best[1])


def network_gb_s(gpu: str) -> float | None:
    """Return the rate that is expected of one GPU between nodes; None if its hardware is not known."""
    card = hardware_of(gpu)
    return card.network_bytes_per_s.value / 1e9 * _NETWORK_SHARE if card else None


def all_gather_gb_s(device: str) -> float:
    """Return what each node sends per second while all gather from all."""
    mine = torch.ones((16 if device == "cpu" else 256) << 20, dtype=torch.uint8, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    seconds = []
    for _ in range(4):
        dist.all_reduce(torch.zeros(1))  # over gloo: all begin together
        started_s = time.perf_counter()
        dist.all_gather(everyone, mine)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
    return mine.numel() * (dist.get_world_size() - 1) / statistics.median(seconds) / 1e9
