"""``or1 timeline``: writes a step of a run's timeline as a picture, and as a trace for Perfetto."""

from __future__ import annotations

from typing import Annotated

import typer

from or1_megatron.commands.options import RunDir
from or1_megatron.commands.user_errors import report_user_errors


def timeline(run: RunDir, step: Annotated[int | None, typer.Option(help="Default: the newest.")] = None) -> None:
    """Show who was busy and who waited in a step of a run that was trained with track.timeline."""
    with report_user_errors(ValueError):
        from or1_megatron.report.figures.step_timeline import draw_step, perfetto_trace, read_step

        step, processes = read_step(run / "timeline", step)
        path = run / "timeline" / f"step_{step:06}"
        path.with_suffix(".pftrace").write_bytes(perfetto_trace(processes))
        draw_step(step, processes, path.with_suffix(".png"))
        print(f"{path}.png\n{path}.pftrace (open it at https://ui.perfetto.dev)")
