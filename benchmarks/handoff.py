"""What a handoff costs on CPU: slices from every trainer rank, against gathering on rank 0 and broadcasting.

    python benchmarks/handoff.py [ROUNDS]       (two rounds by default: about twelve minutes)

A policy of 100M parameters in bf16 at TP2 x PP2 (four torchrun ranks) hands off to two engines of one rank, then to two
of two ranks: by turns the backend ``gloo``, and ``shard`` over gloo and over shared memory, each to engines of its own,
in one run. After each turn of ``shard`` the same messages go once more, unpacked and unread, to bare processes: the
plain copy. Every rank has one thread. Reported are medians over all handoffs but the first of each turn; bytes are
those that the transports of each rank have counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from result import figure, write_result

ROOT = Path(__file__).resolve().parents[1]
BUCKET_BYTES = 16 << 20
HANDOFFS = 6
TRAINER_RANKS = 4
WAYS = {"gloo": ("gloo", "gloo"), "slices": ("shard", "gloo"), "slices, memory": ("shard", "shared_memory")}
"""(backend, transport) by the names in the figures; the first is the baseline."""
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2560,
    "num_hidden_layers": 10,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def make_model(folder: Path, shape: dict[str, Any], dtype: Any) -> None:
    """Write an HF folder with random weights."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**shape)).to(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def forget_peak() -> int:
    """The resident bytes now, from which the next peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def worker(model: Path, out: Path, rounds: int) -> None:
    """One trainer rank. Rank 0 starts the engines too, and writes what was measured."""
    import torch
    import torch.distributed as dist

    from or1_megatron.config.schema import HandoffConfig, ModelConfig, OptimizerConfig, ParallelConfig, RolloutConfig
    from or1_megatron.handoff.sender import make_sender
    from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
    from or1_megatron.parallel.policy import MegatronPolicy
    from or1_megatron.rollout.cluster import start_ray, stop_ray
    from or1_megatron.rollout.pool import EnginePool

    torch.set_num_threads(1)
    start_process_group(900)
    parallel = ParallelConfig(ranks=TRAINER_RANKS, tensor=2, pipeline=2)
    mesh = build_mesh(parallel, seed=1, timeout_s=900)
    policy = MegatronPolicy(ModelConfig(hf=model, dtype="bfloat16"), parallel, OptimizerConfig(), mesh)
    if mesh.rank == 0:
        start_ray(None, "benchmark-handoff")
    turns = []
    for number in range(rounds):
        for tensor in (1, 2):
            for way, (backend, transport) in WAYS.items():
                config = HandoffConfig(backend=backend, transport=transport, bucket_bytes=BUCKET_BYTES, timeout_s=300)
                pool, control = None, None
                if mesh.rank == 0:
                    rollout = RolloutConfig(engines=2, tensor_parallel=tensor, kv_cache_bytes=16 << 20)
                    name = f"benchmark-{number}-{tensor}-{way.replace(', ', '-')}"
                    pool = EnginePool(rollout, model, "bfloat16", 128, name, True, weight_transfer=backend)
                    pool.wait_ready()
                    control = pool.control(300)
                sender: Any = make_sender(policy.weights, mesh.rank, config, control)
                turn = measure(sender, mesh)
                plain = [] if backend == "gloo" else plain_copy(sender.transfer.plan, transport, mesh)
                if mesh.rank == 0:
                    assert pool is not None and control is not None and control.versions() == [HANDOFFS] * 2
                    received = [each.bytes_received for each in sender.stats[sender.transfer.plan.trainers :]]
                    turns.append({**turn, "tensor": tensor, "way": way, "received": received, "plain": plain})
                    print(f"TP{tensor} {way}: {[round(s, 2) for s in turn['seconds']]} s, plain {plain}", flush=True)
                sender.close()
                if pool is not None:
                    pool.close()
    if mesh.rank == 0:
        out.write_text(json.dumps(turns))
        stop_ray()
    dist.barrier(mesh.control)
    stop_process_group()


def count_allocations(sender: Any) -> list[int]:
    """[bytes] that a rank's transports have been asked for from now on: what they get may be memory used before."""
    asked = [0]
    for link in sender.transfer.links.all if sender._transfer else []:

        def allocate(size_bytes: int, real: Any = link.allocate) -> Any:
            asked[0] += size_bytes
            return real(size_bytes)

        link.allocate = allocate
    return asked


def measure(sender: Any, mesh: Any) -> dict[str, Any]:
    """Seconds of each handoff but the first; of every trainer rank the most that its memory grew in one, and the most
    that its transports were asked for."""
    import torch.distributed as dist

    seconds, grown, size, asked = [], 0, 0, [0]
    most_asked = 0
    for version in range(1, HANDOFFS + 1):
        dist.barrier(mesh.control)
        before = forget_peak()
        asked[0] = 0
        started = time.perf_counter()
        size = sender.send(version)
        dist.barrier(mesh.control)
        if version > 1:
            seconds.append(time.perf_counter() - started)
            grown, most_asked = max(grown, peak_bytes() - before), max(most_asked, asked[0])
        else:
            asked = count_allocations(sender)
    everyone: list[int] = [0] * mesh.world
    dist.all_gather_object(everyone, max(grown, most_asked), group=mesh.control)
    return {"seconds": seconds, "extra_bytes": everyone, "bytes": size}


