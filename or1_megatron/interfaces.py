"""Protocols between folders that may not import each other, most of them what the training loop calls.

Implementations: ``trainer.synced_policy`` (Policy), ``parallel.weights`` (PolicyWeights), ``rollout`` (Rollouts,
EngineControl, Sampler), ``verify`` (Verifier), ``data.stream`` (ProblemStream), ``evaluate.held_out`` (Evaluator),
``runtime`` and ``report`` (Observer, Tracker), ``rl.loss`` (Objective). ``trainer.run`` joins them. Nothing here knows
megatron, vllm or ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from or1_megatron.errors import Or1Error, UserError
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    ChatCompletion,
    ChatRequest,
    EvaluationResult,
    FailedRequest,
    Float32Array,
    Group,
    HandoffReport,
    Int32Array,
    Problem,
    Prompt,
    RefillRule,
    RolloutReport,
    Sampling,
    TokenScores,
    UpdateReport,
    Verdict,
)

if TYPE_CHECKING:
    import torch

    from or1_megatron.config.schema import EvaluationConfig
    from or1_megatron.weights.holdings import Box, Holding


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What an objective is told of each of N counted tokens beside its log-prob and entropy; all [N] fp32, constant."""

    advantages: torch.Tensor
    engine_log_probs: torch.Tensor | None = None
    """Of the engine that sampled the tokens. None: dropped, since ``policy_log_probs`` are there and no correction
    compares the two."""
    policy_log_probs: torch.Tensor | None = None
    """Of pi_k, from a scoring pass before the step's first SGD step; None: there was no such pass."""
    reference_log_probs: torch.Tensor | None = None
    """Of the frozen reference; None: there is no reference."""
    weights: torch.Tensor | None = None
    """Token weights of the aggregation; None: all 1."""

    @property
    def old_log_probs(self) -> torch.Tensor:
        """PPO's log pi_old, the denominator of the importance ratio: pi_k's where they were scored, else the engine's.

        Raises ValueError when there are neither.
        """
        old = self.engine_log_probs if self.policy_log_probs is None else self.policy_log_probs
        if old is None:
            raise ValueError("TokenInputs has neither policy_log_probs nor engine_log_probs; expected one of them")
        return old

    def __getitem__(self, part: slice) -> TokenInputs:
        columns: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return TokenInputs(**{name: values[part] for name, values in columns.items() if values is not None})


class Objective(Protocol):
    """A loss that is pointwise in a token's log-prob and entropy. It is picklable: ranks receive it with the batch."""

    @property
    def temperature(self) -> float: ...

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropies: torch.Tensor,
        tokens: TokenInputs,
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Log-probs and entropies [N] fp32 of counted tokens. Returns (loss summed over them, named detached sums).

        Sums, never means: the policy divides once, by the batch's ``token_count``. Over micro-batches and ranks the
        named values are summed, save those whose name begins with ``max_``: of these the largest is taken. N may be 0.
        """
        ...


class Policy(Protocol):
    """The trained model, spread over all trainer ranks. Each method runs on every rank in lockstep."""

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        """Log-prob and entropy of the counted tokens; no gradient."""
        ...

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        """The same of the frozen reference (``algorithm.kl``). RuntimeError when there is none."""
        ...

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        """One optimizer step on the batch's global token mean of the objective."""
        ...

    def restart_optimizer(self) -> None:
        """As if no SGD step had been made: moments of 0, the learning rate's schedule from its beginning."""
        ...

    def hand_off(self, version: int) -> HandoffReport:
        """Give the current weights to every engine, as ``version``, and prove it."""
        ...

    def save(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Begin to save parameters, optimizer, RNG and ``state`` (JSON-able, of the loop) as ``folder``.

        Returns once they are copied; they are written, aside and then renamed, while training goes on. A save that is
        still being written is waited for.
        """
        ...

    def finish_save(self, wait: bool) -> float | None:
        """Seconds that the save which has completed since the last call took to write; None when none has.

        Raises what it failed of. With ``wait``, waits for a save that is still being written.
        """
        ...

    def load(self, folder: Path) -> Mapping[str, Any]:
        """The inverse of save, of a checkpoint that is known to be intact; returns the loop's state."""
        ...

    def export_hf(self, folder: Path) -> None:
        """Write the current weights as an HF folder that transformers loads. OSError when it cannot be written."""
        ...


class Sampler(Protocol):
    """A model that is not being trained: our engines, or an endpoint."""

    def sample(self, requests: Iterable[ChatRequest]) -> Iterator[ChatCompletion | FailedRequest]:
        """Yield a reply to each request, in any order; read only as many ``requests`` as can be in flight."""
        ...


@runtime_checkable
class Verifier(Protocol):
    """Judges responses of one ability ("math", "code")."""

    def start(self) -> None:
        """Begin to start what verdicts will need, without waiting for it; else the first verdicts do."""
        ...

    def check_ground_truth(self, problem: Problem) -> None:
        """Raise ValueError, saying what was expected, when the problem's ground truth cannot be used."""
        ...

    def verify(self, problem: Problem, response: str, truncated: bool) -> Verdict:
        """Never raises for anything that the response holds."""
        ...

    def close(self) -> None:
        """End what the verifier has started."""
        ...


class Rollouts(Protocol):
    """Samples and verifies: the loop's view of the RolloutManager, which is a process of its own."""

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        refill: RefillRule | None = None,
    ) -> None:
        """Start sampling ``group_size`` responses to each prompt; returns at once. Each is verified as it ends.

        With ``refill`` only of as many of the first prompts as that needs: ``collect`` gives the shortest run of them,
        or all.
        """
        ...

    def wait_decoded(self) -> None:
        """Block until the last response of the current roll-out has been sampled."""
        ...

    def collect(self) -> tuple[list[Group], RolloutReport]:
        """Block until every response has its verdict; groups come in the order of the prompts."""
        ...

    def abandon(self) -> None:
        """Give up the current roll-out, if there is one; back when the engines are idle."""
        ...

    def progress(self) -> tuple[int, int]:
        """(responses finished, responses asked for) of the current roll-out; never blocks."""
        ...


