"""The data types of a training step: Prompt, Request, Completion, Group, Sample, MicroBatch, Batch, and reports.

Each stage of the flow (problem -> completion -> verdict -> group -> sample -> micro-batch) has its own small frozen
record, which is made when all its values are known. Problems and verdicts are in ``or1_verify.types``. Arrays are
NumPy, so that records cross process borders without torch.
Shapes: ``n`` response tokens, ``p`` prompt tokens, ``T`` packed tokens, ``S`` packed sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from or1_verify.types import Message, Problem, Verdict

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
RoutedExperts = NDArray[np.uint8] | NDArray[np.uint16]
"""[tokens, layers with experts, k]: indices of the k experts that computed each token; uint8 if all indices fit."""
OwnExperts = tuple[RoutedExperts, BoolArray]
"""For a rank's t tokens of a packed row: (expert indices [t, layers of the rank, k], mask [t] of counted tokens)."""

FinishReason = Literal["stop", "length"]
"""Why a response ended: its end-of-sequence token, or the response-length limit T (a *truncated* response)."""

Aggregation = Literal["token_mean", "response_mean", "released-code"]
"""How token losses are averaged (RECIPE section 1). ``rl.aggregation.weigh`` turns it into token weights of mean 1."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem as the engines get it: with the chat template applied, as token ids."""

    problem: Problem
    token_ids: Int32Array  # [p]
    opened: str = ""
    """The reasoning tag that the chat template leaves open, if any; a verifier gets it before the response."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled. ``max_response_tokens`` is the paper's T."""

    temperature: float
    top_p: float
    max_response_tokens: int
    routed_experts: bool = False
    """Whether ``Completion.routed_experts`` is returned."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request with messages instead of tokens, for an ``interfaces.Sampler`` (our own engines or an endpoint).

    ``key`` is the caller's name for the problem; ``sample_index`` distinguishes requests with the same key.
    """

    key: str
    sample_index: int
    messages: tuple[Message, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """A response in text. ``truncated``: it was cut off at the response-length limit."""

    request: ChatRequest
    text: str
    truncated: bool
    tokens: int | None = None
    """Length of the response; None where an endpoint does not report it."""


@dataclass(frozen=True, slots=True)
class FailedRequest:
    """A request without a completion. ``permanent``: it would always fail, for example if the prompt is too long."""

    request: ChatRequest
    reason: str
    permanent: bool


@dataclass
class Replies:
    """A sampler's replies. Iteration yields the completions, and collects the failed requests in two lists."""

    replies: Iterable[ChatCompletion | FailedRequest]
    refused: list[FailedRequest] = field(default_factory=list)
    """Requests whose failure is permanent."""
    failures: list[str] = field(default_factory=list)
    """Reasons of the requests whose failure is not permanent."""

    def __iter__(self) -> Iterator[ChatCompletion]:
        for reply in self.replies:
            if isinstance(reply, ChatCompletion):
                yield reply
            elif reply.permanent:
                self.refused.append(reply)
            else:
                self.failures.append(reply.reason)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weights version that sampled the response tokens from ``first_token`` up to the next span."""

    version: int
    first_token: int


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample: its prompt, its index in the prompt's group, the sampling settings and the seed."""

    prompt: Prompt
    sample_index: int
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled response.

    ``log_probs`` are the engine's log-probs of the sampled tokens, with the temperature applied and before any top-p
    or top-k. ``token_ids`` contains the end-of-sequence token when ``finish_reason`` is ``stop``; ``text`` does not.
    """

    problem_id: str
    sample_index: int
    token_ids: Int32Array  # [n]
    log_probs: Float32Array  # [n]
    text: str
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    engine: int
    seed: int
    started_s: float
    """When the engine started on the request, seconds since the epoch."""
    finished_s: float
    drafted_tokens: int = 0
    """Tokens that the engine drafted for the response (``speculative_config`` in ``rollout.engine_args``)."""
    accepted_tokens: int = 0
    """Drafted tokens that are part of the response."""
    request_digest: bytes = b""
    """``rollout.request_plan.request_digest`` of the request; empty: unknown."""
    entropy: float = math.nan
    """Mean entropy, in nats, of the full-vocabulary distributions that the tokens were drawn from; NaN: unknown."""
    routed_experts: RoutedExperts | None = None
    """The experts that computed each token of prompt and response, [p + n - 1, layers, k]; None unless requested. The
    last token has none, because no layer has computed it."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """All M responses to one prompt and their verdicts, both in the order of ``sample_index``."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def rewards(self) -> Float32Array:  # [M]
        return np.array([v.reward for v in self.verdicts], dtype=np.float32)

    @property
    def right(self) -> BoolArray:  # [M]
        return np.array([v.status == "right" for v in self.verdicts], dtype=np.bool_)

    @property
    def truncated(self) -> BoolArray:  # [M]
        return np.array([c.truncated for c in self.completions], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class RefillRule:
    """Limits a rollout to its first n prompts: the smallest n that gives ``kept`` groups for which ``keeps`` is true.

    ``keeps`` must be picklable.
    """

    kept: int
    keeps: Callable[[Group], bool]
    expected_rejected: float = 0.0
    """Expected share of groups that ``keeps`` rejects. It sets how many prompts are started early, and never changes
    which groups the rollout returns."""


@dataclass(frozen=True, slots=True)
class AdvantagedGroup:
    """A group with one advantage per response; all tokens of a response have its advantage."""

    group: Group
    advantages: Float32Array  # [M]


@dataclass(frozen=True, slots=True)
class Sample:
    """One response as the policy trains on it."""

    prompt_ids: Int32Array  # [p]
    response_ids: Int32Array  # [n]
    advantage: float
    loss_mask: BoolArray  # [n], the response tokens that enter the loss; all of them in the recipe
    engine_log_probs: Float32Array | None = None  # [n], as the engine gave them; None: unknown
    policy_log_probs: Float32Array | None = None  # [n], of pi_k, scored before the first SGD step; None: no such pass
    reference_log_probs: Float32Array | None = None  # [n], of the frozen reference; None: there is none
    weight: float | None = None
    """Loss weight of each response token, by the aggregation (``rl.aggregation``). None: 1."""
    routed_experts: RoutedExperts | None = None  # as in ``Completion``; None: the policy chooses


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One packed row, for one forward and backward pass: sequences laid end to end, then padding to a static length T.

    Position t holds token ``token_ids[t]`` and predicts ``target_ids[t]``, the next token of the same sequence. The
    per-token arrays are aligned with the *predicting* position: a response token's values are one position before it.
    ``loss_mask`` is 1 where the target is a *counted* token: a response token that enters the loss. ``sample_index``
    [S] maps each packed sequence to its index in the list of batched samples. Sequence k starts at
    ``cu_seqlens[k]``; its tokens take ``lengths[k]`` positions, and padding for context parallelism takes the rest up
    to ``cu_seqlens[k + 1]``. The padding at the end of the row is one last sequence, which is in ``cu_seqlens`` but not
    in ``sample_index``.
    """

    token_ids: Int64Array  # [T]
    target_ids: Int64Array  # [T]
    position_ids: Int64Array  # [T], restarting at 0 in every sequence
    cu_seqlens: Int32Array  # [S+1], or [S+2] with padding; first 0, last T
    loss_mask: BoolArray  # [T]
    advantages: Float32Array  # [T]
    sample_index: Int32Array  # [S]
    lengths: Int32Array  # [S], prompt and response tokens of each sequence, without padding
    engine_log_probs: Float32Array | None = None  # [T], these three as in ``Sample``
    policy_log_probs: Float32Array | None = None  # [T]
    reference_log_probs: Float32Array | None = None  # [T]
    weights: Float32Array | None = None  # [T], ``Sample.weight``; None: all 1
    log_prob_gradients: Float32Array | None = None  # [T], both set by ``rl.objectives.whole_batch``
    entropy_gradients: Float32Array | None = None  # [T]
    routed_experts: tuple[RoutedExperts, ...] | None = None  # [S] arrays, ``Sample.routed_experts``
    own_experts: OwnExperts | None = None  # what one rank gets of these


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one SGD step as micro-batches of one length, equally many for each data-parallel rank.

    ``token_count`` is T_k of the loss (RECIPE eq. 3.1), the counted tokens over all micro-batches of all ranks. Under
    every aggregation, the weighted sum of token losses is divided by ``token_count``.
    """

    ranks: tuple[tuple[MicroBatch, ...], ...]  # [DP][micro-batches]
    token_count: int
    samples: tuple[Sample, ...]

    @property
    def sample_count(self) -> int:
        return len(self.samples)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-prob and full-vocabulary entropy of every counted token of each sample, in the order of the samples."""

    log_probs: tuple[Float32Array, ...]  # per sample [n]
    entropies: tuple[Float32Array, ...]  # per sample [n]


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The result of one SGD step. ``sums`` are the objective's named sums over all counted tokens of the batch."""

    sums: Mapping[str, float]
    token_count: int
    grad_norm: float
    learning_rate: float
    skipped: bool
    """True when loss or gradient was not finite, so that the parameters were left unchanged."""
    forward_backward_s: float
    optimizer_s: float
    scores: TokenScores | None = None
    """The batch's scores from the step's own forward pass, before the parameters change; None: not recorded."""


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """The result of one weight handoff, and how far the engines' log-probs on a fixed probe are from the policy's."""

    version: int
    bytes_sent: int
    transfer_s: float
    probe_s: float
    probe_max_abs_diff: float | None
    """The largest difference of a log-prob, in nats; None: this handoff was not probed."""
    probe_mean_abs_diff: float | None


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """Times and counts of one rollout, by the RolloutManager's clock."""

    decode_s: float
    """Wall time during which the busiest engine was decoding."""
    engine_busy_s: tuple[float, ...]
    """For each engine, the wall time during which it was decoding."""
    wall_s: float
    prompt_tokens: int
    response_tokens: int
    verify_tail_s: float
    """Time from the last finished response to the last verdict."""
    verifier_retries: int
    surplus_responses: int = 0
    """Responses that were started for a refill and then discarded."""
    period_s: float = 0.0
    """Wall time that ``decode_s`` and ``engine_busy_s`` cover. It begins at the rollout's start or at the previous
    report, whichever is later, and ends at this report."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Accuracy on held-out problems, avg@``samples``. With several problem sets, scores are means over the sets."""

    accuracy: float
    """Share of right responses."""
    non_truncated_accuracy: float | None
    """Share of right responses among those that were not truncated; None if all were truncated."""
    truncation_ratio: float
    mean_length_tokens: float
    problems: int
    """Number of problems, over all sets."""
    samples: int
    """k of avg@k; the largest k if sets differ."""
    decode_s: float
    wall_s: float
    sets: Mapping[str, EvaluationResult] = field(default_factory=dict)
    """Results by set name, if there are several sets."""
    entropy: float | None = None
    """Minus the mean engine log-prob of the sampled tokens, at the evaluation's temperature; None: greedy."""
    more: Mapping[str, float] = field(default_factory=dict)
    """More metrics by name: pass@k, best@k, source/<source>/accuracy. Several sets: means of their common metrics."""