def plain_copy(plan: Any, transport: str, mesh: Any) -> list[float]:
    """Seconds for the plan's messages over the same transport to bare processes, neither packed nor read."""
    import torch.distributed as dist

    from or1_megatron.handoff.shard.transfer import Transfer
    from or1_megatron.handoff.transport.group import join_store, open_store
    from or1_megatron.handoff.transport.status_store import StatusStore

    parts: list[Any] = [None] * mesh.world
    dist.all_gather_object(parts, plan.shipments, group=mesh.control)
    shipments = sorted({s for part in parts for s in part}, key=lambda s: s.number)
    whole = type(plan)(plan.trainers, plan.engines, tuple(shipments))
    store = open_store("127.0.0.1", 300.0) if mesh.rank == 0 else None
    port = [None if store is None else store.port]
    dist.broadcast_object_list(port, src=0, group=mesh.control)
    store = store or join_store("127.0.0.1", port[0], 300.0)
    status = StatusStore(store, f"rank {mesh.rank}", 300.0)
    receivers = []
    if mesh.rank == 0:
        status.publish("plan", (whole, transport))
        receivers = [
            subprocess.Popen([sys.executable, __file__, "copier", str(port[0]), str(index)])
            for index in range(plan.engines)
        ]
    transfer = Transfer.open(whole, transport, mesh.rank, status)
    seconds = []
    for _ in range(HANDOFFS):
        dist.barrier(mesh.control)
        started = time.perf_counter()
        send_bare(transfer)
        dist.barrier(mesh.control)
        seconds.append(time.perf_counter() - started)
    for receiver in receivers:
        receiver.wait(60)
    transfer.close()
    return seconds[1:]


def send_bare(transfer: Any) -> None:
    """``Transfer.send`` without its reading, packing and checksums."""
    rank, links = transfer.rank, transfer.links
    mine = transfer.plan.sent_by(rank)
    size, idle, travelling = max((s.size_bytes for s in mine), default=0), list[Any](), list[Any]()
    for shipment in mine:
        if len(travelling) == 2:
            futures, buffer = travelling.pop(0)
            for future in futures:
                transfer.status.wait(future, "a plain copy")
            idle.append(buffer)
        to = shipment.children(rank)
        buffer = idle.pop() if idle else links.between(rank, to[0]).allocate(size)
        message = buffer[: shipment.size_bytes]
        travelling.append(([links.between(rank, t).send(message, t, shipment.number) for t in to], buffer))
    for futures, _ in travelling:
        for future in futures:
            transfer.status.wait(future, "a plain copy")
    links.free_buffers()


def copier(port: int, index: int) -> None:
    """A bare receiver; of shared memory it reads every byte once, as gloo's receiver does by copying."""
    import torch

    from or1_megatron.handoff.shard.transfer import Transfer
    from or1_megatron.handoff.transport.group import join_store
    from or1_megatron.handoff.transport.status_store import StatusStore

    torch.set_num_threads(1)
    store = join_store("127.0.0.1", port, 300.0)
    status = StatusStore(store, f"copier {index}", 300.0)
    plan, transport = status.read("plan", "rank 0")
    rank = plan.trainers + index
    transfer = Transfer.open(plan.of(rank), transport, rank, status)
    own = torch.empty(2 * BUCKET_BYTES, dtype=torch.uint8)
    for _ in range(HANDOFFS):
        for _, message, _ in transfer.receive():
            if transport == "shared_memory":
                own[: message.numel()].copy_(message)
        transfer.links.free_buffers()
    transfer.close()


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:2] == ["copier"]:
        copier(int(sys.argv[2]), int(sys.argv[3]))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    import torch

    from or1_megatron.handoff.shard.forecast import expected_wants
    from or1_megatron.weights.families import family_of, read_hf_config

    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "model", Path(name) / "turns.json"
        make_model(folder, SHAPE, torch.bfloat16)
        hf = read_hf_config(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={TRAINER_RANKS}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        subprocess.run([*command, __file__, "worker", str(folder), str(out), str(rounds)], check=True, env=environment)
        turns = json.loads(out.read_text())
    figures: dict[str, Any] = {}
    for tensor, goal in ((1, 1.3), (2, 2.0)):
        of = {way: [t for t in turns if t["tensor"] == tensor and t["way"] == way] for way in WAYS}
        medians = {way: statistics.median(s for turn in of[way] for s in turn["seconds"]) for way in WAYS}
        wants = [expected_wants(family_of(hf), hf, torch.bfloat16, rank, tensor) for rank in range(tensor)] * 2
        shards = [sum(want.size_bytes for want in each) for each in wants]
        to = f"to two engines of TP{tensor}"
        baseline, *slices = WAYS
        figures[f"{baseline} {to}"] = figure(medians[baseline], "s")
        grown = max(size for turn in of[baseline] for size in turn["extra_bytes"]) / BUCKET_BYTES
        figures[f"{baseline} {to}: trainer rank's extra memory, in buckets"] = figure(grown)
        for way in slices:
            figures[f"{way} {to}"] = figure(medians[way], "s")
            figures[f"{way} {to}: times as fast as {baseline}"] = figure(
                medians[baseline] / medians[way], at_least=goal
            )
            shares = [got / shard for turn in of[way] for got, shard in zip(turn["received"], shards, strict=True)]
            figures[f"{way} {to}: received over shard, largest"] = figure(max(shares), at_most=1.05)
            grown = max(size for turn in of[way] for size in turn["extra_bytes"]) / BUCKET_BYTES
            figures[f"{way} {to}: trainer rank's extra memory, in buckets"] = figure(grown, at_most=2.0)
            plain = statistics.median(s for turn in of[way] for s in turn["plain"])
            figures[f"{way} {to}: plain copy's share of the time"] = figure(plain / medians[way])
    settings = {"shape": SHAPE, "dtype": "bfloat16", "trainer": "TP2 PP2", "engines": 2, "bucket bytes": BUCKET_BYTES}
    path = write_result("handoff", figures, {**settings, "handoffs per turn": HANDOFFS - 1, "rounds": rounds})
    print(json.dumps(figures, indent=2))
    print(path)


if __name__ == "__main__":
    main()
