"""What a handoff fails of."""

from __future__ import annotations

from or1_megatron.errors import UserError


class HandoffError(UserError, RuntimeError):
    """A handoff did not complete; the message says which rank was waited for, or what that rank reported."""


class SliceMismatch(UserError, RuntimeError):
    """A slice did not arrive as it was sent."""


class HandoffMismatch(UserError, RuntimeError):
    """An engine does not compute what the policy computes, or does not hold what was sent."""


class PlanImpossible(UserError, ValueError):
    """No trainer rank holds what an engine rank wants."""
