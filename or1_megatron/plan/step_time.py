"""Predicts the time of one rollout step by the loop's verbs (rollout, update, handoff, ...), with their overlap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from or1_megatron.config.hardware import Fit, Hardware, Rates
from or1_megatron.config.schema import Config
from or1_megatron.plan.engines import PARTS, PlannedEngines
from or1_megatron.plan.lengths import Lengths, Moment
from or1_megatron.plan.rollout_time import engine_clock, hand_off_s
from or1_megatron.plan.update_time import UpdateTime, stage_work, update_time
from or1_megatron.rl.batch import split
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.memory import offloaded_bytes
from or1_megatron.sizing.storage import checkpoint_bytes
from or1_megatron.types import Int64Array
from or1_megatron.weights.shape import Shape

OTHER = "other"
"""Name of the time outside of all verbs. The hardware file gives this time per response."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The lengths of a rollout's prompts and responses."""

    prompt_tokens: Int64Array  # [prompts]
    response_tokens: Int64Array  # [prompts * group_size], group by group
    group_size: int

    @property
    def sequences(self) -> Int64Array:
        """Tokens of prompt plus response, [prompts, group_size]."""
        return self.prompt_tokens[:, None] + self.response_tokens.reshape(-1, self.group_size)


@dataclass(frozen=True, slots=True)
class Machine:
    """The model shape and the device's rates, from which times are predicted."""

    shape: Shape
    rates: Rates
    covers: tuple[str, ...]
    """Verbs whose time the hardware's ``other_response_s`` includes."""
    device: Device = "cuda"

    @classmethod
    def of(cls, hardware: Hardware, shape: Shape, device: Device) -> Machine:
        experts = shape.experts is not None
        fit: Fit = hardware.fit_for(shape.parameters, experts)
        rates = hardware.rates(shape.parameters, experts)
        return cls(shape, rates, fit.covers if rates.other_response_s else (), device)

    def engines(self, config: Config) -> PlannedEngines:
        """Return simulated engines and verifiers of ``config``."""
        clock = engine_clock(config, self.shape, self.rates)
        return PlannedEngines(clock, config.rollout.engines, config.verify.workers, self.rates.verdict_s)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Predicted time of one step. Evaluations and saves add their average time per step."""

    verbs: Mapping[str, float]
    """Seconds that the loop spends in each verb; their sum is the step's time."""
    engine_s: float
    """Seconds in which an engine works (mean over engines)."""
    idle_share: float
    """Share of the rollout's time (with ``max_staleness``: of the step's time) in which an engine is idle (mean)."""
    parts_s: Mapping[str, float]
    """Seconds of all engines together, by PARTS."""
    update: UpdateTime
    response_tokens: int

    @property
    def seconds(self) -> float:
        return sum(self.verbs.values())

    @property
    def binds(self) -> str:
        """The part that takes the most time in the step, in words."""
        verb = max(self.verbs, key=lambda name: self.verbs[name])
        share = f"{verb}, {self.verbs[verb] / self.seconds:.0%} of the step"
        if verb == "roll_out":
            part = max(self.parts_s, key=lambda name: self.parts_s[name])
            spent = self.parts_s[part] / max(sum(self.parts_s.values()), 1e-9)
            tail = f"engines wait {self.idle_share:.0%} of the time for the longest responses; "
            return f"{share}: {tail if self.idle_share >= 0.1 else ''}{part} take {spent:.0%} of decoding"
        if verb == "update":
            parts = {name: getattr(self.update, f"{name}_s") for name in ("compute", "bubble", "tensor", "gradients")}
            return f"{share}: mostly {max(parts, key=lambda name: parts[name])}"
        return share


