"""Errors of a handoff."""

from __future__ import annotations

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.interfaces import EnginesLost
from or1_verify.errors import UserError


class HandoffError(UserError, RuntimeError):
    """A handoff did not complete; the message names the rank that was waited for, or that rank's error."""


class SliceMismatch(UserError, RuntimeError):
    """A slice did not arrive as it was sent."""


class HandoffMismatch(UserError, RuntimeError):
    """An engine does not compute what the policy computes, or does not hold what was sent."""


class EngineStrayed(HandoffMismatch, PartLost):
    """A ``HandoffMismatch`` after successful handoffs: a passing fault, which a restart may repair."""


class PlanImpossible(UserError, ValueError):
    """No trainer rank holds what an engine rank wants."""


class SendError(AgreedError, EnginesLost):
    """The weights did not reach all engines. All trainer ranks raise it, and can send them again."""
