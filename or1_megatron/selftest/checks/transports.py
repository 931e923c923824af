"""Self-test of the handoff's transports between processes without vLLM: compares every byte, and measures GB/s.

Random bf16 tensors, cut by rows over the trainer ranks, are packed, sealed, sent, compared and copied out. With one
GPU, which all ranks share, only ``cuda_ipc`` works; with several also ``nccl``, each rank on its own GPU, and
``nccl+cuda_ipc``, an engine rank on the GPU of each trainer rank.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from or1_megatron.handoff.message.shipment import unpack
from or1_megatron.handoff.message.slices import Slice
from or1_megatron.handoff.send_plan import HandoffPlan, make_plan
from or1_megatron.handoff.transfer import Transfer
from or1_megatron.handoff.transport.choice import neighbours_of
from or1_megatron.handoff.transport.links import Links, Location
from or1_megatron.handoff.transport.status_store import StatusStore, join_store, open_group, open_store
from or1_megatron.selftest.one_check import Context
from or1_megatron.selftest.plans import DEADLINE_S, transports_for
from or1_megatron.selftest.process import on_ranks
from or1_megatron.selftest.timing import copy_gb_per_s
from or1_megatron.weights.holdings import Holding

HANDOFFS = 4
COLUMNS = 1024


def rows_of(tensor: int, start: int, stop: int, device: str) -> torch.Tensor:
    """Return rows ``start`` to ``stop`` of the random tensor number ``tensor``, equal on every rank."""
    generator = torch.Generator(device).manual_seed(1000 * tensor + start)
    return torch.randn(stop - start, COLUMNS, generator=generator, device=device).to(torch.bfloat16)


def plan_of(transport: str, trainers: int, engines: int, tensors: int, rows: int, bucket_bytes: int) -> HandoffPlan:
    cuts = [rows * rank // trainers for rank in range(trainers + 1)]
    held = [
        Holding(f"t{index}", ((cuts[rank], cuts[rank + 1]), (0, COLUMNS)), (rank,))
        for index in range(tensors)
        for rank in range(trainers)
    ]
    wants = [[Slice(f"t{index}", ((0, rows), (0, COLUMNS)), torch.bfloat16) for index in range(tensors)]] * engines
    # two hops: engine rank i is beside trainer rank i
    beside = "+" in transport or transport in ("cuda_ipc", "shared_memory")
    devices = [str(rank) for rank in range(trainers + engines)]
    locations = [Location("here", devices[rank]) for rank in range(trainers)]
    theirs = [Location("here", devices[index % trainers if beside else trainers + index]) for index in range(engines)]
    return make_plan(held, wants, trainers, bucket_bytes, neighbours_of(transport, locations, theirs))


def device_of(rank: int, trainers: int, transport: str) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    beside = "+" in transport or torch.cuda.device_count() == 1
    index = rank % trainers if beside and rank >= trainers else rank
    torch.cuda.set_device(index % torch.cuda.device_count())
    return "cuda"


def one_rank(settings: dict[str, Any], note: Callable[[Any], None]) -> None:
    """Send or receive as one rank; rank 0 notes each handoff's seconds. A rank that receives wrong bytes fails."""
    transport, trainers, engines = settings["transport"], settings["trainers"], settings["engines"]
    world, rows, rank = trainers + engines, settings["rows"], int(os.environ["RANK"])
    device = device_of(rank, trainers, transport)
    store = join_store("127.0.0.1", settings["port"], DEADLINE_S)
    status = StatusStore(store, f"rank {rank}", DEADLINE_S)
    plan = plan_of(transport, trainers, engines, settings["tensors"], rows, settings["bucket_bytes"])
    group: Any = open_group(store, rank, world, DEADLINE_S)
    links = Links.open(transport, group, store, rank, world, trainers, DEADLINE_S)
    transfer = Transfer(plan, rank, links, status)
    start, stop = rows * rank // trainers, rows * (rank + 1) // trainers
    names = {f"t{index}": index for index in range(settings["tensors"])}
    if rank < trainers:
        held = {name: rows_of(index, start, stop, device) for name, index in names.items()}
    else:
        held = {name: torch.zeros(rows, COLUMNS, dtype=torch.bfloat16, device=device) for name in names}
    seconds: list[float] = []
    for handoff in range(1, HANDOFFS + 1):
        group.barrier().wait()
        started = time.perf_counter()
        if rank < trainers:
            transfer.send(lambda n, b: held[n][b[0][0] - start : b[0][1] - start], handoff)
        else:
            for shipment, message, _ in transfer.receive():
                for part in unpack(shipment, message, handoff):
                    part.verify()
                    held[part.slice.name][slice(*part.slice.box[0])].copy_(part.values)
        group.barrier().wait()
        seconds.append(time.perf_counter() - started)
    received = names if rank >= trainers else {}
    for (name, index), source in product(received.items(), range(trainers)):
        low, high = rows * source // trainers, rows * (source + 1) // trainers
        if not torch.equal(held[name][low:high], rows_of(index, low, high, device)):
            sys.exit(f"engine rank {rank - trainers}: {name} of trainer rank {source} is not what was sent")
    if rank == 0:
        note(seconds)
    transfer.close()


def transports(context: Context) -> None:
    cuda, devices = context.machine.cuda, context.machine.devices
    tensors, rows, bucket_bytes = (16, 1 << 17, 512 << 20) if cuda else (4, 4099, 4 << 20)
    size = tensors * rows * COLUMNS * 2
    here = "cuda" if cuda else "cpu"
    context.measure("copy on the device", copy_gb_per_s(here, here, size), "GB/s")
    for kind in transports_for(cuda, devices):
        ranks = max(1, devices // 2) if kind == "nccl" or not cuda else devices
        store = open_store("127.0.0.1", DEADLINE_S)  # not torchrun's: other processes can join this one
        settings: dict[str, Any] = {"transport": kind, "trainers": ranks, "engines": ranks, "port": store.port}
        settings |= {"tensors": tensors, "rows": rows, "bucket_bytes": bucket_bytes}
        _, *seconds = on_ranks(f"{__name__}:one_rank", settings, 2 * ranks, kind)
        name = f"{kind}, {ranks} trainer ranks to {ranks} engine ranks"
        context.require(f"{name}: every byte arrived", bool(seconds))
        context.measure(f"{name}: to each engine rank", size / min(seconds) / 1e9, "GB/s")
