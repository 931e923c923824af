"""Errors of a handoff, and how all trainer ranks fail together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from or1_megatron.errors import AgreedError, PartLost
from or1_megatron.interfaces import EnginesLost, PolicyWeights
from or1_verify.errors import UserError

log = logging.getLogger(__name__)


class HandoffError(UserError, RuntimeError):
    """A handoff did not complete; the message says which rank was waited for, or what that rank reported."""


class SliceMismatch(UserError, RuntimeError):
    """A slice did not arrive as it was sent."""


class HandoffMismatch(UserError, RuntimeError):
    """An engine does not compute what the policy computes, or does not hold what was sent."""


class EngineStrayed(HandoffMismatch, PartLost):
    """A ``HandoffMismatch`` after handoffs that went well: a fault of the moment, which a restart may mend."""


class PlanImpossible(UserError, ValueError):
    """No trainer rank holds what an engine rank wants."""


class SendError(AgreedError, EnginesLost):
    """The weights did not reach all engines. All trainer ranks know, and are ready to send them again."""


@contextmanager
def failing_together(weights: PolicyWeights, leave: Callable[[], None]) -> Iterator[None]:
    """Raise rank 0's failure to send, if it has one, on every trainer rank; collective.

    Rank 0 sees whatever fails among the engines and the other ranks. A failure in a rank's own code passes through.

    Args:
        leave: called on every rank that raises: the next handoff meets the engines anew.

    Raises:
        SendError: sending failed.
    """
    error: SendError | None = None
    try:
        yield
    except RuntimeError as failure:
        if not isinstance(failure, UserError):
            raise
        log.info("the handoff failed", exc_info=True)
        error = SendError(str(failure))
    error = weights.from_rank_0(error) or error
    if error is not None:
        leave()
        raise error
