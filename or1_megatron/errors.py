"""Exit statuses, and the trainer's exceptions that several folders raise. Their base is in ``or1_verify.errors``."""

from __future__ import annotations

from typing import Final

from or1_verify.errors import UserError

USER_ERROR: Final = 2
"""Exit status after a UserError: of commands and of trainer ranks."""

STOPPED: Final = 3
"""Exit status of a trainer rank that saved and stopped because it was asked to."""

PART_LOST: Final = 4
"""Exit status after a PartLost, of commands and of trainer ranks: the same may succeed when it is started again."""


class PartLost(UserError):
    """Another process of the run is gone or does not answer; the run can go on from its newest checkpoint."""


class AgreedError(UserError, RuntimeError):
    """Raised on all trainer ranks at once, with the same message, which rank 0 shows."""
