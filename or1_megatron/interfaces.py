"""Interfaces (Policy, Rollouts, Sampler, Objective, ...) between folders that may not import each other.

The training loop calls most of these protocols. Implementations: ``trainer.synced_policy`` (Policy),
``parallel.weights`` (PolicyWeights), ``rollout`` (Rollouts, Sampler), ``data.stream`` (ProblemStream), ``runtime`` and
``report`` (Observer, Tracker), ``rl.objectives`` (Objective). ``trainer.ranks`` joins them. Nothing here knows
megatron, vllm or ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from or1_megatron.errors import PartLost
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    ChatCompletion,
    ChatRequest,
    EvaluationResult,
    FailedRequest,
    Group,
    HandoffReport,
    Prompt,
    RefillRule,
    RolloutReport,
    Sampling,
    TokenScores,
    UpdateReport,
)
from or1_verify.errors import Or1Error

if TYPE_CHECKING:
    import torch

    from or1_megatron.weights.holdings import Box, Holding


Scope = Literal["token", "sequence", "batch"]
"""What the loss term of a token may depend on: that token, its whole sequence, or the whole mini-batch."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Says in which of S sequences each of N counted tokens is, and sums values over whole sequences.

    Under context parallelism a rank holds a part of each sequence, and ``sum`` adds the parts of all ranks. Every rank
    must then call ``sum`` the same number of times, even a rank without counted tokens.
    """

    index: torch.Tensor
    """[N] int64: for each token, the index of its sequence, 0 to S - 1."""
    lengths: torch.Tensor
    """[S]: the number of counted tokens of each whole sequence, even if this rank holds only a part."""
    add_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Sums a tensor over the ranks that hold parts of the sequences, differentiably; None: there is one rank."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return [S]: the sum of ``values`` [N] over each whole sequence, computed in float64. It is differentiable."""
        total = values.double().new_zeros(len(self.lengths)).index_add(0, self.index, values.double())
        return (total if self.add_ranks is None else self.add_ranks(total)).to(values.dtype)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return [S]: the mean of ``values`` [N] over each whole sequence; 0 for a sequence without counted tokens."""
        return self.sum(values) / self.lengths.clamp(min=1).to(values.dtype)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return [N]: each token gets the value that ``values`` [S] has for the token's sequence."""
        return values[self.index]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """An objective's constant inputs, besides log-probs and entropies. Tensors: [N] counted tokens, fp32 or fp64."""

    advantages: torch.Tensor
    engine_log_probs: torch.Tensor | None = None
    """Log-probs by the engine that sampled the tokens."""
    policy_log_probs: torch.Tensor | None = None
    """Log-probs by pi_k, from a forward pass before the step's first SGD step; None: that pass was not made."""
    reference_log_probs: torch.Tensor | None = None
    """Log-probs by the frozen reference model; None: there is no reference."""
    weights: torch.Tensor | None = None
    """Token weights of the aggregation; None: all 1."""
    log_prob_gradients: torch.Tensor | None = None
    """d loss / d log-prob; None unless the objective was evaluated before the update (``objectives.whole_batch``)."""
    entropy_gradients: torch.Tensor | None = None
    sequences: Sequences | None = None
    """The tokens' sequences; None for an objective of scope "token"."""

    @property
    def old_log_probs(self) -> torch.Tensor:
        """Return PPO's log pi_old, the ratio's denominator: ``policy_log_probs`` if given, else ``engine_log_probs``.

        Raises ValueError when both are None.
        """
        old = self.engine_log_probs if self.policy_log_probs is None else self.policy_log_probs
        if old is None:
            raise ValueError("TokenInputs has neither policy_log_probs nor engine_log_probs; expected one of them")
        return old

    @property
    def whole(self) -> Sequences:
        """Return ``sequences``. Raises ValueError when it is None."""
        if self.sequences is None:
            raise ValueError('TokenInputs has no sequences; give the objective the scope "sequence" or "batch"')
        return self.sequences

    def __getitem__(self, part: slice | torch.Tensor) -> TokenInputs:
        """Return the inputs of a part of the tokens, without ``sequences``."""
        columns: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__ if name != "sequences"}
        return TokenInputs(**{name: values[part] for name, values in columns.items() if values is not None})


