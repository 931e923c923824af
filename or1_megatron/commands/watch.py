"""``or1 watch``: shows runs as a live page on localhost (``report.page.feed``)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from or1_megatron.commands.user_errors import report_user_errors


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders, such as one and an earlier one.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8765,
    tokenizer: Annotated[
        Path | None, typer.Option(help="HF folder of the runs' tokenizer, if neither they nor their model have one.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond localhost, a token is needed.")] = "127.0.0.1",
) -> None:
    """Show RUN... as a page on localhost that follows the training. Ctrl-C ends it."""
    with report_user_errors(FileNotFoundError), suppress(KeyboardInterrupt):
        from or1_megatron.report.page.feed import Feed
        from or1_megatron.report.page.server import PageServer

        with PageServer(Feed(runs, tokenizer), host, port) as server:
            print(f"{server.url} shows {', '.join(map(str, runs))}; Ctrl-C ends it", flush=True)
            server.serve_forever()
