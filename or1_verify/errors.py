"""The base of all exceptions, here and in the trainer."""

from __future__ import annotations


class Or1Error(Exception):
    """Base of every exception that or1_verify and or1_megatron define."""


class UserError(Or1Error):
    """An error that its message explains: bad input, or something outside the code that failed.

    A command prints the message, without a traceback, and exits with status 2 (the trainer's PART_LOST after a
    PartLost).
    """
