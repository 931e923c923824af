"""Runs a trainer rank once Ray and the engines have been started, and joins all parts of the run.

Rank 0 makes the prompts, starts the RolloutManager, and runs the loop. The other ranks hold their shard of the policy
and execute the calls (verbs) that rank 0 relays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import torch

from or1_megatron.checkpoint.keeper import CheckpointKeeper
from or1_megatron.checkpoint.saver import CheckpointSaver
from or1_megatron.config.hardware import hardware_of
from or1_megatron.config.load import resolved_yaml
from or1_megatron.config.schema import Config
from or1_megatron.data.prompts import ProblemSets, make_prompts, thinking_rule
from or1_megatron.data.stream import MixtureStream
from or1_megatron.errors import STOPPED
from or1_megatron.evaluate.held_out import HeldOut
from or1_megatron.handoff.probe import Probe
from or1_megatron.handoff.sender import WeightSender
from or1_megatron.parallel.frozen_reference import FrozenReference
from or1_megatron.parallel.lockstep import Lockstep, Verb
from or1_megatron.parallel.mesh import Mesh, build_mesh, stop_process_group
from or1_megatron.parallel.policy import MegatronPolicy
from or1_megatron.parallel.schedule import time_schedules
from or1_megatron.report.console.run_console import RunConsole, open_console
from or1_megatron.report.console.summary import summarise
from or1_megatron.rl.loop import Loop
from or1_megatron.rl.loop_arguments import Begin, LoopConfig, Ports
from or1_megatron.rl.metrics import TrainerGpus
from or1_megatron.rollout.client import RolloutsClient
from or1_megatron.rollout.engine_pool import EnginePool
from or1_megatron.runtime.faults import Fault, FaultRecord
from or1_megatron.runtime.heartbeat import Heartbeat
from or1_megatron.runtime.jsonl import JsonlWriter
from or1_megatron.runtime.launch import threads_of_rank
from or1_megatron.runtime.record import Observers, RunRecord
from or1_megatron.runtime.run_folder import RunFolder
from or1_megatron.runtime.seeds import seed_everything
from or1_megatron.runtime.signals import StopRequested
from or1_megatron.runtime.timers import StepTimer
from or1_megatron.runtime.versions import session
from or1_megatron.runtime.world import ranks_per_node
from or1_megatron.sizing.parallel_layouts import batch_layout, choose_layers
from or1_megatron.trainer.nodes_alike import join_world
from or1_megatron.trainer.placement import engine_places, offloads, sized_rollout, takes_turns
from or1_megatron.trainer.preflight import begin_of, checkpoint_keeper
from or1_megatron.trainer.synced_policy import DeviceSharing, SyncedPolicy, rank_verbs

log = logging.getLogger(__name__)


def loop_config(config: Config, policy: MegatronPolicy, folder: RunFolder, begin: Begin | None) -> LoopConfig:
    parallel = config.parallel
    hardware = None
    if torch.cuda.is_available():
        card = hardware_of(torch.cuda.get_device_name())
        peak = None if card is None else card.bf16_flops.value
        # Frozen weights have no gradient: 4 operations for each of them and each token instead of 6.
        hardware = TrainerGpus(parallel.ranks, peak, (2 * policy.parameter_count + policy.trained_count) // 3)
    return LoopConfig(
        seed=config.run.seed,
        stages=config.stages,
        algorithm=config.algorithm,
        evaluation=config.evaluate,
        checkpoint=config.checkpoint,
        layout=batch_layout(parallel, policy.hf),
        max_error_fraction=config.verify.max_error_fraction,
        export_folder=folder.hf,
        hardware=hardware,
        safety=config.safety,
        dtype=config.model.dtype,
        stage_count=config.run.stage,
        begin=begin,
        mixtures=tuple(config.repeats(stage) for stage in config.stages),
        max_staleness=config.rollout.max_staleness,
        one_pass=parallel.head == "one_pass",
    )


@contextmanager
def trainer_rank(config: Config) -> Iterator[tuple[Mesh, MegatronPolicy]]:
    """Yield this rank's mesh and its shard of the policy. Ends the process group afterwards. Raises NodesDiffer."""
    torch.set_num_threads(threads_of_rank(config.parallel.threads_per_rank, ranks_per_node(config.parallel.ranks)))
    join_world(config)
    try:
        mesh = build_mesh(config.parallel, config.run.seed, config.cluster.verb_timeout_s)
        seed_everything(config.run.seed, mesh.rank)
        if config.track.timeline:
            time_schedules(mesh.pipeline_rank, mesh.pipeline)
        yield mesh, MegatronPolicy(config.model, config.parallel, config.optimizer, mesh)
    finally:
        stop_process_group()


def reference_scorer(config: Config, mesh: Mesh, policy: MegatronPolicy) -> Verb | None:
    """Return the verb that scores with this rank's shard of the KL reference; None if no reference is configured.

    Loads the reference if it has weights of its own. A collective call.
    """
    folder = config.algorithm.kl.reference
    if folder is None:
        return None
    if not config.loads_reference:
        return policy.score_base
    return FrozenReference(folder, config.model.dtype, config.parallel, mesh, offloads(config)).score


def serve(config: Config, stop: StopRequested, heart: Heartbeat) -> None:
    """Run a rank other than 0: execute the calls that rank 0 relays until rank 0 is done."""
    engine_places(config)
    with trainer_rank(config) as (mesh, policy):
        score_reference = reference_scorer(config, mesh, policy)
        sender = WeightSender(policy.weights, mesh.rank, config.handoff)
        saver = CheckpointSaver(policy, config.checkpoint.asynchronous, config.cluster.verb_timeout_s)
        verbs = rank_verbs(policy, saver, sender, score_reference, config)
        faults = FaultRecord(RunFolder(config.run.folder).root)
        lockstep = Lockstep(mesh, verbs, config.cluster.verb_timeout_s, heart, faults.failed(f"rank {mesh.rank}"))
        with stop.handling_signals(), saver:
            lockstep.serve()


