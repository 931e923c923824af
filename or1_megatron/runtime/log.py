"""Logging: all lines go to ``logs/rank_N.log``; our own warnings and all errors also go to the console.

Verbose libraries log only warnings and errors. Libraries' warnings, also of deprecation, go to the file only.
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
"""Libraries whose loggers are set to log only at WARNING and above."""

QUIET_ENVIRONMENT = {
    "VLLM_CONFIGURE_LOGGING": "0",  # else vLLM installs its own handler on import
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_DEDUP_LOGS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour, without which Ray prints an announcement
    "TOKENIZERS_PARALLELISM": "false",  # else every fork after the first tokenization warns
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
"""Environment variables that libraries read on import. Set them in this process and in every Ray actor."""

_OWN = ("or1_megatron", "or1_verify")


class _ConsoleHandler(logging.Handler):
    """Writes to the current sys.stderr, which a live progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class _FileHandler(logging.StreamHandler[TextIO]):
    """Writes to the log file. The first write that fails, for example on a full disk, is reported on standard error."""

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the name that logging calls
        if not self._failed:
            self._failed = True
            print(f"or1: log lines cannot be written to {self.stream.name}: {sys.exc_info()[1]}", file=sys.stderr)


def _for_console(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.name.split(".")[0] in _OWN


def set_up_logging(folder: Path, rank: int) -> None:
    """Append this process's log lines to ``folder/rank_N.log``; print our warnings and all errors on the console.

    The file also gets the traces of uncaught exceptions in any thread, and of fatal signals (segmentation fault,
    abort). A second call replaces the first call's handlers. Raises OSError when the file cannot be opened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for variable, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)

    stream = (folder / f"rank_{rank}.log").open("a", encoding="utf-8")
    to_file = _FileHandler(stream)
    to_file.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname).1s %(name)s: %(message)s"))
    to_console = _ConsoleHandler(level=logging.WARNING)
    to_console.setFormatter(logging.Formatter(f"[rank {rank}] %(levelname)s %(message)s"))
    to_console.addFilter(_for_console)

    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.addHandler(to_file)
    root.addHandler(to_console)
    root.setLevel(logging.INFO)
    for library in NOISY:
        logging.getLogger(library).setLevel(logging.WARNING)
    # On CPU vLLM warns that it does not use Triton, which is installed for the tests of our kernels.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    logging.captureWarnings(True)
    _trace_crashes(stream, to_file)


def _trace_crashes(file: TextIO, to_file: logging.Handler) -> None:
    faulthandler.enable(file)

    def note(what: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Write the exception to the file only, because Python itself prints the traceback on the console."""
        to_file.handle(logging.LogRecord(_OWN[0], logging.ERROR, __file__, 0, what, None, (kind, error, trace)))

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