class Objective(Protocol):
    """A loss. It must be picklable, because it is sent to the ranks with the batch.

    An attribute or property ``scope`` says what a token's loss term may depend on (``scope_of``). Without this
    attribute the scope is "token": each term depends on the log-prob and entropy of its own token only.
    """

    @property
    def temperature(self) -> float: ...

    def __call__(
        self, log_probs: torch.Tensor, entropies: torch.Tensor, tokens: TokenInputs
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return (loss summed over tokens, named detached sums) for log-probs and entropies [N] of counted tokens.

        Return sums, never means: the policy divides once, by the batch's counted tokens. A loss term of a whole
        sequence must be spread over the sequence's tokens. The policy adds the named values over micro-batches and
        ranks, but takes the maximum of values whose names begin with ``max_``. N may be 0, unless the scope is "batch".
        """


def scope_of(objective: Objective) -> Scope:
    """Return the objective's scope. Raises ValueError for a value outside ``Scope``."""
    scope: Scope = getattr(objective, "scope", "token")
    if scope not in get_args(Scope):
        raise ValueError(f"{type(objective).__name__}.scope is {scope!r}; expected {', '.join(get_args(Scope))}")
    return scope


class Policy(Protocol):
    """The trained model, spread over all trainer ranks. Each method runs on every rank in lockstep."""

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        """Return log-prob and entropy of the counted tokens, without gradient."""

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        """Return the frozen reference's scores (``algorithm.kl``). Raises RuntimeError when there is no reference."""

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        """Make one optimizer step on the objective's mean over all counted tokens of the batch."""

    def restart_optimizer(self) -> None:
        """Set the optimizer's moments to 0 and restart the learning-rate schedule."""

    def hand_off(self, version: int) -> HandoffReport:
        """Send the current weights, as ``version``, to every engine, and check that they arrived."""

    def save(self, folder: Path, state: Mapping[str, Any], responses: bytes = b"") -> None:
        """Start to save parameters, optimizer, RNG and the loop's JSON-able ``state`` as ``folder``.

        ``responses``: what ``Rollouts.finished_responses`` returned; empty: no file is written for them.

        Waits for an earlier save that is still being written. Returns once everything is copied to host memory. The
        copy is written in the background, under another name until it is complete.
        """

    def finish_save(self, wait: bool) -> float | None:
        """Return the seconds that writing took, if a save was completed since the last call; else None.

        Raises the error of a save that failed. With ``wait``, waits for a save that is still being written.
        """

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Load an intact checkpoint, and return the loop's state from it."""

    def export_hf(self, folder: Path) -> None:
        """Write the current weights as an HF folder that transformers loads. Raises OSError when writing fails."""


class Sampler(Protocol):
    """Answers chat requests outside training, with our own engines or an OpenAI-compatible endpoint."""

    def sample(self, requests: Iterable[ChatRequest]) -> Iterator[ChatCompletion | FailedRequest]:
        """Yield a reply to each request, in any order. Reads only as many ``requests`` as can be in flight."""


class Rollouts(Protocol):
    """Samples responses and has them verified. The RolloutManager, a separate process, does the work."""

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        rule: RefillRule | None = None,
        urgent: bool = False,
    ) -> int:
        """Start sampling ``group_size`` responses to each prompt and return the rollout's ticket.

        Each response is verified when it ends. Several rollouts may be under way: ``urgent`` rollouts
        are sampled first, then the others, the oldest first.

        ``rule`` selects the groups that ``collect`` returns; None: all.
        """

    def wait_decoded(self, ticket: int | None = None) -> None:
        """Wait until the last response of a rollout (None: the oldest) has been sampled."""

    def collect(self, ticket: int | None = None) -> tuple[list[Group], RolloutReport]:
        """Wait until every response of a rollout (None: the oldest) has its verdict, and return the groups.

        The groups are in the order of the prompts.
        """

    def trained(self) -> None:
        """Note that the policy has trained on the collected groups: ``finished_responses`` then omits them. If every
        rollout that is still under way is ``urgent``, also drop the restored responses that are still unused."""

    def finished_responses(self) -> bytes:
        """Return the finished responses that are not yet trained on, packed by ``runtime.message``; empty if none.

        These are sampled responses of rollouts under way, collected responses until ``trained`` is called, and unused
        restored responses. Responses of ``urgent`` rollouts are left out."""

    def restore_responses(self, responses: bytes, version: int | None = None) -> None:
        """Answer later requests with these responses of a checkpoint (``finished_responses``), instead of sampling.

        A response answers a request that has the same problem, prompt, sampling and seed. ``urgent`` rollouts always
        sample. ``version``: use only responses whose tokens were all sampled by this version of the weights."""


class ProblemStream(Protocol):
    """An endless, shuffled stream of prompts whose position can be saved and restored."""

    @property
    def left(self) -> int:
        """Return how many different problems ``take`` can return."""

    def take(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, of different problems. ``take(a + b)`` begins with ``take(a)``."""

    def mix(self, repeats: Sequence[int]) -> None:
        """Set, for each source, how often each of its problems appears per epoch. A change starts a new epoch."""

    def exclude(self, problem_ids: frozenset[str]) -> int:
        """Leave these problems out from now on, and return how many are left. Raises ValueError if none is left."""

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class PolicyWeights(Protocol):
    """A policy's weights under their HF names, for a handoff."""

    @property
    def ranks(self) -> int:
        """Number of trainer ranks."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Return (HF name, dtype, full shape) of every tensor of the model. Every rank returns the same list."""

    def holdings(self) -> list[Holding]:
        """Return which trainer rank holds which part of which tensor. Every rank returns the same list."""

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a view of the part ``box`` of tensor ``name``, which this rank must hold. Not a collective call."""

    def from_rank_0(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank. A collective call."""


class Stopped(Or1Error):
    """The run has been asked to stop: the loop saves the last complete step and ends.

    The loop raises Stopped between its verbs. Rollouts and the evaluation, whose waits are long, may raise it too.
    """


class EnginesLost(PartLost, RuntimeError):
    """The engines, the RolloutManager or the verifiers are gone.

    A run that has been asked to stop still saves after this error, because a pre-empted node often loses its engines
    before the ranks have saved.
    """


class Observer(Protocol):
    """Watches the loop (console, rollout store) without changing the run."""

    def verb_started(self, step: int, verb: str) -> None:
        """Note that the loop begins ``verb``, one of its methods. ``step``: the number of rollout steps done so far."""

    def rolled_out(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        """Take all groups of a finished step (the first is step 1). ``kept``: the groups that were not rejected.

        ``scores``: the first scores that the policy gave the kept groups' responses, in their order; None: unknown.
        """

    def evaluated(self, step: int, result: EvaluationResult) -> None: ...

    def alarmed(self, step: int, text: str) -> None:
        """Take the ``text`` of an alarm, which names the step, the value, the limit and what to do."""

    def resumed(self, step: int) -> None:
        """Discard the records after ``step``, because its checkpoint has been loaded."""


class Tracker(Protocol):
    """Writes each step's metrics somewhere: JSONL, TensorBoard, Weights & Biases."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
