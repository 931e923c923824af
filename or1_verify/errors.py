"""The base of all exceptions, here and in the trainer."""

from __future__ import annotations


class Or1Error(Exception):
    """Base of every exception that or1_verify and or1_megatron define."""


class UserError(Or1Error):
    """An error whose message says all that the user needs: the input is bad, or something outside the code failed.

    A command prints the message without a traceback and exits with status 2. After a PartLost the trainer exits with
    PART_LOST instead.
    """
