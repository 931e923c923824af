"""Decorators of the loop's verbs (methods such as ``rollout``, ``update``): announced, timed, skipped on a stop.

A verb's name is that of its method, its timer and its metric (``time/<verb>``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate

from or1_megatron.interfaces import EnginesLost, Stopped
from or1_megatron.schemas.metrics import VERBS

if TYPE_CHECKING:
    from or1_megatron.rl.loop import Loop

logger = logging.getLogger(__name__)


def verb[**P, R](method: Callable[Concatenate[Loop, P], R]) -> Callable[Concatenate[Loop, P], R]:
    """Announce the method to the observer and time it, under its name. Verbs do not call verbs."""
    name = method.__name__
    assert name in VERBS, f"{name} is not in schemas.metrics.VERBS"

    @wraps(method)
    def timed(self: Loop, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.ports.observer.verb_started(self.steps_done, name)
        with self.ports.timer(name):
            return method(self, *args, **kwargs)

    return timed


def stopping_verb[**P, R](method: Callable[Concatenate[Loop, P], R]) -> Callable[Concatenate[Loop, P], R]:
    """Make the method a verb that raises Stopped, without running, if the run has been asked to stop.

    The step can still be abandoned then. Engines lost in the verb also raise Stopped if the run has been asked to stop
    meanwhile.
    """
    timed = verb(method)

    @wraps(method)
    def checked(self: Loop, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.ports.stop():
            raise Stopped(method.__name__)
        try:
            return timed(self, *args, **kwargs)
        except EnginesLost as error:
            unless_stopping(self, error)
            raise Stopped(method.__name__) from error

    return checked


def deferred_verb[**P, R](method: Callable[Concatenate[Loop, P], R | None]) -> Callable[Concatenate[Loop, P], R | None]:
    """Make the method a verb that returns None if the run has been asked to stop: the resumed run does the work.

    Engines lost in the verb while the run is stopping are no error: they may be gone with their node.
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
            unless_stopping(self, error)
            return None

    return verb(attempted)


def unless_stopping(loop: Loop, error: EnginesLost) -> None:
    """Raise ``error``; only log it when the run has been asked to stop, since saving needs no engines."""
    if not loop.ports.stop():
        raise error
    logger.warning("the run is stopping, and its engines are lost: %s", error)
