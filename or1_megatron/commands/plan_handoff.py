"""``or1 plan-handoff``: prints what ``handoff.shard.forecast`` finds."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from or1_megatron.commands.errors import explained
from or1_megatron.commands.options import ConfigFile, Overrides, config_file, shape_folder

if TYPE_CHECKING:
    from or1_megatron.handoff.shard.forecast import HandoffForecast

_SHOWN = 12


def plan_handoff(
    config: ConfigFile,
    overrides: Overrides = None,
    gigabits: Annotated[float, typer.Option(help="Speed of each rank's link, per direction, in Gb/s.")] = 400.0,
) -> None:
    """Print who would send which bytes of the weights to whom with handoff.backend: shard. Starts nothing."""
    with explained():
        from or1_megatron.config.load import load_config
        from or1_megatron.handoff.shard.forecast import forecast_of

        loaded = load_config(config_file(config), overrides or ())
        if shape := shape_folder(loaded):
            loaded = loaded.model_copy(update={"model": loaded.model.model_copy(update={"hf": shape})})
        _show(forecast_of(loaded), gigabits, Console())


def _show(made: HandoffForecast, gigabits_per_s: float, console: Console) -> None:
    """Print who sends what to whom, over the links with the most bytes."""
    plan = made.plan
    figures = [Column(heading, justify="right") for heading in ("MiB", "messages")]
    table = Table("from", "to", *figures, title=f"links over {made.transport}, busiest first")
    messages = Counter(hop for shipment in plan.shipments for hop in shipment.hops)
    for hop in sorted(made.links, key=lambda hop: (-made.links[hop], hop))[:_SHOWN]:
        where = "" if made.crosses(hop) else ", on its device"
        table.add_row(plan.who(hop[0]), plan.who(hop[1]) + where, _mib(made.links[hop]), str(messages[hop]))
    if len(made.links) > _SHOWN:
        table.add_row("...", f"{len(made.links) - _SHOWN} more", "", "")
    console.print(table)
    slices = sum(len(shipment.slots) for shipment in plan.shipments)
    total = sum(made.received.values())
    console.print(f"{_mib(total)} MiB ({made.dtype}) in {slices:,} slices, {len(plan.shipments):,} messages")
    trainers = [made.sent.get(rank, 0) for rank in range(plan.trainers)]
    idle = trainers.count(0)
    console.print(
        f"each trainer rank sends {_mib(min(filter(None, trainers), default=0))} to {_mib(max(trainers))} MiB"
        + (f"; {idle} send nothing over the network" if idle else "")
    )
    relays = {hop[0] - plan.trainers for hop in made.links if hop[0] >= plan.trainers}
    if relays:
        console.print(f"{len(relays)} of {len(made.wanted)} engine ranks pass on what they receive")
    shares = [made.received[rank] / wanted for rank, wanted in enumerate(made.wanted) if wanted]
    console.print(
        f"each engine rank receives {_mib(min(made.received.values()))} to {_mib(max(made.received.values()))} MiB, "
        f"{max(shares):.2f} times its shard at most"
    )
    console.print(
        f"busiest rank: {_mib(made.busiest)} MiB, {made.seconds(gigabits_per_s):.3g} s at {gigabits_per_s:g} Gb/s"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.1f}"
