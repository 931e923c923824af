"""A verb of the loop is one word: the method's name, its timer's and its metric's (``time/<verb>``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from or1_megatron.interfaces import EnginesLost, Stopped
from or1_megatron.schemas.metrics import VERBS

if TYPE_CHECKING:
    from or1_megatron.rl.loop import Loop

logger = logging.getLogger(__name__)


P = ParamSpec("P")
R = TypeVar("R")


def verb(method: Callable[Concatenate[Loop, P], R]) -> Callable[Concatenate[Loop, P], R]:
    """A method that is announced to the observer and timed, under its own name. Verbs do not call verbs."""
    name = method.__name__
    assert name in VERBS, f"{name} is not in schemas.metrics.VERBS"

    @wraps(method)
    def timed(self: Loop, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self.ports.observer.verb_started(self.steps_done, name)
        with self.ports.timer(name):
            return method(self, *args, **kwargs)

    return timed


def stopping_verb(method: Callable[Concatenate[Loop, P], R]) -> Callable[Concatenate[Loop, P], R]:
    """A verb before which the run may be stopped (Stopped is raised): up to there the step can be abandoned.

    Engines that are lost in it, with a stop under way, stop the run just so.
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


def unless_stopping(loop: Loop, error: EnginesLost) -> None:
    """Raise ``error``, unless the run has been asked to stop: then note it, for what remains to be done is saving."""
    if not loop.ports.stop():
        raise error
    logger.warning("the run is stopping, and its engines are lost: %s", error)
