"""The time of one step, by the verbs of the loop."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from or1_megatron.config.hardware import Fit, Hardware, Rates
from or1_megatron.config.schema import AdvantageConfig, Config, StageConfig
from or1_megatron.plan.clocks import engine_clock, hand_off_s
from or1_megatron.plan.lengths import Lengths, Moment
from or1_megatron.plan.rollout_time import Workload, simulate
from or1_megatron.plan.update_time import UpdateTime, stage_work, update_time
from or1_megatron.rl.batch import split
from or1_megatron.rl.supply import Supply
from or1_megatron.rollout.simulated_engine import PARTS
from or1_megatron.rollout.simulation import SimulatedRollouts
from or1_megatron.sizing.conflicts import Device
from or1_megatron.sizing.memory import offloaded_bytes
from or1_megatron.sizing.storage import checkpoint_bytes
from or1_megatron.types import Group, Int64Array, Prompt, RolloutReport
from or1_megatron.weights.shape import Shape

OTHER = "other"
"""What the hardware's fit counts per response, beside the verbs."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is made for."""

    shape: Shape
    rates: Rates
    covers: tuple[str, ...]
    """Verbs that ``other`` holds already."""
    device: Device = "cuda"

    @classmethod
    def of(cls, hardware: Hardware, shape: Shape, device: Device) -> Machine:
        fit: Fit = hardware.fit_for(shape.parameters)
        rates = hardware.rates(shape.parameters)
        return cls(shape, rates, fit.covers if rates.other_response_s else (), device)

    def engines(self, config: Config, workload: Workload) -> SimulatedRollouts:
        """Return the engines and verifiers of ``config``, which will sample ``workload``."""
        clock = engine_clock(config, self.shape, self.rates)
        return workload.on(clock, config.rollout.engines, config.verify.workers, self.rates.verdict_s)

    def hidden(self) -> Machine:
        """Return this machine without ``other``: the verbs that it covers count by themselves."""
        return replace(self, rates=replace(self.rates, other_response_s=0.0), covers=())


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step. Evaluations and saves count by their share of a step."""

    verbs: Mapping[str, float]
    """Seconds that the loop spends in each verb; they add up to the step."""
    engine_s: float
    """Seconds in which an engine works, mean over engines."""
    idle_share: float
    """Share of the rollout (with stale rollouts: of the step) in which an engine has nothing to do, mean over them."""
    parts_s: Mapping[str, float]
    """Seconds of all engines together, by what they are spent on (PARTS)."""
    preempted: int
    """Responses that gave up their place in an engine's KV cache."""
    update: UpdateTime
    response_tokens: int

    @property
    def seconds(self) -> float:
        return sum(self.verbs.values())

    @property
    def binds(self) -> str:
        """What takes the most time, in words."""
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


def step_time(
    config: Config, machine: Machine, lengths: Lengths, when: Moment, evaluations_s: float, random: np.random.Generator
) -> StepTime:
    """Return the time of the step at ``when``, the mean over as many as it takes to tell.

    ``evaluations_s``: of one evaluation within the stage; the engines sample nothing else meanwhile.
    """
    return _Steps(config, machine, lengths, when, random).run(evaluations_s)


