"""The endless, shuffled, resumable stream of training prompts, mixed from sources (``interfaces.ProblemStream``)."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from or1_megatron.types import BoolArray, Int64Array, Prompt
from or1_verify.problems.rows import DataError


@dataclass(frozen=True, slots=True)
class PromptSource:
    """The prompts of one training source. Each prompt occurs ``repeat`` times per epoch."""

    prompts: Sequence[Prompt]
    repeat: int = 1


class MixtureStream:
    """Supplies prompts in an order that depends only on (seed, epoch).

    An epoch is a permutation of the *pool*, which holds every prompt as often as its source repeats it. The state is
    small whatever the size of the data: the cursor (epoch, position), a bitmap of excluded prompts, and the few pool
    entries that wait because their problem was already in the batch.
    """

    def __init__(self, sources: Sequence[PromptSource], seed: int) -> None:
        """Start at epoch 0 of ``sources``. No two sources may have a problem in common."""
        self._prompts: list[Prompt] = [prompt for source in sources for prompt in source.prompts]
        self._index = {prompt.problem.id: index for index, prompt in enumerate(self._prompts)}
        self._source: Int64Array = np.repeat(np.arange(len(sources)), [len(source.prompts) for source in sources])
        self._set_mixture(tuple(source.repeat for source in sources))
        self._seed = seed
        self._fingerprint = self._data_fingerprint()
        self._excluded: BoolArray = np.zeros(len(self._prompts), dtype=np.bool_)
        self._waiting: list[int] = []
        self._begin(0)

    @property
    def left(self) -> int:
        """Number of distinct problems in the pool that are not excluded."""
        return int((~self._excluded & (self._repeats > 0)).sum())

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, all of different problems; go on into the next epoch as needed.

        A pool entry whose problem is already in this batch (a repeat, or from the next epoch) waits for the next batch.
        At most ``repeat`` entries of a problem wait. Raises DataError if fewer than ``count`` problems are left.
        """
        if count > self.left:
            absent = int((self._repeats == 0).sum())
            raise DataError(
                f"asked for {count} different problems, but only {self.left} are left of {len(self._prompts)} "
                f"({int(self._excluded.sum())} are excluded"
                + (f", {absent} of sources that this stage's mixture leaves out" if absent else "")
                + "); lower prompts_per_step or give more data"
            )
        chosen: dict[int, None] = {}
        still_waiting: list[int] = []
        for index in self._waiting:
            if self._excluded[index] or self._repeats[index] == 0:
                continue
            if len(chosen) < count and index not in chosen:
                chosen[index] = None
            else:
                still_waiting.append(index)
        waiting_count = Counter(still_waiting)
        while len(chosen) < count:
            index = self._next_entry()
            if self._excluded[index]:
                continue
            if index not in chosen:
                chosen[index] = None
            elif waiting_count[index] < self._repeats[index]:
                waiting_count[index] += 1
                still_waiting.append(index)
        self._waiting = still_waiting
        return [self._prompts[index] for index in chosen]

    def mix(self, repeats: Sequence[int]) -> None:
        """From now on, let each problem of source i occur ``repeats[i]`` times per epoch (0: not at all).

        A change begins a new epoch, because the order is drawn for a whole epoch.
        """
        mixture = tuple(int(repeat) for repeat in repeats)
        if mixture == self._mixture:
            return
        self._set_mixture(mixture)
        self._begin(self._epoch + 1 if self._position else self._epoch)

    def _set_mixture(self, mixture: tuple[int, ...]) -> None:
        self._mixture = mixture
        self._repeats: Int64Array = np.array(mixture, dtype=np.int64)[self._source]
        self._pool: Int64Array = np.repeat(np.arange(len(self._prompts)), self._repeats)  # [entries per epoch]

    def exclude(self, problem_ids: frozenset[str]) -> int:
        """From now on leave out the problems with these ids; return how many problems are left.

        Raises ValueError if an id is unknown. Raises DataError if no problem would be left. Either way nothing changes.
        """
        unknown = sorted(problem_ids - self._index.keys())
        if unknown:
            raise ValueError(f"cannot exclude {len(unknown)} problems that are not in the data, such as '{unknown[0]}'")
        excluded = self._excluded.copy()
        excluded[[self._index[problem_id] for problem_id in problem_ids]] = True
        if excluded.all():
            raise DataError(
                f"excluding {len(problem_ids)} more problems would leave none of {len(self._prompts)}; expected at "
                "least one that is not yet always solved: switch filter_solved off, loosen min_pass_rate and "
                "max_pass_rate, or give harder data"
            )
        self._excluded = excluded
        return self.left

    def state(self) -> Mapping[str, Any]:
        """Return the JSON-able state: seed, mixture, cursor, waiting entries, exclusions (a bitmap as zlib + base64),
        and the data's fingerprint."""
        bitmap = zlib.compress(np.packbits(self._excluded).tobytes(), level=9)
        return {
            "fingerprint": self._fingerprint,
            "problems": len(self._prompts),
            "seed": self._seed,
            "mixture": list(self._mixture),
            "epoch": self._epoch,
            "position": self._position,
            "waiting": list(self._waiting),
            "excluded": base64.b64encode(bitmap).decode("ascii"),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of the method ``state``. Raises DataError if the data or seed has changed since."""
        if state["fingerprint"] != self._fingerprint:
            raise DataError(
                f"the training data changed since the checkpoint: it had {state['problems']} problems with "
                f"fingerprint {state['fingerprint']}, now there are {len(self._prompts)} with {self._fingerprint}. "
                "Problems, their order, ground truths, repeats, tokenizer and length limit must be the same; restore "
                "them or start a new run"
            )
        if state["seed"] != self._seed:
            raise DataError(f"the checkpoint's data order has seed {state['seed']}, this run's is {self._seed}")
        packed = np.frombuffer(zlib.decompress(base64.b64decode(state["excluded"])), dtype=np.uint8)
        self._excluded = np.unpackbits(packed, count=len(self._prompts)).astype(np.bool_)
        self._set_mixture(tuple(state["mixture"]))
        self._waiting = [int(index) for index in state["waiting"]]
        self._begin(int(state["epoch"]), int(state["position"]))

    def _begin(self, epoch: int, position: int = 0) -> None:
        self._epoch, self._position = epoch, position
        self._order = self._permutation(epoch)

    def _next_entry(self) -> int:
        if self._position == len(self._order):
            self._begin(self._epoch + 1)
        index = int(self._order[self._position])
        self._position += 1
        return index

    def _permutation(self, epoch: int) -> Int64Array:
        generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._seed, epoch])))
        return self._pool[generator.permutation(len(self._pool))]

    def _data_fingerprint(self) -> str:
        digest = hashlib.sha256()
        for prompt, repeat in zip(self._prompts, self._repeats, strict=True):
            problem = prompt.problem
            truth = hashlib.sha256(problem.ground_truth.encode("utf-8", "surrogatepass")).hexdigest()
            digest.update(f"{problem.id} {problem.ability} {truth} {repeat} {len(prompt.token_ids)}\n".encode())
            digest.update(np.ascontiguousarray(prompt.token_ids).tobytes())
        return digest.hexdigest()[:32]
