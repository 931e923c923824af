"""Prints errors that the user can correct, without their traceback, and sets the command's exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from or1_megatron.errors import PART_LOST, USER_ERROR, PartLost
from or1_verify.errors import UserError


@contextmanager
def report_user_errors(*also: type[Exception]) -> Iterator[None]:
    """Print a UserError, an OSError about a path of the user, or an error in ``also`` on stderr; exit with USER_ERROR.

    A PartLost exits with PART_LOST, because the command may succeed later. Any other error keeps its traceback.
    """
    try:
        yield
    except Exception as error:
        from or1_megatron.runtime.run_folder import USER_OS_ERRORS

        if not isinstance(error, (UserError, *USER_OS_ERRORS, *also)):
            raise
        print(f"or1: error: {error}", file=sys.stderr)
        raise typer.Exit(PART_LOST if isinstance(error, PartLost) else USER_ERROR) from None
