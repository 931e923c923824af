"""A world in which MAGIC runs in milliseconds and with real numbers: a bigram policy that answers tiny riddles.

Tokens 0..7 can be sampled: 0 ends a response, 1..4 are answers, 5..7 say nothing. Problem j is the prompt (8 + j); a
response is right when its first token is 1 + j % 4 and it ends before T. The policy is a table of logits [token, 8],
trained by Adam on exactly the packed batches and objectives that a real policy gets. Engines sample from a copy of the
table that only a handoff renews.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from or1_megatron.checkpoint.manifest import write_manifest
from or1_megatron.interfaces import Objective, Stopped, TokenInputs
from or1_megatron.runtime.run_folder import FINISHED_RESPONSES
from or1_megatron.types import (
    AdvantagedGroup,
    Batch,
    Completion,
    EvaluationResult,
    Group,
    HandoffReport,
    MicroBatch,
    Prompt,
    RefillRule,
    RolloutReport,
    Sampling,
    TokenScores,
    UpdateReport,
    VersionSpan,
)
from or1_verify.types import Message, Problem, Verdict, VerdictStatus

SAMPLED = 8
END = 0


def problem(j: int) -> Prompt:
    """Return riddle j as a prompt of one token."""
    row = Problem(f"p{j}", "riddles", "math", (Message("user", str(j)),), str(1 + j % 4), {}, f"riddles:{j}")
    return Prompt(row, np.array([SAMPLED + j], dtype=np.int32))


def completion(tokens: Sequence[int], j: int = 0, sample: int = 0, **changes: Any) -> Completion:
    """Return a response to riddle j. The response is truncated unless its last token is 0, the end token."""
    fields: dict[str, Any] = {
        "problem_id": f"p{j}",
        "sample_index": sample,
        "token_ids": np.array(tokens, dtype=np.int32),
        "log_probs": np.full(len(tokens), -1.0, dtype=np.float32),
        "text": " ".join(map(str, tokens)),
        "finish_reason": "stop" if tokens and tokens[-1] == END else "length",
        "versions": (VersionSpan(0, 0),),
        "engine": 0,
        "seed": 0,
        "started_s": 0.0,
        "finished_s": 0.0,
    }
    return Completion(**{**fields, **changes})


def verdict(status: VerdictStatus) -> Verdict:
    return Verdict(float(status == "right"), status, "", "made so by the test", 0.0)


def group_of(rewards: Sequence[int], truncated: Sequence[bool] | None = None, j: int = 0, length: int = 2) -> Group:
    """Return a group with these rewards; every response has ``length`` tokens of log-prob -1."""
    cut = truncated or [False] * len(rewards)
    ends = [[5] * (length - 1) + [5 if t else END] for t in cut]
    statuses: list[VerdictStatus] = [
        "truncated" if t else "right" if r else "wrong" for r, t in zip(rewards, cut, strict=True)
    ]
    verdicts = tuple(Verdict(float(r), s, "", "", 0.0) for r, s in zip(rewards, statuses, strict=True))
    return Group(problem(j), tuple(completion(t, j, i) for i, t in enumerate(ends)), verdicts)


class Clock:
    """A clock that advances only when a fake object says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


Asked = tuple[int, tuple[str, ...], int, Sampling]
"""(seed, ids of the problems, group size, sampling) of a rollout."""


def asked_by(prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: int) -> Asked:
    return seed, tuple(prompt.problem.id for prompt in prompts), group_size, sampling