class ProblemStream(Protocol):
    """Endless, resumable, shuffled supply of prompts."""

    @property
    def left(self) -> int:
        """Different problems that ``take`` can give."""
        ...

    def take(self, count: int) -> list[Prompt]:
        """Of different problems. What is taken first does not depend on ``count``."""
        ...

    def mix(self, repeats: Sequence[int]) -> None:
        """From now on each source appears so often per epoch; a change begins a new epoch."""
        ...

    def exclude(self, problem_ids: frozenset[str]) -> int:
        """Leave these problems out from now on; returns how many are left. ValueError when none would be."""
        ...

    def state(self) -> Mapping[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class PolicyWeights(Protocol):
    """A policy's weights under their HF names, in the ways in which a handoff may want them.

    The three iterators yield in the order of ``metadata`` and are collective over the ranks that share a tensor.
    """

    @property
    def ranks(self) -> int:
        """Trainer ranks."""
        ...

    @property
    def tensor_ranks(self) -> int:
        """Ranks of a tensor-parallel group."""
        ...

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """(HF name, dtype, full shape) of the whole model, on every rank."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Whole tensors on rank 0; on other ranks each may be None."""
        ...

    def everywhere(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors on every rank."""
        ...

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors, on each rank those named by ``held_names``."""
        ...

    def held_names(self) -> frozenset[str]:
        """The tensors of which this rank's pipeline stage holds a part."""
        ...

    def holdings(self) -> list[Holding]:
        """Which trainer rank holds which part of which tensor; the same on every rank."""
        ...

    def read(self, name: str, box: Box) -> torch.Tensor:
        """A rectangle that this rank holds, as a view; not collective."""
        ...

    def from_rank_0(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank; collective."""
        ...


class EngineControl(Protocol):
    """All engines, as trainer rank 0 drives them in a handoff: vLLM's ``VLLMWeightSyncClient`` and more.

    Every call goes to all engines concurrently and returns when the last has answered.
    """

    engines: int
    workers_per_engine: int
    address: str
    """This host, as the engines' nodes reach it."""
    next_version: int
    """What ``finish_weight_update`` calls the weights. vLLM's trainer engines finish an update without naming it."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def score_prompts(self, token_ids: Sequence[Int32Array]) -> list[list[Float32Array]]: ...


class Stopped(Or1Error):
    """The run has been asked to stop: the loop saves the last complete step and ends.

    Raised by the loop between verbs; a port that blocks for long (Rollouts, Evaluator) may raise it from within, once
    the stop flag is up.
    """


class EnginesLost(UserError, RuntimeError):
    """Engines, or what manages them and verifies, cannot go on.

    Once the run has been asked to stop this ends nothing that would not end anyway: a node that is taken away takes its
    engines with it, often before the ranks have saved.
    """


class Evaluator(Protocol):
    """Measures the engines' current weights on held-out problems; leaves no trace in the training stream."""

    def evaluate(self, settings: EvaluationConfig, whole: bool) -> EvaluationResult:
        """avg@k as ``settings`` say: k is ``samples`` for a ``whole`` evaluation, else ``samples_during``.

        The same weights and settings give the same result at every call.
        """
        ...


class Observer(Protocol):
    """Watches the loop: console, rollout store. Nothing that it does may change the run."""

    def verb_started(self, step: int, verb: str) -> None:
        """``step`` is the number of rollout steps done so far."""
        ...

    def rolled_out(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        """All groups of a finished step (the first is step 1); ``kept`` are those that were not rejected.

        ``scores``: of the kept groups' responses, in order, by the policy when the step first met them; None: unknown.
        """
        ...

    def evaluated(self, step: int, result: EvaluationResult) -> None: ...

    def alarmed(self, text: str) -> None:
        """Something looks wrong: which step, what was seen against what, and what to do about it."""
        ...

    def resumed(self, step: int) -> None:
        """A checkpoint of ``step`` has been loaded: what was recorded of later steps is void."""
        ...


class Tracker(Protocol):
    """Where metrics go: JSONL, TensorBoard, Weights & Biases."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...
