"""Plans a run and checks its inputs before it starts: folder, model, GPUs, memory, trackers, previous stage.

The checks take seconds and start no rank, engine or cluster. ``or1 train`` makes them once, before the ranks start.
``data.prompts`` checks the problems.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.manifest import MANIFEST, check_manifest
from or1_megatron.config.load import ConfigError, load_as
from or1_megatron.config.resume import check_next_stage, check_resume
from or1_megatron.config.schema import Config, TrackConfig
from or1_megatron.handoff.transport.choice import check_transport
from or1_megatron.rl.fatal_checks import check_state
from or1_megatron.rl.loop_arguments import Begin
from or1_megatron.rl.stages import StageSchedule
from or1_megatron.rollout.engine_args import check_engine_args
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.runtime.run_folder import LOOP_STATE, RunFolder, step_of
from or1_megatron.runtime.trackers import check_trackers
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.kv_cache import with_gpu_memory
from or1_megatron.sizing.memory import NotEnoughMemory, memory_short
from or1_megatron.sizing.parallel_layouts import choose_layers
from or1_megatron.sizing.run_plan import Plan, plan_run
from or1_megatron.weights.adapters import AdapterTable
from or1_megatron.weights.families import family_of, read_hf_config
from or1_megatron.weights.files import check_weight_files
from or1_verify.errors import UserError

_LAST_PROCESS_S = 2.0  # in which the last process of a killed run may still use the folder


def plan_start(config: Config, device: Device) -> Plan:
    """Return the plan of a run that starts now. On GPUs the plan uses the memory of this machine's GPUs. The plan's
    warnings also say which records the start deletes. Raises the same errors as ``plan_run``."""
    planned = plan_run(with_gpu_memory(config) if device == "cuda" else config, device)
    return replace(planned, warnings=(*planned.warnings, *discarded(config)))


def check_inputs(config: Config, ranks_here: int) -> None:
    """Check the run folder, the model's weight files, and that this machine can do what the configuration asks for.

    Args:
        ranks_here: how many of the trainer's ranks will be on this machine.

    Raises:
        RunFolderBusy: another trainer uses the folder.
        ConfigError: a key that may not change has another value in the folder's run, or there are too few GPUs.
        PreviousStageMissing: the previous stage has left no checkpoint.
        ResumeError: the previous stage has not ended.
        LayersUnavailable: Transformer Engine's layers are asked for where they cannot run.
        ModelError: the model cannot be used.
        UserError: a tracker cannot be used.
        OSError: the folder cannot be made.
    """
    check_trackers(config.track)
    if (first := config.track.prometheus_port) is not None and config.cluster.nodes == 1:
        for port in range(first + 1, first + 1 + config.rollout.engines):
            check_trackers(TrackConfig(prometheus_port=port))
    folder = RunFolder(config.run.folder)
    begin_of(config, folder)  # before anything is made on the disk
    folder.create()
    with folder.lock(_LAST_PROCESS_S):
        if checkpoint_keeper(config, folder).newest() is not None and folder.config.is_file():
            check_resume(load_as(Config, folder.config, own=True), config)
    choose_layers(config.parallel, config.model.dtype)
    check_transport(config, torch.cuda.is_available())
    check_engine_args(config.rollout)
    if torch.cuda.is_available():
        check_gpus_here(config, ranks_here, torch.cuda.device_count())
    for model in (config.model.hf, config.algorithm.kl.reference):
        if model is not None:
            check_weight_files(model, read_hf_config(model))
    if (lora := config.model.lora) is not None and lora.adapter is not None:
        hf = read_hf_config(config.model.hf)
        AdapterTable(family_of(hf), hf, lora.rank, lora.targets).read(lora.adapter, config.model.hf, lora.alpha)


def check_room(planned: Plan) -> None:
    """Check that the run's estimated memory fits. On CPU, the limit is the host's free memory; on GPUs, the smaller of
    ``cluster.gpu_memory_gb`` and the total memory of the smallest GPU here.

    Raises:
        NotEnoughMemory: the estimate is larger, and ``cluster.check_memory`` is on.
    """
    if not planned.config.cluster.check_memory:
        return
    there = host_memory().free
    if planned.device == "cuda":
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        sizes = [int(gpu.total_memory) for gpu in gpus]
        if (named := planned.config.cluster.gpu_memory_gb) is not None:
            sizes.append(int(named * 1e9))
        if not sizes:
            return
        there = min(sizes)
    if short := memory_short(planned.config, planned.shape, planned.device, there):
        raise NotEnoughMemory(short)


def check_gpus_here(config: Config, ranks_here: int, gpus: int) -> None:
    """Check that this machine has enough GPUs for its ranks, and for separate engines if the run starts its own Ray.

    Args:
        gpus: the number of GPUs that this process sees.

    Raises:
        ConfigError: the configuration needs more than ``gpus`` GPUs.
    """
    needed, asked = ranks_here, f"parallel.ranks = {config.parallel.ranks}"
    if ranks_here < config.parallel.ranks:
        asked += f", of which {ranks_here} are here,"
    if config.rollout.placement == "separate" and config.cluster.ray_address is None:
        rollout = config.rollout
        needed += rollout.engines * rollout.tensor_parallel
        asked += (
            f" and, with rollout.placement = separate, rollout.engines {rollout.engines} * tensor_parallel "
            f"{rollout.tensor_parallel} on others"
        )
    if needed > gpus:
        limit = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"{asked} need {needed} GPUs, and there are {gpus} here"
            + (f" (CUDA_VISIBLE_DEVICES = {limit})" if limit is not None else "")
            + "; lower one of them, share GPUs (rollout.placement = colocated), or start one launcher per node"
        )


class PreviousStageMissing(UserError, FileNotFoundError):
    """The previous stage has left no checkpoint to begin from."""


def begin_of(config: Config, folder: RunFolder, whole: bool = False) -> Begin | None:
    """Return where a run of one stage begins; None for the first stage, and for a run that has checkpoints of its own.

    Args:
        whole: read the whole checkpoint and compare it with its checksums.

    Raises:
        PreviousStageMissing: the previous stage has left no checkpoint.
        ResumeError: the previous stage has not ended.
        ConfigError: the previous stage's run differs in configuration keys that a new stage may not change.
        CheckpointDamaged: with ``whole``, the checkpoint does not match its checksums.
        CheckpointUnreadable: with ``whole``, the checkpoint cannot be read.
    """
    number = config.run.stage
    if number is None or number == 1 or checkpoint_keeper(config, folder).newest() is not None:
        return None
    begin = _previous(config, number)
    state = json.loads((begin.checkpoint / LOOP_STATE).read_text())
    check_state(state, ("steps_done", "schedule"))
    schedule = StageSchedule(config.stages, number)
    schedule.restore(state["schedule"], state["steps_done"])
    begin.check(schedule, state["steps_done"])
    before = RunFolder(begin.checkpoint.parent.parent).config
    if before.is_file():
        check_next_stage(load_as(Config, before, own=True), config, begin.checkpoint)
    if whole:
        check_manifest(begin.checkpoint)
    return begin


def _previous(config: Config, number: int) -> Begin:
    """Return the checkpoint from which stage ``number`` (from 1) begins."""
    chosen = config.run.previous
    before = chosen or config.run.dir / f"stage_{number - 1}"
    if (before / MANIFEST).is_file() and step_of(before) is not None:
        return Begin(before, number - 1, chosen=True)
    newest = checkpoint_keeper(config, RunFolder(before)).newest()
    if newest is None:
        raise PreviousStageMissing(
            f"stage {number} ('{config.stages[number - 1].name}') begins from a checkpoint of stage {number - 1} "
            f"('{config.stages[number - 2].name}'), and there is none in {before}"
            + ("" if before.is_dir() else ", which does not exist")
            + f"; train that stage first (--stage {number - 1}), or say where its run or checkpoint lies with "
            "--set run.previous=..."
        )
    return Begin(newest, number - 1, chosen=False)


def discarded(config: Config) -> Iterator[str]:
    """Yield a warning if the run's start deletes records that a killed session made after its newest checkpoint."""
    folder = RunFolder(config.run.folder)
    newest = checkpoint_keeper(config, folder).newest()
    saved = -1 if newest is None else step_of(newest) or 0
    later = sorted(step for step in folder.recorded_steps() if step > saved)
    behind = "of which it saved no checkpoint" if newest is None else f"behind the checkpoint of step {saved}"
    if later:
        yield (
            f"{folder.root} holds steps {later[0]} to {later[-1]} of an earlier session, {behind}: their metrics and "
            "rollouts are deleted, and the steps are made again; copy the folder to keep them"
        )


def checkpoint_keeper(config: Config, folder: RunFolder) -> CheckpointKeeper:
    keep = config.checkpoint
    return CheckpointKeeper(folder.checkpoints, keep.keep_last, keep.keep_best, keep.keep_every_steps)
