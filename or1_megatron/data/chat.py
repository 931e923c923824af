"""What an evaluation and a build share in sampling a model that is not trained: requests' seeds, and sorted replies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from or1_megatron.types import ChatCompletion, FailedRequest


def chat_seed(*parts: object) -> int:
    """Return a seed in [0, 2**31), which every endpoint takes; neighbouring parts give unrelated seeds."""
    text = ",".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


@dataclass
class Replies:
    """A sampler's replies: iteration yields the completions and sorts the failed requests."""

    replies: Iterable[ChatCompletion | FailedRequest]
    refused: list[FailedRequest] = field(default_factory=list)
    """Requests that failed for good."""
    failures: list[str] = field(default_factory=list)
    """Reasons of all other failed requests."""

    def __iter__(self) -> Iterator[ChatCompletion]:
        for reply in self.replies:
            if isinstance(reply, ChatCompletion):
                yield reply
            elif reply.permanent:
                self.refused.append(reply)
            else:
                self.failures.append(reply.reason)
