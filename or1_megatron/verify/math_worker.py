r"""The child process that runs Math-Verify for ``verify.math.MathWorker``. Not imported by anything else.

Protocol: one JSON object per line. ``{"op": "verify", "golds": [...], "answer": ..., "boxed": bool}`` is answered by
``{"right": bool, "answer": str}``, ``{"op": "parse", "gold": ...}`` by ``{"parsed": bool}``; the first line out is
``{"ready": true}``. The end of the input ends the process.

It can die by itself: every request arms a real-time timer whose default action is death, so that a worker busy in
one endless big-integer operation is gone soon after its limit even when nobody is left to kill it. (Python signal
handlers and threads do not run during such an operation, and the parent-death signal is tied to the thread that
started the child, not to the parent.)
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

_GRACE_S = 1.0
_CHILD_MEMORY_BYTES = 4 << 30


def main() -> None:
    timeout_s = float(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a stray print must not break the protocol
    resource.setrlimit(resource.RLIMIT_AS, (_CHILD_MEMORY_BYTES, _CHILD_MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it closes our input
    _is_parsed("\\frac{1}{2}")  # imports and builds the parser, which is slow: before "ready", not within a limit

    replies.write('{"ready": true}\n')
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, timeout_s + _GRACE_S)
        reply = _verify(request) if request["op"] == "verify" else {"parsed": _is_parsed(request["gold"])}
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


def _verify(request: dict[str, Any]) -> dict[str, Any]:
    from math_verify import verify

    golds: list[str] = request["golds"]
    answer: str = request["answer"]
    extracted = _parse_boxed(answer) if request["boxed"] else _parse(answer)
    text = _text_of(extracted)
    shown = answer if request["boxed"] else text
    if text and text in golds:
        return {"right": True, "answer": shown}
    # Time-outs off: Math-Verify's are SIGALRM handlers, which cannot interrupt one long C call. Our parent can.
    right = any(verify(list(_parse_boxed(gold)), list(extracted), timeout_seconds=None) for gold in golds)
    return {"right": right, "answer": shown}


def _is_parsed(gold: str) -> bool:
    """Whether Math-Verify makes an expression, not only a string, of the gold."""
    return any(not isinstance(item, str) for item in _parse_boxed(gold))


@lru_cache(maxsize=512)  # the M responses to a problem share its golds
def _parse_boxed(content: str) -> Sequence[Any]:
    """Wrapped in a box because a bare gold can change its meaning when parsed (RECIPE section 8)."""
    return _parse(f"\\boxed{{{content}}}")


def _parse(text: str) -> Sequence[Any]:
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=None))  # None: no time-out, see _verify


def _text_of(extracted: Sequence[Any]) -> str:
    """The string form that Math-Verify puts last; "" when it extracted nothing."""
    return extracted[-1].strip() if extracted and isinstance(extracted[-1], str) else ""


if __name__ == "__main__":
    main()
