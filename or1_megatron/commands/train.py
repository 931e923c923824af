"""``or1 train``: trains, resumes, or with --check only plans and checks a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from or1_megatron.commands.options import ConfigFile, Overrides, config_file, note
from or1_megatron.commands.user_errors import report_user_errors
from or1_megatron.runtime.console import outlive_console
from or1_megatron.runtime.nvidia_driver import check_driver
from or1_megatron.runtime.signals import CPP_LOG_LEVEL, QUIET

if TYPE_CHECKING:
    from or1_megatron.config.schema import Config
    from or1_megatron.runtime.nodes import Nodes
    from or1_megatron.sizing.conflicts import Device
    from or1_megatron.sizing.run_plan import Plan


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
    check: Annotated[
        bool,
        typer.Option("--check", help="Only check all that can stop a start: weights, data, memory, previous stage."),
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"] | None, typer.Option(help="What --check plans for, if not for this machine.")
    ] = None,
    nnodes: Annotated[int, typer.Option(min=1, help="How many nodes have trainer ranks. Run the same on each.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="This node's number. Node 0 decides on restarts.")] = 0,
    master_addr: Annotated[str | None, typer.Option(help="Name or address of node 0.")] = None,
    master_port: Annotated[int, typer.Option(help="Port of node 0 at which the launchers meet.")] = 29500,
) -> None:
    """Train as CONFIG says. A run folder that holds checkpoints is resumed.

    SIGTERM, SIGUSR1 and Ctrl-C save and stop; a second signal stops at once. Parts that die or stall start again.
    """
    with report_user_errors():
        if not check:
            os.environ.setdefault(CPP_LOG_LEVEL, QUIET)  # before torch is imported
            outlive_console()
        check_driver()
        from or1_megatron.config.load import load_config

        path = config_file(config)
        overrides = [*(overrides or ()), *([] if stage is None else [f"run.stage={stage}"])]
        loaded = load_config(path, overrides)
        if device is not None and not check:
            raise typer.BadParameter("only --check plans for another device", param_hint="--device")
        _check_node(loaded, nnodes, node_rank, "" if check else master_addr)
        with _naming_what_makes_data(path):
            if check:
                _check(loaded, device, nnodes)
            else:
                from or1_megatron.runtime.nodes import Nodes

                meeting = nnodes, node_rank, str(master_addr), master_port, loaded.cluster.join_timeout_s
                with Nodes(*meeting) if nnodes > 1 else nullcontext() as nodes:
                    _start(loaded, nodes)


@contextmanager
def _naming_what_makes_data(config: Path) -> Iterator[None]:
    """If ``run.sh`` lies beside ``config``, add to a DataFileMissing from the block that run.sh makes the data."""
    from or1_megatron.config.base import DataFileMissing

    try:
        yield
    except DataFileMissing as error:
        script = config.parent / "run.sh"
        if not script.is_file():
            raise
        raise DataFileMissing(f"{error}\n{script} makes the data of this configuration, and trains") from None


def _check(config: Config, device: Device | None, nodes: int) -> None:
    from or1_megatron.data.prompts import make_prompts, read_problems, thinking_rule
    from or1_megatron.plan.tables import render
    from or1_megatron.trainer.preflight import check_inputs, check_room

    planned = _planned(config, device)
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


def _planned(config: Config, device: Device | None = None) -> Plan:
    """Return the plan of a run that starts now on ``device``; None: on this machine's device."""
    import torch

    from or1_megatron.runtime.process_environment import make_usable
    from or1_megatron.trainer.preflight import plan_start

    for line in make_usable():
        note(line)
    return plan_start(config, device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _start(config: Config, nodes: Nodes | None) -> None:
    from or1_megatron.trainer.preflight import check_inputs, check_room

    planned = _planned(config)
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
    from or1_megatron.runtime.restarts import Restarts, exit_on_signals
    from or1_megatron.runtime.run_folder import RunFolder
    from or1_megatron.runtime.watchdog import Watchdog
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
            watchdog=Watchdog(os.getpid(), folder.run_id, config.cluster.heartbeat_s, FaultRecord(folder.root)),
            nodes=nodes,
        )

    if nodes is not None and nodes.rank > 0:
        with exit_on_signals():
            while nodes.begin():
                attempt()
        return nodes.code
    code = Restarts(folder, config.run.max_restarts, checkpoint_keeper(config, folder).newest).run(attempt)
    if nodes is not None:
        nodes.code = code
    return code
