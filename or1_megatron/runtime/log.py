"""Where log lines go: everything to ``logs/rank_N.log``, warnings also to the console.

Libraries that talk a lot are held to their warnings; Python's own warnings (deprecations of dependencies) go to the
file alone.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

NOISY = (
    "asyncio",
    "datasets",
    "filelock",
    "fsspec",
    "httpx",
    "matplotlib",
    "megatron",
    "numexpr",
    "ray",
    "torch.distributed",
    "transformers",
    "urllib3",
    "vllm",
)
"""Loggers of libraries of which only warnings are kept."""

QUIET_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # vLLM would install a handler of its own on import
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, asked for, so that Ray does not announce it
    "TOKENIZERS_PARALLELISM": "false",  # else every fork after the first tokenisation warns
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Read by libraries when they are imported: belongs into the environment of this process and of every actor."""

_OWN = "or1_megatron"


class _ConsoleHandler(logging.Handler):
    """Writes to whatever sys.stderr is at that moment, so that a live bar, which replaces it, stays in one piece."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except OSError:
            self.handleError(record)  # a closed terminal must not stop the run


class _FileHandler(logging.StreamHandler[TextIO]):
    """Writes to the log file; where that fails, as on a full disk, it says so once and the run goes on without."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        if not self._failed:
            self._failed = True
            print(f"or1: log lines cannot be written to {self.stream.name}: {sys.exc_info()[1]}", file=sys.stderr)


def log_path(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def set_up_logging(folder: Path, rank: int, *, who: str | None = None, level: int = logging.INFO) -> Path:
    """Send this process's log lines to ``folder/rank_N.log`` (appending) and its warnings to the console.

    ``who`` replaces ``rank N`` in lines and ``rank_N`` in the file's name, for processes that are no trainer rank.
    Uncaught exceptions, of threads too, and fatal signals (segmentation fault, abort) leave their traces in the file.
    Calling again replaces what the last call set up. Returns the file. Raises OSError when it cannot be opened.
    """
    name = who or f"rank {rank}"
    path = folder / f"{who}.log" if who else log_path(folder, rank)
    folder.mkdir(parents=True, exist_ok=True)
    for variable, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)

    stream = path.open("a", encoding="utf-8")
    to_file = _FileHandler(stream)
    to_file.setFormatter(logging.Formatter(f"%(asctime)s [{name}] %(levelname).1s %(name)s: %(message)s"))
    to_console = _ConsoleHandler(level=logging.WARNING)
    to_console.setFormatter(logging.Formatter(f"[{name}] %(levelname)s %(message)s"))
    to_console.addFilter(lambda record: record.name != "py.warnings")

    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.addHandler(to_file)
    root.addHandler(to_console)
    root.setLevel(level)
    logging.getLogger(_OWN).setLevel(level)
    quiet_libraries()
    logging.captureWarnings(True)
    _trace_crashes(stream, to_file)
    return path


def quiet_libraries() -> None:
    """Hold the NOISY loggers to warnings; again after importing one that sets its own level."""
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    # On CPU vLLM warns that it will not use Triton, which is installed for our kernels' tests.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)


def _trace_crashes(file: TextIO, to_file: logging.Handler) -> None:
    faulthandler.enable(file)

    def note(what: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In the file only: the console gets the traceback from Python itself."""
        to_file.handle(logging.LogRecord(_OWN, logging.ERROR, __file__, 0, what, None, (kind, error, trace)))

    def log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt | SystemExit):
            note("uncaught exception", kind, error, trace)
        sys.__excepthook__(kind, error, trace)

    def log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            where = args.thread.name if args.thread else "a thread"
            note(f"uncaught exception in {where}", args.exc_type, args.exc_value, args.exc_traceback)
        threading.__excepthook__(args)

    sys.excepthook = log_uncaught
    threading.excepthook = log_uncaught_in_thread
