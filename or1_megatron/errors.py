"""The base of this package's exceptions."""

from __future__ import annotations

from typing import Final

USER_ERROR: Final = 2
"""Exit status after a UserError: of commands and of trainer ranks."""

STOPPED: Final = 3
"""Exit status of a trainer rank that saved and stopped because it was asked to."""

PART_LOST: Final = 4
"""Exit status after a PartLost, of commands and of trainer ranks: the same may succeed when it is started again."""


class Or1Error(Exception):
    """Base of every exception that this package defines."""


class UserError(Or1Error):
    """An error that its message explains: bad input, or something outside the code that failed.

    A command prints the message, without a traceback, and exits with USER_ERROR (PART_LOST after a PartLost).
    """


class PartLost(UserError):
    """Another process of the run is gone or does not answer; the run can go on from its newest checkpoint."""


class AgreedError(UserError, RuntimeError):
    """Raised on all trainer ranks at once, with the same message, which rank 0 shows."""