def lead(
    config: Config,
    folder: RunFolder,
    problems: ProblemSets,
    engines: EnginePool,
    stop: StopRequested,
    heart: Heartbeat,
    started_s: float,
) -> int:
    """Run rank 0, which has all parts that exist once per run, and return its exit status (``run.run_rank``).

    Args:
        engines: the engines, which may still be starting.
        started_s: when this process started, in seconds since the epoch.
    """
    with ExitStack() as stack:
        keeper, begin = open_run(config, folder)
        sources, held_out = make_prompts(config, problems)
        problems.close()
        settings = sized_rollout(config), config.verify, frozenset(problems.verifiers)
        rollouts = RolloutsClient(engines, *settings, folder.run_id, stop=stop.requested)
        stack.callback(rollouts.close)
        if takes_turns(config):  # engines measure free memory as they start: the trainer's state comes after that
            engines.wait_ready()
            engines.control(config.handoff.timeout_s).sleep()
        mesh, policy = stack.enter_context(trainer_rank(config))
        record = RunRecord(folder, config.track, config.model_dump(mode="json"))
        synced = serve_policy(config, mesh, policy, engines, rollouts, record, FaultRecord(folder.root), heart, stack)
        shown = run_console(config, rollouts)
        shown.say(thinking_rule(sources))
        stack.callback(shown.close)
        stack.callback(record.close)
        recorders = Observers([record, shown], heart.says)
        evaluated = config.stages[-1].max_response_tokens, config.verify.max_error_fraction
        ports = Ports(
            policy=synced,
            rollouts=rollouts,
            stream=MixtureStream(sources, config.run.seed),
            evaluator=HeldOut(held_out, rollouts, *evaluated, keep=record.held_out) if held_out else None,
            observer=recorders,
            tracker=recorders,
            keeper=keeper,
            timer=StepTimer(),
            stop=stop.requested,
        )
        with stop.handling_signals():  # before, there is nothing to save, and signals kill
            return run_loop(config, folder, Loop(loop_config(config, policy, folder, begin), ports), shown, started_s)


def open_run(config: Config, folder: RunFolder) -> tuple[CheckpointKeeper, Begin | None]:
    """Check the checkpoints, write the configuration, and return (checkpoint keeper, where the run begins)."""
    keeper = checkpoint_keeper(config, folder)
    keeper.clean()
    if warning := choose_layers(config.parallel, config.model.dtype).warning:
        log.warning(warning)
    keeper.newest_intact()
    begin = begin_of(config, folder, whole=True)
    folder.write_config(resolved_yaml(config))
    with closing(JsonlWriter(folder.sessions, "the session")) as sessions:
        sessions.write(session())
    return keeper, begin


def serve_policy(
    config: Config,
    mesh: Mesh,
    policy: MegatronPolicy,
    engines: EnginePool,
    rollouts: RolloutsClient,
    record: RunRecord,
    faults: FaultRecord,
    heart: Heartbeat,
    stack: ExitStack,
) -> SyncedPolicy:
    """Wait for the engines, and return the loop's policy, which drives all ranks and hands weights to the engines."""
    score_reference = reference_scorer(config, mesh, policy)
    asynchronous, timeout_s = config.checkpoint.asynchronous, config.cluster.verb_timeout_s
    saver = CheckpointSaver(policy, asynchronous, timeout_s, before_complete=record.wait_written)
    stack.enter_context(saver)
    group = engines.control(config.handoff.timeout_s)
    sender = WeightSender(policy.weights, 0, config.handoff, group)
    stack.callback(sender.close)
    verbs = rank_verbs(policy, saver, sender, score_reference, config)
    lockstep = Lockstep(mesh, verbs, timeout_s, heart, faults.failed("rank 0"))
    stack.callback(lockstep.close)  # whatever fails from here on, the other ranks are released
    engines.wait_ready()
    sharing = DeviceSharing(engines_sleep=takes_turns(config), trainer_offloads=offloads(config))
    probe = Probe(config.handoff, config.model.dtype, policy.hf["vocab_size"], config.longest_sequence)
    layout = batch_layout(config.parallel, policy.hf)
    synced = SyncedPolicy(lockstep, saver, engines, group, rollouts, config.handoff, probe, layout, sharing)
    rollouts.allow_restarts(
        synced.restart_lost_engines,
        lambda why: faults.write(Fault("manager", "the RolloutManager", why)),
        in_turns=sharing.engines_sleep,
    )
    return synced


def run_console(config: Config, rollouts: RolloutsClient) -> RunConsole:
    """Return a console that shows the run from now on."""
    console, live = open_console(config.track.console)
    entropy = config.algorithm.entropy
    return RunConsole(
        console,
        live,
        total_steps=config.total_steps,
        stage_names=[stage.name for stage in config.stages],
        entropy_target=entropy.target if entropy.mode == "adaptive" else None,
        progress=rollouts.progress,
    )


def run_loop(config: Config, folder: RunFolder, loop: Loop, shown: RunConsole, started_s: float) -> int:
    """Train, write the summary, and return the exit status of ``lead``."""
    startup_s = time.time() - started_s
    result = loop.run()
    model = folder.hf if result.finished else None
    summary = summarise(result, total_steps=config.total_steps, seed=config.run.seed, model=model, startup_s=startup_s)
    folder.write_summary(summary)
    shown.finished(summary)
    return 0 if result.finished else STOPPED
