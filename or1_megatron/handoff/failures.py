"""The errors of a weight handoff."""

from __future__ import annotations

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.interfaces import EnginesLost
from or1_verify.errors import UserError


class HandoffError(UserError, RuntimeError):
    """A handoff did not complete. The message names the rank that was waited for, or the error of a rank."""


class SliceMismatch(UserError, RuntimeError):
    """A slice did not arrive as it was sent."""


class HandoffMismatch(UserError, RuntimeError):
    """An engine's log-probs differ from the policy's, or its parameters differ from the weights that were sent."""


class PolicyNotFinite(UserError, RuntimeError):
    """The policy's own log-probs of the probe's fixed tokens are NaN or infinite."""

    def __init__(self, version: int) -> None:
        since = (
            f"after step {version}: its parameters are NaN or too large. Look at policy/grad_norm of that step, lower "
            "optimizer.lr, and go on from an earlier checkpoint"
            if version
            else "before any training: the weights in model.hf hold NaN or infinities, or overflow in model.dtype"
        )
        super().__init__(f"the policy's own log-probs of the probe are not finite {since}")


class EngineStrayed(HandoffMismatch, PartLost):
    """A ``HandoffMismatch`` after successful handoffs. A restart of the ranks may repair the engine."""


class PlanImpossible(UserError, ValueError):
    """An engine rank wants a part of a tensor that no trainer rank holds."""


class SendError(AgreedError, EnginesLost):
    """The weights did not reach all engines. All trainer ranks raise this error, and can send the weights again."""
