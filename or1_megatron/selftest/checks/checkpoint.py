"""Self-test of checkpoints: saves, kills the ranks while a second save is under way, loads at another layout."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from or1_megatron.checkpoint import loader
from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from or1_megatron.parallel.mesh import build_mesh, start_process_group, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.rl.batch import pack
from or1_megatron.selftest.models import OBJECTIVE, random_qwen2, samples_of
from or1_megatron.selftest.one_check import CheckFailed, Context
from or1_megatron.selftest.process import on_ranks, run_function
from or1_megatron.selftest.setups import DEADLINE_S, save_and_load_layouts, small_shape
from or1_megatron.sizing.parallel_layouts import batch_layout, parse_layout

LENGTHS: Final = [60, 33, 48, 17, 64, 25, 40, 52]
ROW_TOKENS: Final = 64


def checkpoint(context: Context) -> None:
    model = random_qwen2(small_shape(context.machine.cuda), context.folder, torch.float32)
    before, after = save_and_load_layouts(context.machine.devices)
    folder = context.folder / "checkpoints"
    folder.mkdir()
    task = {"model": str(model), "folder": str(folder)}
    ranks = parse_layout(before, ROW_TOKENS).parallel.ranks
    _, expected = run_function(f"{__name__}:save", {**task, "layout": before}, ranks, f"saving at '{before}'")
    if expected is None:
        raise CheckFailed("the ranks that save ended before they were killed; see the log")
    ranks = parse_layout(after, ROW_TOKENS).parallel.ranks
    resumed = on_ranks(f"{__name__}:load", {**task, "layout": after}, ranks, f"loading at '{after}'")
    step = resumed["step"]
    context.measure("saved at", before)
    context.measure("loaded at", after)
    context.measure("loaded the checkpoint of step", step)
    pairs = zip(expected[step : step + 2], resumed["updates"], strict=True)
    apart = max(abs(a - b) / max(abs(a), 1e-3) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
    context.require("loss and gradient norm of the next two updates, relative difference", apart, at_most=1e-3)


class CheckpointRank:
    """One trainer rank with its policy, at the parallel layout that the task names."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        torch.set_num_threads(1)
        parallel: ParallelConfig = parse_layout(task["layout"], ROW_TOKENS).parallel
        start_process_group(DEADLINE_S)
        self.mesh = build_mesh(parallel, seed=1)
        settings = ModelConfig(hf=Path(task["model"]), dtype="float32")
        self.policy = MegatronPolicy(settings, parallel, OptimizerConfig(lr=1e-3, eps=1e-3), self.mesh)
        self.keeper = CheckpointKeeper(Path(task["folder"]), 2, False)
        self._batch = pack(samples_of(LENGTHS, 1000), batch_layout(parallel, self.policy.hf))

    def update(self) -> list[float]:
        """Make one SGD step; return [loss, gradient norm]."""
        rows, tokens = self._batch.ranks[self.mesh.data_rank], self._batch.token_count
        report = self.policy.update(rows, OBJECTIVE, tokens)
        return [report.sums["loss"] / tokens, report.grad_norm]


def save(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Make six updates with saves after the second and fourth update, note all results, then kill this rank."""
    rank = CheckpointRank(task)
    saver = CheckpointSaver(rank.policy)
    updates = [rank.update(), rank.update()]
    saver.save(rank.keeper.folder_for(2), {"step": 2})
    updates += [rank.update(), rank.update()]
    saver.finish(wait=True)
    saver.save(rank.keeper.folder_for(4), {"step": 4})  # may or may not be whole when the kill comes
    updates += [rank.update(), rank.update()]
    if rank.mesh.rank == 0:
        note(updates)
    torch.distributed.barrier(group=rank.mesh.control)
    os.kill(os.getpid(), signal.SIGKILL)


def load(task: Mapping[str, Any], note: Callable[[Any], None]) -> None:
    """Load the newest intact checkpoint, make two updates, and note the checkpoint's step and the updates' results."""
    rank = CheckpointRank(task)
    newest = rank.mesh.from_rank_0(rank.keeper.newest_intact() if rank.mesh.rank == 0 else None)
    state = loader.load(rank.policy, newest)
    updates = [rank.update(), rank.update()]
    if rank.mesh.rank == 0:
        note({"step": state["step"], "updates": updates})
    stop_process_group()