class Steps:
    """Simulates steps of one stage from ``when`` on, to predict the time of a step.

    One step is counted. With ``max_staleness`` four steps are counted, after uncounted steps in which the engines'
    queues fill. ``evaluations_s``: seconds of one evaluation within the stage, in which engines sample nothing else.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        lengths: Lengths,
        when: Moment,
        evaluations_s: float,
        random: np.random.Generator,
    ) -> None:
        self.config, self.machine, self.stage = config, machine, config.stages[when.index]
        self.lengths, self.when, self.evaluations_s, self.random = lengths, when, evaluations_s, random
        ahead = config.rollout.max_staleness
        self.ahead = ahead if self.stage.plateau is None else min(1, ahead)
        self.warm_up, self.counted = (self.ahead + 2, 4) if self.ahead else (0, 1)
        self.engines = machine.engines(config)
        self.requested: list[tuple[int, Workload]] = []

    def mean(self) -> StepTime:
        """Simulate all steps, and return the mean time of the counted steps."""
        for _ in range(self.warm_up):
            self._step()
        total, tokens, before = dict[str, float](), 0, self.engines.parts_s()
        for _ in range(self.counted):
            verbs, update, sampled = self._step()
            total = {name: total.get(name, 0.0) + spent / self.counted for name, spent in verbs.items()}
            tokens += sampled
        shown = {name: spent for name, spent in total.items() if spent and name not in self.machine.covers}
        period_s = sum(shown.values()) if self.ahead else total["roll_out"]
        parts_s = (self.engines.parts_s() - before) / self.counted
        busy_s = float(parts_s.sum()) / self.config.rollout.engines
        return StepTime(
            verbs=shown,
            engine_s=busy_s,
            idle_share=1 - busy_s / period_s if period_s else 0.0,
            parts_s=dict(zip(PARTS, parts_s.tolist(), strict=True)),
            update=update,
            response_tokens=tokens // self.counted,
        )

    def _request_rollouts(self, count: int) -> None:
        """Start rollouts until ``count`` are under way. With refill, each has as many prompts as needed, on average."""
        stage, prompts = self.stage, self.stage.prompts_per_step
        if stage.refill_prompts:
            prompts = min(math.ceil(prompts / self.lengths.kept_share), prompts + stage.refill_prompts)
        while len(self.requested) < count:
            drawn = self.lengths.draw(self.when, prompts, stage.group_size, stage.max_response_tokens, self.random)
            made = Workload(*drawn, stage.group_size)
            ticket = self.engines.request(made.prompt_tokens, made.response_tokens, made.group_size)
            self.requested.append((ticket, made))

    def _step(self) -> tuple[dict[str, float], UpdateTime, int]:
        """Simulate a step; return the seconds of its verbs, the time of its update, and its response tokens."""
        engines, began_s = self.engines, self.engines.now_s
        self._request_rollouts(1 + self.ahead)
        ticket, made = self.requested.pop(0)
        tail_s = engines.wait(ticket)
        waits = {"roll_out": engines.now_s - began_s, "verify": tail_s}
        engines.spend(tail_s)
        self._request_rollouts(self.ahead)
        verbs, update = self._trainer(made)
        paused = ("hand_off", "evaluate")
        counting = {name: spent for name, spent in verbs.items() if name not in self.machine.covers}
        engines.spend(sum(spent for name, spent in counting.items() if name not in paused))
        engines.pause(sum(counting.get(name, 0.0) for name in paused))
        return waits | verbs, update, int(made.response_tokens.sum())

    def _trainer(self, made: Workload) -> tuple[dict[str, float], UpdateTime]:
        """Return (seconds of the verbs after ``verify``, the update's time). A save costs only its copy to host."""
        config, shape, rates = self.config, self.machine.shape, self.machine.rates
        sequences = self._kept(made.sequences)
        update = update_time(config, shape, rates, sequences, self.stage.reuse)
        leaves = self.machine.device == "cuda" and config.trainer_leaves
        move_s = offloaded_bytes(config, shape) / rates.host_bytes_per_s if leaves else 0.0
        copied_s = checkpoint_bytes(config, shape) / config.parallel.ranks / rates.host_bytes_per_s
        every = config.evaluate.in_stage(self.stage).every_steps
        return {
            "score": self._score_s(sequences),
            "update": update.seconds + move_s,
            "hand_off": hand_off_s(config, shape, rates) + move_s,
            "evaluate": self.evaluations_s / every if every else 0.0,
            "save": copied_s / config.checkpoint.every_steps,
            OTHER: rates.other_response_s * made.response_tokens.size,
        }, update

    def _kept(self, sequences: Int64Array) -> list[Int64Array]:
        """Return the sequence lengths [n] of each mini-batch, after choosing at random the groups that are kept.

        ``sequences``: tokens of prompt plus response, [groups, group_size].
        """
        count = max(1, round(len(sequences) * self.lengths.kept_share))
        chosen = np.sort(self.random.permutation(len(sequences))[:count]).tolist()
        parts: Sequence[list[int]] = split(chosen, self.stage.prompts_per_step // self.stage.prompts_per_update)
        return [sequences[part].ravel() for part in parts]

    def _score_s(self, mini_batches: list[Int64Array]) -> float:
        """Return the seconds of the forward passes before the update: for pi_k's log-probs if there are several SGD
        steps, and for a KL reference's log-probs. They run at the update's speed, without communication."""
        config, rates = self.config, self.machine.rates
        forwards = (len(mini_batches) * self.stage.reuse > 1) + (config.algorithm.kl.reference is not None)
        if not forwards:
            return 0.0
        lengths = np.concatenate(mini_batches).astype(np.float64)
        works = stage_work(config.parallel, self.machine.shape)
        operations = sum(
            (work.layer_token + work.head_token) * lengths.sum() + work.pair * np.square(lengths).sum()
            for work in works
        )
        speed = rates.bf16_flops * rates.update_share * config.parallel.ranks
        return float(forwards * operations / speed)


def sample(config: Config, machine: Machine, workload: Workload) -> tuple[float, float]:
    """Return (seconds until the last response of a rollout of ``workload``, seconds until the last verdict)."""
    engines = machine.engines(config)
    tail_s = engines.wait(engines.request(workload.prompt_tokens, workload.response_tokens, workload.group_size))
    return engines.now_s, engines.now_s + tail_s
