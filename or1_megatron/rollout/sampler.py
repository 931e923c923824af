"""What is asked of the engines, and how the answers become groups again. Pure: no engine, no Ray.

A roll-out of P prompts with group size M is P * M requests. Their seeds depend on the roll-out's seed and on their
place alone, so the same roll-out can be drawn again, on any number of engines and in any order of arrival.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from or1_megatron.types import Completion, Group, Prompt, Request, Sampling, Verdict

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


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Total length, in seconds, of the union of (start, end) intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
