"""What is asked of the engines, and how the answers become groups again. Pure: no engine, no Ray.

A roll-out of P prompts with group size M is P * M requests. Their seeds depend on the roll-out's seed and on their
place alone, so the same roll-out can be drawn again, on any number of engines and in any order of arrival.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from or1_megatron.types import Completion, Group, Prompt, Request, Sampling, Until, Verdict

RequestKey = tuple[int, int]
"""(index of the prompt in the roll-out, index of the sample in its group)."""

_SEED_BITS = 63  # torch generators take 64 bits; signed 64-bit integers survive every serialisation on the way


def request_seed(*parts: int) -> int:
    """A request's seed in [0, 2**63), from (roll-out seed, prompt index, sample index).

    So many bits because all the thousands of seeds of a roll-out must differ.

    Stable over processes, Python versions and machines (BLAKE2b of the decimal digits); unlike a sum of the parts,
    neighbouring parts give unrelated seeds.
    """
    digest = hashlib.blake2b(",".join(str(int(part)) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _SEED_BITS)


def plan_requests(
    prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int
) -> dict[RequestKey, Request]:
    """``group_size`` requests per prompt, group by group.

    Within a roll-out the seed names the request: a problem may stand in the batch twice, so its id does not.
    """
    return {
        (prompt_index, sample_index): Request(
            prompt=prompt,
            sample_index=sample_index,
            sampling=sampling,
            seed=request_seed(seed, prompt_index, sample_index),
        )
        for prompt_index, prompt in enumerate(prompts)
        for sample_index in range(group_size)
    }


def assemble_groups(
    prompts: Sequence[Prompt],
    group_size: int,
    completions: Mapping[RequestKey, Completion],
    verdicts: Mapping[RequestKey, Verdict],
) -> list[Group]:
    """Groups in the order of the prompts, members in the order of ``sample_index``, whatever the order of arrival.

    Raises:
        KeyError: a completion or a verdict is missing; the message is the (prompt, sample) that lacks it.
    """
    groups = []
    for prompt_index, prompt in enumerate(prompts):
        keys = [(prompt_index, sample_index) for sample_index in range(group_size)]
        groups.append(
            Group(
                prompt=prompt,
                completions=tuple(completions[key] for key in keys),
                verdicts=tuple(verdicts[key] for key in keys),
            )
        )
    return groups


class Ration:
    """How many of a roll-out's prompts, counted from the first, are sampled, and how many make up the result.

    Without ``until`` all of them. With it the result is the shortest run of prompts with enough groups kept, whatever
    the order in which groups are judged; engines are sent on to the prompts that are certain to be needed, since every
    group that was rejected wants one more, and to those that probably will be.

    Worked example, 3 groups wanted of 8 prompts, 0 rejections expected: prompts 0..2 are given out. 1 is rejected:
    0..3. 3 is kept, then 0: two kept among 0..3, and 2 is still out. 2 is rejected: 0..4. 4 is kept: 0, 3, 4, and the
    result is prompts 0..4.
    """

    def __init__(self, prompts: int, until: Until | None) -> None:
        self._prompts, self._until = prompts, until
        self._kept: dict[int, bool] = {}
        self.needed = prompts
        """Prompts of the result; all, as long as it is not ``over``."""
        self.over = False

    @property
    def allowed(self) -> int:
        """Prompts that may be given out."""
        if self._until is None:
            return self._prompts
        wanted = self._until.kept
        rejected = sum(not kept for kept in self._kept.values())
        share = (self._until.expected_rejected * wanted + rejected) / (wanted + len(self._kept))
        expected = math.ceil(wanted / (1 - share)) if share < 1 else self._prompts
        return min(max(wanted + self._rejected_for_certain(), expected), self._prompts)

    def judged(self, prompt_index: int, group: Group) -> None:
        """All responses to this prompt have their verdicts."""
        self._kept[prompt_index] = self._until is None or bool(self._until.keeps(group))
        if self._until is None:
            self.over = len(self._kept) == self._prompts
            return
        found = 0
        for index in range(self._prompts):
            if index not in self._kept:
                return
            found += self._kept[index]
            if found == self._until.kept:
                self.needed = index + 1
                break
        self.over = True

    def _rejected_for_certain(self) -> int:
        """Rejected ones that will be part of the result: among the first D_R, those that follow for them, and so on."""
        assert self._until is not None
        certain, reached = 0, self._until.kept
        index = 0
        while index < min(reached, self._prompts):
            if self._kept.get(index) is False:
                certain += 1
                reached += 1
            index += 1
        return certain


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Total length, in seconds, of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