class TableRollouts:
    """The fake of engines and verifier. ``stop_at``: number of the rollout that raises Stopped."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.table = np.zeros((0, SAMPLED))
        self.version = -1
        self.calls = 0
        self.stop_at: int | None = None
        self.on_stop: Callable[[], None] = lambda: None
        self.overrule: Callable[[int, Verdict], Verdict] = lambda _call, verdict: verdict
        self.under_way: dict[int, list[Group]] = {}  # by ticket
        self.asked: dict[int, Asked] = {}  # by ticket, those under way that are not urgent
        self.collected: dict[Asked, list[Group]] = {}  # and not trained
        self.restored: dict[Asked, list[Group]] = {}  # for a rollout that asks the same

    def load(self, table: np.ndarray, version: int) -> None:
        self.table, self.version = table, version

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: int,
        rule: RefillRule | None = None,
        urgent: bool = False,
    ) -> int:
        self.calls += 1
        if not urgent:
            asked = self.asked[self.calls] = asked_by(prompts, group_size, sampling, seed)
            if asked in self.restored:
                self.under_way[self.calls] = self.restored.pop(asked)
                return self.calls
        scaled = self.table / sampling.temperature
        log_probs = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        rng = np.random.default_rng(seed)
        groups = [self._group(prompt, group_size, log_probs, sampling, rng) for prompt in prompts]
        if rule is not None:
            kept = np.cumsum([rule.keeps(group) for group in groups])
            groups = groups[: int(np.searchsorted(kept, rule.kept)) + 1]
        self.under_way[self.calls] = groups
        return self.calls

    def _group(
        self, prompt: Prompt, size: int, log_probs: np.ndarray, sampling: Sampling, rng: np.random.Generator
    ) -> Group:
        j = int(prompt.token_ids[0]) - SAMPLED
        completions, verdicts = [], []
        for sample in range(size):
            last, tokens, scores = SAMPLED + j, [], []
            while len(tokens) < sampling.max_response_tokens and (not tokens or tokens[-1] != END):
                last_log_probs = log_probs[last]
                last = int(np.searchsorted(np.exp(last_log_probs).cumsum(), rng.random() * (1 - 1e-12)))
                last = min(last, SAMPLED - 1)
                tokens.append(last)
                scores.append(last_log_probs[last])
            made = completion(
                tokens,
                j,
                sample,
                log_probs=np.array(scores, dtype=np.float32),
                versions=(VersionSpan(self.version, 0),),
            )
            right = not made.truncated and tokens[0] == 1 + j % 4
            status: VerdictStatus = "truncated" if made.truncated else "right" if right else "wrong"
            completions.append(made)
            verdicts.append(self.overrule(self.calls, verdict(status)))
        return Group(prompt, tuple(completions), tuple(verdicts))

    def wait_decoded(self, ticket: int | None = None) -> None:
        if (ticket or min(self.under_way)) == self.stop_at:
            self.on_stop()
            raise Stopped
        self.clock.now_s += 3.0

    def collect(self, ticket: int | None = None) -> tuple[list[Group], RolloutReport]:
        self.clock.now_s += 0.25
        ticket = ticket or min(self.under_way)
        groups = self.under_way.pop(ticket)
        if asked := self.asked.pop(ticket, None):
            self.collected[asked] = groups
        tokens = sum(completion.token_ids.size for group in groups for completion in group.completions)
        report = RolloutReport(3.0, (3.0, 1.5), 3.25, len(groups), tokens, 0.25, 0)
        return groups, report

    def trained(self) -> None:
        self.collected.clear()
        if not self.asked:
            self.restored.clear()

    def finished_responses(self) -> bytes:
        """Return all requested rollouts that are not trained on yet. A response is finished when it is requested."""
        under_way = {asked: self.under_way[ticket] for ticket, asked in self.asked.items()}
        finished = self.restored | self.collected | under_way
        return pickle.dumps(finished) if finished else b""

    def restore_responses(self, responses: bytes, version: int | None = None) -> None:
        for asked, groups in pickle.loads(responses).items():
            of = {span.version for group in groups for made in group.completions for span in made.versions}
            if version is None or of == {version}:
                self.restored[asked] = groups


class TablePolicy:
    """The bigram policy. Tests may call ``gradient`` alone, to see the gradient of a batch."""

    def __init__(self, problems: int, rollouts: TableRollouts, clock: Clock, lr: float = 0.3) -> None:
        self.table = torch.zeros(SAMPLED + problems, SAMPLED, dtype=torch.float64, requires_grad=True)
        self.reference = self.table.detach().clone()
        self.optimizer = torch.optim.Adam([self.table], lr=lr)
        self.rollouts = rollouts
        self.clock = clock
        self.updates: list[tuple[Batch, Objective]] = []
        self.calls: list[str] = []
        self.skip_next = False
        self.skip_at: frozenset[int] = frozenset()
        """Numbers of the updates (the first is 0) whose loss is not finite."""
        self._written = False

    def _head(
        self, row: MicroBatch, temperature: float, table: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counted = torch.from_numpy(row.loss_mask)
        logits = (self.table if table is None else table)[torch.from_numpy(row.token_ids)[counted]] / temperature
        log_probs = logits.log_softmax(-1)
        targets = torch.from_numpy(row.target_ids)[counted]
        chosen = log_probs.gather(1, targets[:, None])[:, 0]
        return chosen, -(log_probs.exp() * log_probs).sum(-1)

    def score(self, batch: Batch, temperature: float) -> TokenScores:
        self.calls.append("score")
        self.clock.now_s += 0.5
        return self._score(batch, temperature, self.table)

    def score_reference(self, batch: Batch, temperature: float) -> TokenScores:
        self.calls.append("score_reference")
        self.clock.now_s += 0.5
        return self._score(batch, temperature, self.reference)

    @torch.no_grad()
    def _score(self, batch: Batch, temperature: float, table: torch.Tensor) -> TokenScores:
        log_probs: list[np.ndarray] = [np.zeros(0, dtype=np.float32)] * batch.sample_count
        entropies = list(log_probs)
        for row in (row for rank in batch.ranks for row in rank):
            found = [values.numpy().astype(np.float32) for values in self._head(row, temperature, table)]
            sequence = np.searchsorted(row.cu_seqlens, np.flatnonzero(row.loss_mask), side="right") - 1
            for s, sample in enumerate(row.sample_index):
                log_probs[sample], entropies[sample] = (values[sequence == s] for values in found)
        return TokenScores(tuple(log_probs), tuple(entropies))

    def gradient(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Accumulate the gradient in ``table.grad``; return the objective's sums."""
        totals: dict[str, float] = {}
        for row in (row for rank in batch.ranks for row in rank):
            counted = torch.from_numpy(row.loss_mask)

            def pick(array: Any, of: torch.Tensor = counted) -> Any:
                return None if array is None else torch.from_numpy(array)[of].double()

            inputs = TokenInputs(
                pick(row.advantages),
                pick(row.engine_log_probs),
                pick(row.policy_log_probs),
                pick(row.reference_log_probs),
                pick(row.weights),
                pick(row.log_prob_gradients),
                pick(row.entropy_gradients),
            )
            loss, sums = objective(*self._head(row, objective.temperature), inputs)
            (loss / batch.token_count).backward()
            for name, value in sums.items():
                merge = max if name.startswith("max_") else lambda a, b: a + b
                totals[name] = merge(totals.get(name, 0.0), float(value))
        return totals

    def update(self, batch: Batch, objective: Objective) -> UpdateReport:
        self.calls.append("update")
        self.skip_next |= len(self.updates) in self.skip_at
        self.updates.append((batch, objective))
        self.clock.now_s += 1.0
        self.optimizer.zero_grad()
        scores = self._score(batch, objective.temperature, self.table)
        sums = self.gradient(batch, objective)
        assert self.table.grad is not None
        norm = float(self.table.grad.norm())
        skipped, self.skip_next = self.skip_next, False
        if skipped:
            return UpdateReport(
                {name: float("nan") for name in sums}, batch.token_count, float("nan"), 0.3, True, 0.9, 0.1, scores
            )
        self.optimizer.step()
        return UpdateReport(sums, batch.token_count, norm, 0.3, False, 0.9, 0.1, scores)

    def restart_optimizer(self) -> None:
        self.optimizer.state.clear()

    def hand_off(self, version: int) -> HandoffReport:
        self.calls.append("hand_off")
        self.clock.now_s += 0.25
        self.rollouts.load(self.table.detach().numpy().copy(), version)
        return HandoffReport(version, self.table.nbytes, 0.2, 0.05, 0.0, 0.0)

    def save(self, folder: Path, state: Mapping[str, Any], responses: bytes = b"") -> None:
        self.clock.now_s += 0.5
        folder.mkdir(parents=True)
        torch.save({"table": self.table, "optimizer": self.optimizer.state_dict()}, folder / "policy.pt")
        (folder / "state.json").write_text(json.dumps(state, allow_nan=False))
        if responses:
            (folder / FINISHED_RESPONSES).write_bytes(responses)
        write_manifest(folder)
        self._written = True

    def finish_save(self, wait: bool) -> float | None:
        written, self._written = self._written, False
        return 0.125 if written else None

    def load(self, folder: Path) -> Mapping[str, Any]:
        saved = torch.load(folder / "policy.pt")
        with torch.no_grad():
            self.table.copy_(saved["table"])
        self.optimizer.load_state_dict(saved["optimizer"])
        state: Mapping[str, Any] = json.loads((folder / "state.json").read_text())
        return state

    def export_hf(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "table.npy", self.table.detach().numpy())


