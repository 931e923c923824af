"""Decorators that announce and time the loop's verbs (its methods such as ``update``) and skip them on a stop.

A verb's method, its timer and its metric (``time/<verb>``) have the same name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate

from or1_megatron.interfaces import EnginesLost, Stopped
from or1_megatron.runtime.timeline import span
from or1_megatron.schemas.metrics import VERBS

if TYPE_CHECKING:
    from or1_megatron.rl.loop import Loop

logger = logging.getLogger(__name__)


def verb[**P, R](method: Callable[Concatenate[Loop, P], R]) -> Callable[Concatenate[Loop, P], R]:
    """Make the method a verb: it is announced to the observer and timed under its name. Verbs do not call verbs."""
    name = method.__name__
    assert name in VERBS, f"{name} is not in schemas.metrics.VERBS"

    @wraps(method)
    def timed(self: Loop, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.ports.observer.verb_started(self.steps_done, name)
        with self.ports.timer(name), span(name):
            return method(self, *args, **kwargs)

    return timed


def stopping_verb[**P, R](method: Callable[Concatenate[Loop, P], R]) -> Callable[Concatenate[Loop, P], R]:
    """Make the method a verb that raises Stopped, without running, if the run has been asked to stop.

    It is for verbs before the first SGD step, when the step can still be abandoned. The verb also raises Stopped if
    the engines are lost after the run was asked to stop.
    """
    timed = verb(method)

    @wraps(method)
    def checked(self: Loop, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.ports.stop():
            raise Stopped(method.__name__)
        try:
            return timed(self, *args, **kwargs)
        except EnginesLost as error:
            raise_unless_stopping(self, error)
            raise Stopped(method.__name__) from error

    return checked


def deferred_verb[**P, R](method: Callable[Concatenate[Loop, P], R | None]) -> Callable[Concatenate[Loop, P], R | None]:
    """Make the method a verb that is skipped, and returns None, if the run has been asked to stop.

    The resumed run does the skipped work. When the run is stopping, lost engines are no error: their node may be gone.
    """

    @wraps(method)
    def attempted(self: Loop, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self.ports.stop():
            return None
        try:
            return method(self, *args, **kwargs)
        except Stopped:
            return None
        except EnginesLost as error:
            raise_unless_stopping(self, error)
            return None

    return verb(attempted)


def raise_unless_stopping(loop: Loop, error: EnginesLost) -> None:
    """Raise ``error``. If the run has been asked to stop, only log it, because saving needs no engines."""
    if not loop.ports.stop():
        raise error
    logger.warning("the run is stopping, and its engines are lost: %s", error)
