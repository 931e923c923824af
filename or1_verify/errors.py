"""The base classes of all exceptions of or1_verify and the trainer."""

from __future__ import annotations


class Or1Error(Exception):
    """Base of every exception that or1_verify and or1_megatron define."""


class UserError(Or1Error):
    """An error whose message explains it to the user: bad input, or a failure outside the code.

    A command prints the message without a traceback and exits with status 2. After a PartLost the trainer exits with
    PART_LOST.
    """
