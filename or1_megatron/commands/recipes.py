"""``or1 recipes``: lists the named recipes, cluster layouts and model shapes."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

_USES = {
    "recipe": "recipes: or1 plan NAME, or `base: NAME` in a file of your own",
    "layout": "layouts, a recipe's GPUs: LAYOUT=NAME or1 plan RECIPE",
    "shape": "model shapes: or1 plan RECIPE --shape NAME",
}


def recipes() -> None:
    """List the recipes, layouts and model shapes that have names."""
    from or1_megatron.config.recipes import named, summary
    from or1_megatron.weights.families import read_hf_config
    from or1_megatron.weights.shape import Shape

    console = Console()
    for kind, use in _USES.items():
        table = Table(title=use, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for name, path in named(kind).items():  # type: ignore[arg-type]  # the keys are its kinds
            if kind == "shape":
                shape = Shape.of(read_hf_config(path))
                table.add_row(name, f"{shape.parameters / 1e9:.1f} B parameters, {shape.layers} layers")
            else:
                table.add_row(name, summary(path))
        console.print(table, "", sep="")
