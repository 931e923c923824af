"""Waits that end: every wait on another process has a deadline, and an owner who is named when it passes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class DeadlineExceeded(TimeoutError):
    """Something another process owed us did not come in time.

    ``what`` was waited for, ``owner`` is the process that should have delivered it.
    """

    def __init__(self, what: str, owner: str, timeout_s: float, detail: str = "") -> None:
        self.what = what
        self.owner = owner
        self.timeout_s = timeout_s
        self.detail = detail
        super().__init__(f"waited {timeout_s:g} s for {what} from {owner}" + (f"; {detail}" if detail else ""))

    def __reduce__(self) -> tuple[type[DeadlineExceeded], tuple[str, str, float, str]]:
        # An exception is pickled by its message; this one has to cross process borders with its parts.
        return type(self), (self.what, self.owner, self.timeout_s, self.detail)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time by which ``owner`` must have delivered ``what``. The clock starts with the object."""

    what: str
    owner: str
    timeout_s: float
    _started_s: float = field(default_factory=time.monotonic)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never below 0: what to pass to a blocking call as its time-out."""
        return max(0.0, self._started_s + self.timeout_s - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.remaining_s == 0.0

    def exceeded(self, detail: str = "") -> DeadlineExceeded:
        """The error to raise when the wait ended without result."""
        return DeadlineExceeded(self.what, self.owner, self.timeout_s, detail)

    def check(self, detail: str = "") -> None:
        """Raise DeadlineExceeded when the time is over."""
        if self.passed:
            raise self.exceeded(detail)


def wait_for(
    poll: Callable[[], T | None],
    *,
    what: str,
    owner: str,
    timeout_s: float,
    interval_s: float = 0.05,
    detail: Callable[[], str] | None = None,
) -> T:
    """Call ``poll`` until it gives something other than None or False, and return that.

    ``poll`` is called at least once, and once more when the time is over. Raises DeadlineExceeded after ``timeout_s``,
    with ``detail()`` (what is known about the owner by then) in the message; whatever ``poll`` raises passes through.
    """
    deadline = Deadline(what, owner, timeout_s)
    while True:
        last_try = deadline.passed
        result = poll()
        if result is not None and result is not False:
            return result
        if last_try:
            raise deadline.exceeded(detail() if detail else "")
        time.sleep(min(interval_s, deadline.remaining_s))