class _Prompts:
    """The stream of a plan: numbered prompts in order, which are neither mixed nor filtered."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts, self._taken = prompts, 0

    @property
    def left(self) -> int:
        return len(self._prompts) - self._taken

    def take(self, count: int) -> list[Prompt]:
        self._taken += count
        return list(self._prompts[self._taken - count : self._taken])

    def mix(self, repeats: Sequence[int]) -> None:
        raise NotImplementedError

    def exclude(self, problem_ids: frozenset[str]) -> int:
        raise NotImplementedError

    def state(self) -> Mapping[str, Any]:
        return {"taken": self._taken}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._taken = state["taken"]


class _Steps:
    """Steps of one stage, made of the run's scheduler and supply, with clocks for what takes time.

    One step is simulated where steps are synchronous; with staleness four steps after those in which engines' queues
    fill.
    """

    def __init__(
        self, config: Config, machine: Machine, lengths: Lengths, when: Moment, random: np.random.Generator
    ) -> None:
        self.config, self.machine, self.stage, self.random = config, machine, config.stages[when.index], random
        stage = self.stage
        self.ahead = config.rollout.max_staleness if stage.plateau is None else min(1, config.rollout.max_staleness)
        self.warm_up, self.counted = (self.ahead + 2, 4) if self.ahead else (0, 1)
        prompts = (self.warm_up + self.counted + self.ahead) * (stage.prompts_per_step + stage.refill_prompts)
        drawn = lengths.draw(when, prompts, stage.group_size, stage.max_response_tokens, random)
        refill = bool(stage.refill_prompts)
        kept = tuple(bool(one) for one in random.random(prompts) < lengths.kept_share) if refill else ()
        self.kept_share = 1.0 if refill else lengths.kept_share
        self.workload = Workload(*drawn, stage.group_size, kept)
        self.rollouts = machine.engines(config, self.workload)
        self.supply = Supply(_Prompts(self.workload.prompts), self.rollouts, AdvantageConfig(), 0)
        self.supply.rejected_share = 1 - lengths.kept_share

    def run(self, evaluations_s: float) -> StepTime:
        """Return the mean of the counted steps."""
        for step in range(self.warm_up):
            self._step(step, evaluations_s)
        total, busy_s, tokens, before = dict[str, float](), 0.0, 0, self._work()
        for step in range(self.warm_up, self.warm_up + self.counted):
            verbs, update, report = self._step(step, evaluations_s)
            total = {name: total.get(name, 0.0) + spent / self.counted for name, spent in verbs.items()}
            busy_s += float(np.mean(report.engine_busy_s)) / self.counted
            tokens += report.response_tokens
        shown = {name: spent for name, spent in total.items() if spent and name not in self.machine.covers}
        period_s = sum(shown.values()) if self.ahead else total["roll_out"]
        preempted, *parts_s = (self._work() - before) / self.counted
        return StepTime(
            verbs=shown,
            engine_s=busy_s,
            idle_share=1 - busy_s / period_s if period_s else 0.0,
            parts_s=dict(zip(PARTS, parts_s, strict=True)),
            preempted=round(preempted),
            update=update,
            response_tokens=tokens // self.counted,
        )

    def _work(self) -> NDArray[np.float64]:
        """Return preempted responses, and seconds by PARTS, of all engines up to now."""
        return np.sum([[engine.preempted, *engine.parts] for engine in self.rollouts.engines], axis=0)

    def _step(self, step: int, evaluations_s: float) -> tuple[dict[str, float], UpdateTime, RolloutReport]:
        rollouts, supply, began_s = self.rollouts, self.supply, self.rollouts.now_s
        if not supply.asked:
            supply.ask(supply.take(self.stage), self.stage, step)
        supply.ask_ahead(self.stage, range(step + supply.asked, step + self.ahead + 1))
        rollouts.wait_decoded()
        decoded_s = rollouts.now_s
        groups, report = supply.collect()
        judged_s = rollouts.now_s
        supply.ask_ahead(self.stage, range(step + supply.asked + 1, step + self.ahead + 1))
        verbs, update = self._trainer(groups, evaluations_s)
        waits = {"roll_out": decoded_s - began_s, "verify": judged_s - decoded_s}
        paused = ("hand_off", "evaluate")
        counting = {name: spent for name, spent in verbs.items() if name not in self.machine.covers}
        rollouts.spend(sum(spent for name, spent in counting.items() if name not in paused))
        rollouts.hand_off(step + 1, sum(counting.get(name, 0.0) for name in paused))
        return waits | verbs, update, report

    def _trainer(self, groups: Sequence[Group], evaluations_s: float) -> tuple[dict[str, float], UpdateTime]:
        """Return the seconds of the verbs after ``verify``; of a save those of its copy to the host alone."""
        config, shape, rates = self.config, self.machine.shape, self.machine.rates
        chosen = [number for group in groups if self._trained(number := int(group.prompt.problem.id))]
        sequences = kept_sequences(self.stage, self.workload.sequences[chosen], self.kept_share, self.random)
        update = update_time(config, shape, rates, sequences, self.stage.reuse)
        leaves = self.machine.device == "cuda" and config.trainer_leaves
        move_s = offloaded_bytes(config, shape) / rates.host_bytes_per_s if leaves else 0.0
        copied_s = checkpoint_bytes(config, shape) / config.parallel.ranks / rates.host_bytes_per_s
        every = config.evaluate.in_stage(self.stage).every_steps
        return {
            "score": _score_s(config, self.machine, sequences),
            "update": update.seconds + move_s,
            "hand_off": hand_off_s(config, shape, rates) + move_s,
            "evaluate": evaluations_s / every if every else 0.0,
            "save": copied_s / config.checkpoint.every_steps,
            OTHER: rates.other_response_s * len(groups) * self.stage.group_size,
        }, update

    def _trained(self, number: int) -> bool:
        return not self.workload.kept or self.workload.kept[number]


def sample(config: Config, machine: Machine, workload: Workload) -> tuple[float, float]:
    """Return the seconds of a rollout of ``workload``: until its last response, and until its last verdict."""
    return simulate(workload, machine.engines(config, workload))


def workload_at(stage: StageConfig, lengths: Lengths, when: Moment, random: np.random.Generator) -> Workload:
    """Return what one rollout samples; with refill as many prompts as are needed on average."""
    prompts = min(math.ceil(stage.prompts_per_step / lengths.kept_share), stage.prompts_per_step + stage.refill_prompts)
    return Workload(*lengths.draw(when, prompts, stage.group_size, stage.max_response_tokens, random), stage.group_size)


def kept_sequences(
    stage: StageConfig, sequences: Int64Array, kept_share: float, random: np.random.Generator
) -> list[Int64Array]:
    """Return the sequences' lengths of each mini-batch, of the groups that are kept.

    ``sequences``: tokens of prompt and response, [groups, group_size].
    """
    count = max(1, round(len(sequences) * kept_share))
    chosen = np.sort(random.permutation(len(sequences))[:count]).tolist()
    parts: Sequence[list[int]] = split(chosen, stage.prompts_per_step // stage.prompts_per_update)
    return [sequences[part].ravel() for part in parts]


def _score_s(config: Config, machine: Machine, mini_batches: list[Int64Array]) -> float:
    """Return the seconds of the forward passes before the update: pi_k's log-probs where there are several SGD steps,
    and a reference's. At the update's speed, without communication."""
    forwards = (len(mini_batches) > 1) + (config.algorithm.kl.reference is not None)
    if not forwards:
        return 0.0
    lengths = np.concatenate(mini_batches).astype(np.float64)
    works = stage_work(config.parallel, machine.shape)
    operations = sum(
        (work.layer_token + work.head_token) * lengths.sum() + work.pair * np.square(lengths).sum() for work in works
    )
    speed = machine.rates.bf16_flops * machine.rates.update_share * config.parallel.ranks
    return float(forwards * operations / speed)