class RiddleStream:
    """A stream of riddles 0 to n - 1, in a new order in every epoch."""

    def __init__(self, problems: int) -> None:
        self.problems = problems
        self.position = 0
        self.excluded: frozenset[str] = frozenset()
        self.mixtures: list[Sequence[int]] = []

    @property
    def left(self) -> int:
        return self.problems - len(self.excluded)

    def mix(self, repeats: Sequence[int]) -> None:
        self.mixtures.append(repeats)

    def take(self, count: int) -> list[Prompt]:
        taken: list[Prompt] = []
        while len(taken) < count:
            epoch, place = divmod(self.position, self.problems)
            prompt = problem(int(np.random.default_rng(epoch).permutation(self.problems)[place]))
            self.position += 1
            if prompt.problem.id not in self.excluded:
                taken.append(prompt)
        return taken

    def exclude(self, problem_ids: frozenset[str]) -> int:
        self.excluded |= problem_ids
        if len(self.excluded) >= self.problems:
            raise ValueError("riddles: no problem is left")
        return self.problems - len(self.excluded)

    def state(self) -> Mapping[str, Any]:
        return {"position": self.position, "excluded": sorted(self.excluded)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position, self.excluded = state["position"], frozenset(state["excluded"])


class Diary:
    """An observer and tracker that keeps all events."""

    def __init__(self) -> None:
        self.verbs: list[tuple[int, str]] = []
        self.rows: dict[int, dict[str, float]] = {}
        self.rolled: dict[int, tuple[str, Sequence[Group], Sequence[AdvantagedGroup]]] = {}
        self.scores: dict[int, TokenScores | None] = {}
        self.evaluations: dict[int, EvaluationResult] = {}
        self.resumed_at: list[int] = []
        self.alarms: list[str] = []
        self.alarmed_at: list[int] = []

    def verb_started(self, step: int, verb: str) -> None:
        self.verbs.append((step, verb))

    def rolled_out(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        kept: Sequence[AdvantagedGroup],
        scores: TokenScores | None = None,
    ) -> None:
        self.rolled[step] = (stage, groups, kept)
        self.scores[step] = scores

    def evaluated(self, step: int, result: EvaluationResult) -> None:
        self.evaluations[step] = result

    def alarmed(self, step: int, text: str) -> None:
        self.alarms.append(text)
        self.alarmed_at.append(step)

    def resumed(self, step: int) -> None:
        self.resumed_at.append(step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        row = self.rows.setdefault(step, {})
        assert not row.keys() & metrics.keys(), "two lines of one step must not overlap"
        row |= metrics

    def close(self) -> None:
        pass
