"""``or1 train``: trains, resumes, or with --dry-run and --check only plans and checks a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from or1_megatron.commands.explained import explained
from or1_megatron.commands.options import ConfigFile, Overrides, config_file, note, shape_folder
from or1_megatron.runtime.console import outlive_console
from or1_megatron.runtime.nvidia_driver import check_driver
from or1_megatron.runtime.signals import CPP_LOG_LEVEL, QUIET

if TYPE_CHECKING:
    from or1_megatron.config.schema import Config
    from or1_megatron.runtime.nodes import Nodes
    from or1_megatron.sizing.conflicts import Device


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    stage: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Train stage N alone (the first is 1), in a run folder of its own, from where stage N-1 ended.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="The short form of `or1 plan`: batches, layout, memory.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="--dry-run, and check all that can stop a start: weights, data, previous stage."),
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="What --dry-run plans for, if not for this machine.")
    ] = None,
    shape: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help="--dry-run for this model shape (`or1 recipes` lists them) or a folder's config.json; reads no data.",
        ),
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="How many nodes have trainer ranks. Run the same on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This node's number. Node 0 decides on restarts.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Name or address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(help="Port of node 0 at which the launchers meet.")] = 29500,
) -> None:
    """Train as CONFIG says. A run folder that holds checkpoints is resumed.

    SIGTERM, SIGUSR1 and Ctrl-C save and stop; a second signal stops at once. Parts that die or stall start again.
    """
    with explained():
        if not (dry_run or check):
            os.environ.setdefault(CPP_LOG_LEVEL, QUIET)  # before torch is imported
            outlive_console()
        if not dry_run:
            check_driver()
        from or1_megatron.config.load import load_config

        path = config_file(config)
        overrides = [*(overrides or ()), *([] if stage is None else [f"run.stage={stage}"])]
        loaded = load_config(path, overrides)
        if shape is not None and not dry_run:
            raise typer.BadParameter("only --dry-run works without weights and data", param_hint="--shape")
        if not dry_run:
            _check_node(loaded, nnodes, node_rank, "" if check else master_addr)
        with _naming_what_makes_data(path):
            if dry_run:
                _dry_run(loaded, device, shape)
            elif check:
                _check(loaded, device, nnodes)
            else:
                from or1_megatron.runtime.nodes import Nodes

                meeting = nnodes, node_rank, str(master_addr), master_port, loaded.cluster.join_timeout_s
                with Nodes(*meeting) if nnodes > 1 else nullcontext() as nodes:
                    _start(loaded, device, nodes)


@contextmanager
def _naming_what_makes_data(config: Path) -> Iterator[None]:
    """Add to a DataFileMissing error of the block that the ``run.sh`` beside the configuration makes the data."""
    from or1_megatron.config.base import DataFileMissing

    try:
        yield
    except DataFileMissing as error:
        script = config.parent / "run.sh"
        if not script.is_file():
            raise
        raise DataFileMissing(f"{error}\n{script} makes the data of this configuration, and trains") from None


def _dry_run(config: Config, device: Device | None, shape: Path | None) -> None:
    import torch

    from or1_megatron.config.recipes import find
    from or1_megatron.plan.tables import render
    from or1_megatron.rollout.engine_args import check_engine_args
    from or1_megatron.sizing.dry_run import plan_run
    from or1_megatron.sizing.memory import memory_short
    from or1_megatron.sizing.storage import disk_short
    from or1_megatron.trainer.preflight import lacking

    check_engine_args(config.rollout)
    folder = find("shape", shape) if shape else shape_folder(config)
    planned = plan_run(config, _device(device, config), folder)
    Console().print(render(planned))
    lacks = [] if planned.device == "cuda" and not torch.cuda.is_available() else [disk_short(config, planned.shape)]
    if planned.device == "cuda" and (size_gb := config.cluster.gpu_memory_gb) is not None:
        lacks.append(memory_short(config, planned.shape, planned.device, int(size_gb * 1e9)))
    for line in filter(None, lacks):
        print(f"or1: does not fit: {line}", file=sys.stderr)
    for line in () if shape else lacking(config):
        print(f"or1: not there yet: {line}", file=sys.stderr)


def _check(config: Config, device: Device | None, nodes: int) -> None:
    from or1_megatron.data.prompts import make_prompts, read_problems, thinking_rule
    from or1_megatron.plan.tables import render
    from or1_megatron.runtime.surroundings import make_usable
    from or1_megatron.trainer.preflight import check_inputs, check_room, plan_start

    for line in make_usable():
        note(line)
    planned = plan_start(config, _device(device))
    Console().print(render(planned))
    check_inputs(config, config.parallel.ranks // nodes)
    with closing(read_problems(config)) as problems:
        note(thinking_rule(make_prompts(config, problems)[0]))
    check_room(planned)


def _check_node(config: Config, count: int, rank: int, address: str | None) -> None:
    """Raise UserError if the options for nodes contradict each other or the configuration."""
    from or1_verify.errors import UserError

    ranks = config.parallel.ranks
    wrong = []
    if rank >= count:
        wrong.append(f"--node-rank {rank}: expected 0 to {count - 1}, since --nnodes is {count}")
    if count > 1 and address is None:
        wrong.append("--master-addr is missing: the nodes meet at node 0's address")
    if ranks % count:
        wrong.append(f"parallel.ranks is {ranks}, which {count} nodes cannot share equally; choose another layout")
    if wrong:
        raise UserError("\n".join(wrong))


def _start(config: Config, device: Device | None, nodes: Nodes | None) -> None:
    from or1_megatron.runtime.surroundings import make_usable
    from or1_megatron.trainer.preflight import check_inputs, check_room, plan_start

    for line in make_usable():
        note(line)
    planned = plan_start(config, _device(device))
    if nodes is None or nodes.rank == 0:
        for warning in planned.warnings:
            print(f"or1: warning: {warning}", file=sys.stderr)
        check_inputs(config, _ranks_here(config, nodes))
    check_room(planned)
    raise typer.Exit(_keep_running(config, nodes))


def _ranks_here(config: Config, nodes: Nodes | None) -> int:
    return config.parallel.ranks // (1 if nodes is None else nodes.count)


def _keep_running(config: Config, nodes: Nodes | None) -> int:
    """Run this node's ranks, restart them after failures, and return the exit code for the shell.

    The ranks get the configuration as it was read, so that later changes of the file have no effect.
    """
    from or1_megatron.config.load import to_json
    from or1_megatron.runtime.faults import FaultRecord
    from or1_megatron.runtime.launch import Ended, launch
    from or1_megatron.runtime.monitor import Monitor
    from or1_megatron.runtime.restarts import Restarts, signals_leave
    from or1_megatron.runtime.run_folder import RunFolder
    from or1_megatron.trainer.preflight import checkpoint_keeper

    folder = RunFolder(config.run.folder)

    def attempt() -> Ended:
        if nodes is not None and nodes.rank == 0:
            nodes.begin()
        return launch(
            "or1_megatron.trainer.run",
            [to_json(config)],
            ranks=_ranks_here(config, nodes),
            threads_per_rank=config.parallel.threads_per_rank,
            grace_s=config.checkpoint.signal_grace_s,
            monitor=Monitor(os.getpid(), folder.run_id, config.cluster.heartbeat_s, FaultRecord(folder.root)),
            nodes=nodes,
        )

    if nodes is not None and nodes.rank > 0:
        with signals_leave():
            while nodes.begin():
                attempt()
        return nodes.code
    code = Restarts(folder, config.run.max_restarts, checkpoint_keeper(config, folder).newest).run(attempt)
    if nodes is not None:
        nodes.code = code
    return code


def _device(named: Device | None, planned: Config | None = None) -> Device:
    """Return the device that ``--device`` names; else this machine's, or "cuda" if ``planned`` has a GPU transport."""
    if named is not None:
        return named
    import torch

    if torch.cuda.is_available():
        return "cuda"
    transport = planned.handoff.transport if planned is not None else None
    if transport is not None and ("nccl" in transport or "cuda" in transport):
        note(f"planned for GPUs, since handoff.transport is {transport}; this machine has none")
        return "cuda"
    return "cpu"
