"""The checks before a run starts. They take seconds, and start no rank, engine or cluster."""

from __future__ import annotations

import json
import os

import torch

from or1_megatron.config.load import ConfigError, load_config
from or1_megatron.config.resume import check_next_stage, check_resume
from or1_megatron.config.schema import Config
from or1_megatron.handoff.backend_check import check_choice
from or1_megatron.rl.checks import ResumeError, check_state
from or1_megatron.rl.ports import Begin
from or1_megatron.rl.stages import StageSchedule
from or1_megatron.rollout.engine_args import check_engine_args
from or1_megatron.runtime.host_memory import host_memory
from or1_megatron.runtime.manifest import MANIFEST, check_manifest
from or1_megatron.runtime.memory_folder import SHARED_MEMORY, memory_keeper
from or1_megatron.runtime.run_folder import LOOP_STATE, CheckpointKeeper, RunFolder, step_of
from or1_megatron.sizing.memory import check_memory, gib, needed
from or1_megatron.sizing.parallel_layouts import choose_layers
from or1_megatron.sizing.run_plan import Plan
from or1_megatron.sizing.storage import disk_free, in_memory_bytes, node_memory
from or1_megatron.trainer.prompts import abilities_of, load_prompts, read_problems
from or1_megatron.weights.families import ModelError, read_hf_config
from or1_megatron.weights.files import check_weight_files
from or1_verify.errors import UserError
from or1_verify.problems.unusable import UnusableRows
from or1_verify.verifiers import build_verifiers


def check_inputs(config: Config, ground_truths: bool = False) -> None:
    """Check the run folder, the model's weight files and every row of the data.

    Ground truths and prompts are left to the start of the run, which checks all of them, unless ``ground_truths`` asks
    for them here or other rows are refused: then all unusable rows are found at once.

    Raises:
        RunFolderBusy, ConfigError: another trainer uses the folder, the run in it had another configuration, or the
            run asks for more GPUs than are here.
        PreviousStageMissing, ResumeError: the stage before has left no checkpoint, or has not ended.
        LayersUnavailable: Transformer Engine's layers are asked for where they cannot run.
        ModelError, DataError, SandboxUnavailable, VerifierBroken: the model, the problems or their verifiers cannot be
            used.
        OSError: the folder cannot be made.
    """
    folder = RunFolder(config.run.folder)
    begin_of(config, folder)  # before anything is made on the disk
    folder.create()
    with folder.lock(wait_s=2.0):
        check_resumable(config, folder)
    choose_layers(config.parallel, config.model.dtype)
    check_choice(config, torch.cuda.is_available())
    check_engine_args(config.rollout)
    if torch.cuda.is_available():
        check_gpus_here(config, torch.cuda.device_count())
    for model in (config.model.hf, config.algorithm.kl.reference):
        if model is not None:
            check_weight_files(model, read_hf_config(model))
    unusable = UnusableRows()
    train, held_out = read_problems(config, unusable)
    if ground_truths or (unusable and config.data.unusable == "refuse"):
        load_prompts(config)
        return
    for verifier in build_verifiers(config.verify, abilities_of(*train, *held_out)).values():
        verifier.close()


def check_room(planned: Plan) -> None:
    """Compare the estimate of the run's memory with what is free on the host, or with all that the smallest GPU has:
    the smallest here, and no more than ``cluster.gpu_memory_gb``.

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
    check_memory(planned.config, planned.shape, planned.device, there)


def no_room_in_memory(planned: Plan, ranks_here: int) -> str | None:
    """Return why this machine has no room for checkpoints in memory; None: it has, or the run makes none."""
    config = planned.config
    if not (wanted := in_memory_bytes(config, planned.shape, ranks_here)):
        return None
    rest = needed(config, planned.memory, "cpu")
    if planned.device == "cuda":
        rest = node_memory(config, planned.shape, torch.cuda.device_count()).peak_bytes
    here, free = disk_free(SHARED_MEMORY), host_memory().free
    if wanted <= here and (wanted + rest <= free or not config.cluster.check_memory):
        return None
    return (
        f"no checkpoints in memory, which would take {gib(wanted)}: {SHARED_MEMORY} has {gib(here)} free, and of this "
        f"machine's {gib(free)} of free memory the run itself needs about {gib(rest)}. After the loss of a rank the "
        "run goes back to its newest checkpoint on disk"
    )


def check_gpus_here(config: Config, gpus: int) -> None:
    """Check that a run whose ranks all start on this machine finds its GPUs here, before anything starts.

    Args:
        gpus: how many this process sees.

    Raises:
        ConfigError: there are fewer than the configuration asks for.
    """
    needed, asked = config.parallel.ranks, f"parallel.ranks = {config.parallel.ranks}"
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


def lacking(config: Config) -> list[str]:
    """Return why the run could not start now: what its model or the stage before it lacks. Reads little."""
    found = []
    try:
        begin_of(config, RunFolder(config.run.folder))
    except (PreviousStageMissing, ResumeError, ConfigError) as error:
        found.append(str(error))
    for model in (config.model.hf, config.algorithm.kl.reference):
        try:
            if model is not None:
                check_weight_files(model, read_hf_config(model))
        except ModelError as error:
            found.append(str(error))
    return found


class PreviousStageMissing(UserError, FileNotFoundError):
    """The previous stage has left no checkpoint to begin from."""


def begin_of(config: Config, folder: RunFolder, whole: bool = False) -> Begin | None:
    """Return where a run of one stage begins; None for the first stage, and when the run has checkpoints of its own.

    Args:
        whole: read the whole checkpoint and compare it with its checksums.

    Raises:
        PreviousStageMissing, ResumeError: the stage before has left no checkpoint, or has not ended.
        ConfigError: its run had another configuration, in more than a new stage may change.
        CheckpointDamaged, CheckpointUnreadable: with ``whole``.
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
        check_next_stage(load_config(before), config, begin.checkpoint)
    if whole:
        check_manifest(begin.checkpoint)
    return begin


def _previous(config: Config, number: int) -> Begin:
    """Return the checkpoint from which stage ``number`` (from 1) begins."""
    chosen = config.run.previous
    place = chosen or config.run.dir / f"stage_{number - 1}"
    if (place / MANIFEST).is_file() and step_of(place) is not None:
        return Begin(place, number - 1, chosen=True)
    keep = config.checkpoint
    newest = CheckpointKeeper(RunFolder(place).checkpoints, keep.keep_last, keep.keep_best).newest()
    if newest is None:
        raise PreviousStageMissing(
            f"stage {number} ('{config.stages[number - 1].name}') begins from a checkpoint of stage {number - 1} "
            f"('{config.stages[number - 2].name}'), and there is none in {place}"
            + ("" if place.is_dir() else ", which does not exist")
            + f"; train that stage first (--stage {number - 1}), or say where its run or checkpoint lies with "
            "--set run.previous=..."
        )
    return Begin(newest, number - 1, chosen=False)


def check_resumable(config: Config, folder: RunFolder) -> None:
    """Raise ConfigError when the folder holds checkpoints of a run whose configuration was another."""
    if checkpoint_keeper(config, folder).newest() is not None and folder.config.is_file():
        check_resume(load_config(folder.config), config)


def checkpoint_keeper(config: Config, folder: RunFolder) -> CheckpointKeeper:
    keep = config.checkpoint
    memory = memory_keeper(folder.checkpoints)
    return CheckpointKeeper(folder.checkpoints, keep.keep_last, keep.keep_best, keep.keep_every_steps, memory)
