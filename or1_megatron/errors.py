"""Exit statuses, and the trainer's exceptions that several folders raise; ``or1_verify.errors`` has the base class."""

from __future__ import annotations

from typing import Final

from or1_verify.errors import UserError

USER_ERROR: Final = 2
"""Exit status of commands and trainer ranks after a UserError."""

STOPPED: Final = 3
"""Exit status of a trainer rank that saved and stopped on request."""

PART_LOST: Final = 4
"""Exit status of commands and trainer ranks after a PartLost: the command may succeed when it is repeated."""


class PartLost(UserError):
    """Another process of the run is gone or does not answer; the run can continue from its newest checkpoint."""


class AgreedError(UserError, RuntimeError):
    """Raised on all trainer ranks at once, with the same message. Rank 0 shows it."""
