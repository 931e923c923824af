r"""The child process that judges answers for ``MathVerifier``. Nothing else imports this file.

``math.reader`` reads an answer and compares it. Where it cannot read one of the two sides, Math-Verify is asked,
unless the gold is a plain number or words, which an unreadable answer cannot be. Math-Verify also finds the answer in a
text without a box.

Protocol: one JSON object per line. ``{"op": "verify", "golds": [...], "answer": ..., "boxed": bool, "rounding": bool}``
is answered by ``{"right": bool, "answer": str, "how": str}``, with ``"unreadable": true`` where no gold could be read;
``{"op": "released", "golds": [...], "answer": text}`` alike, as the released code judges; and both by
``{"exhausted": bytes}``, the last line of a process that ran out of its memory. The first line out, ``{}``, is ready.
The end of the input ends the process.

It dies by itself as well: every request arms a real-time timer whose default action is death, so that a worker in one
endless big-integer operation is gone soon after its limit even when nobody is left to kill it. (Python's signal
handlers and threads do not run during such an operation, and a child that a thread started cannot die with its parent.)
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from or1_verify.answer import braces_balance
from or1_verify.child_process import die_with_parent
from or1_verify.math.reader.judge import (
    Judgement,
    is_readable,
    judge,
    leaves_open,
    letters,
    marks_agree,
    one_changed,
    states_number_or_words,
)
from or1_verify.math.reader.text import Unreadable

_GRACE_S = 1.0
_CHILD_MEMORY_BYTES = 4 << 30
_MAX_CHANGES = 64


def main() -> None:
    timeout_s, parent = float(sys.argv[1]), int(sys.argv[2])
    if parent:
        die_with_parent(parent)
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints must not break the protocol
    resource.setrlimit(resource.RLIMIT_AS, (_CHILD_MEMORY_BYTES, _CHILD_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes our input
    _parse_boxed("\\frac{1}{2}")  # builds the parser, which is slow: before "ready", within no limit

    replies.write("{}\n")
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
        try:
            reply = _OPERATIONS[request["op"]](request)
        except MemoryError:
            reply = {"exhausted": _CHILD_MEMORY_BYTES}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if "exhausted" in reply:
            return  # a fresh process is better than what is left of this heap


def _verify(request: dict[str, Any]) -> dict[str, Any]:
    golds: list[str] = request["golds"]
    answer: str = request["answer"]
    text = answer if request["boxed"] else _text_of(_parse(answer))
    if not text:
        return {"right": False, "answer": "", "how": "no answer found"}
    if text in golds:
        return {"right": True, "answer": text, "how": "the same text"}
    hows = []
    for gold in golds:
        try:
            said = judge(gold, text, request["rounding"])
        except (Unreadable, RecursionError):
            said = _second_opinion(gold, text)
        if said.right:
            return {"right": True, "answer": text, "how": said.how}
        hows.append(said.how)
    if not any(map(_is_usable, golds)):
        if "".join(text.split()) in ("".join(gold.split()) for gold in golds):
            return {"right": True, "answer": text, "how": "the same text"}
        return {"right": False, "answer": text, "how": "the gold cannot be read", "unreadable": True}
    return {"right": False, "answer": text, "how": hows[-1]}


def _verify_as_released(request: dict[str, Any]) -> dict[str, Any]:
    """Judge as the released code does, on the whole text that follows the reasoning (RECIPE, verifiers).

    The extracted string is compared with each gold; then Math-Verify compares values. What raises is not right.
    """
    from math_verify import verify

    extracted = _parse(request["answer"])
    if len(extracted) < 2:
        return {"right": False, "answer": "", "how": "no answer found"}
    answer = _text_of(extracted) or str(extracted[-1])
    if extracted[1] in request["golds"]:
        return {"right": True, "answer": answer, "how": "the same text, by Math-Verify's extraction"}
    for gold in request["golds"]:
        try:
            right = verify(list(_parse_boxed(gold)), list(extracted), timeout_seconds=None)
        except MemoryError:
            raise
        except Exception:  # the released verifier goes on with the next gold
            continue
        if right:
            return {"right": True, "answer": answer, "how": "compared by Math-Verify"}
    return {"right": False, "answer": answer, "how": "compared by Math-Verify"}


_TO_WORK_OUT = re.compile(r"\\i*o?int|\\sum|\\prod|\\lim|\\det|vmatrix|[∫∮∑∏]|\\d?frac\s*\{\s*(?:\\mathrm\s*\{d\}|d)\b")
"""An integral, a sum, a limit, a determinant or a derivative: a question's must not be its own answer."""


def _second_opinion(gold: str, answer: str) -> Judgement:
    """Return Math-Verify's judgement, where the reader has none.

    Math-Verify accepts some answers that have little to do with an unusual gold, such as 2 for a differential
    equation's solution, or the odd numbers for the even ones. So the answer must have all letters of the gold and its
    primes and degree signs, and Math-Verify must refuse every answer that differs from it in one number or letter.
    """
    unlike = states_number_or_words(gold) or leaves_open(answer) or not letters(gold) <= letters(answer)
    unlike = unlike or not set(_TO_WORK_OUT.findall(answer)) <= set(_TO_WORK_OUT.findall(gold))
    if unlike or not braces_balance(gold) or not marks_agree(gold, answer):
        return Judgement(False, "the answer cannot be read as what the gold is")
    if not _accepted_by_math_verify(gold, answer):
        return Judgement(False, "compared by Math-Verify")
    changed = list(one_changed(answer))
    if len(changed) > _MAX_CHANGES or any(_accepted_by_math_verify(gold, other) for other in changed):
        return Judgement(False, "Math-Verify cannot tell the answer from others")
    return Judgement(True, "compared by Math-Verify")


def _accepted_by_math_verify(gold: str, answer: str) -> bool:
    from math_verify import verify

    # Time-outs off: Math-Verify's are SIGALRM handlers, which cannot interrupt one long C call. Our parent can.
    return bool(verify(list(_parse_boxed(gold)), list(_parse_boxed(answer)), timeout_seconds=None))


@lru_cache(maxsize=512)
def _is_usable(gold: str) -> bool:
    """Whether the gold can be read, or Math-Verify makes an expression, not only a string, of it."""
    if is_readable(gold):
        return True
    return braces_balance(gold) and any(not isinstance(item, str) for item in _parse_boxed(gold))


@lru_cache(maxsize=512)  # the M responses to a problem share its golds
def _parse_boxed(content: str) -> Sequence[Any]:
    """Parse in a box, because a bare gold can change its meaning when parsed (RECIPE section 8)."""
    return _parse(f"\\boxed{{{content}}}")


def _parse(text: str) -> Sequence[Any]:
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))  # None: no time-out, see _verify


def _text_of(extracted: Sequence[Any]) -> str:
    """Return the string form, which Math-Verify puts last; "" when it extracted nothing."""
    return extracted[-1].strip() if extracted and isinstance(extracted[-1], str) else ""


_OPERATIONS: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "verify": _verify,
    "released": _verify_as_released,
}


if __name__ == "__main__":
    main()
