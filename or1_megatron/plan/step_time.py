"""The time of one step, by the verbs of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from or1_megatron.config.hardware import Fit, Hardware, Rates
from or1_megatron.config.schema import Config, StageConfig
from or1_megatron.plan import moves
from or1_megatron.plan.clocks import engine_clock
from or1_megatron.plan.lengths import Lengths, Moment
from or1_megatron.plan.rollout_time import RolloutTime, Workload, simulate
from or1_megatron.plan.update_time import UpdateTime, stage_work, update_time
from or1_megatron.rl.batch import split
from or1_megatron.sizing.conflicts import Device
from or1_megatron.types import Int64Array
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

    def hidden(self) -> Machine:
        """Return this machine without ``other``: the verbs that it covers count by themselves."""
        return replace(self, rates=replace(self.rates, other_response_s=0.0), covers=())


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step. Evaluations and saves count by their share of a step."""

    verbs: Mapping[str, float]
    """Seconds that the loop spends in each verb; they add up to the step."""
    rollout: RolloutTime
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
        if verb in ("roll_out", "finish_ahead"):
            idle = 1 - self.rollout.utilisation
            part = max(self.rollout.parts_s, key=lambda name: self.rollout.parts_s[name])
            spent = self.rollout.parts_s[part] / max(sum(self.rollout.parts_s.values()), 1e-9)
            tail = f"engines wait {idle:.0%} of the roll-out for its longest responses; "
            return f"{share}: {tail if idle >= 0.1 else ''}{part} take {spent:.0%} of decoding"
        if verb == "update":
            parts = {name: getattr(self.update, f"{name}_s") for name in ("compute", "bubble", "tensor", "gradients")}
            return f"{share}: mostly {max(parts, key=lambda name: parts[name])}"
        return share


def step_time(
    config: Config, machine: Machine, lengths: Lengths, when: Moment, evaluations_s: float, random: np.random.Generator
) -> StepTime:
    """Return the time of the step at ``when``. ``evaluations_s``: of one evaluation within the stage."""
    stage = config.stages[when.index]
    shape, rates = machine.shape, machine.rates
    workload = workload_at(stage, lengths, when, random)
    rollout = sample(config, machine, workload)
    sequences = kept_sequences(stage, workload, lengths.kept_share, random)
    update = update_time(config, shape, rates, sequences, stage.reuse)
    move_s = moves.state_move_s(config, shape, rates) if moves.turns(config, machine.device == "cuda") else 0.0
    copied_s, written_s = moves.save_s(config, shape, rates)
    every = config.evaluate.in_stage(stage).every_steps
    verbs = {
        "roll_out": rollout.decoded_s,
        "verify": rollout.judged_s - rollout.decoded_s,
        "score": _score_s(config, machine, sequences),
        "update": update.seconds + move_s,
        "hand_off": moves.hand_off_s(config, shape, rates) + move_s,
        "evaluate": evaluations_s / every if every else 0.0,
        "save": (copied_s + (0.0 if config.checkpoint.asynchronous else written_s)) / config.checkpoint.every_steps,
        OTHER: rates.other_response_s * workload.response_tokens.size,
    }
    verbs = {name: spent for name, spent in verbs.items() if spent and name not in machine.covers}
    if config.rollout.max_staleness:
        sampling = verbs.pop("roll_out") + verbs.pop("verify", 0.0)
        verbs["finish_ahead"] = max(0.0, sampling - verbs["update"] - verbs.get("score", 0.0))
    return StepTime(verbs, rollout, update, int(workload.response_tokens.sum()))


def sample(config: Config, machine: Machine, workload: Workload) -> RolloutTime:
    """Return the time of a roll-out of ``workload``."""
    clock = engine_clock(config, machine.shape, machine.rates)
    return simulate(workload, clock, config.rollout.engines, config.verify.workers, machine.rates.verdict_s)


def workload_at(stage: StageConfig, lengths: Lengths, when: Moment, random: np.random.Generator) -> Workload:
    prompts = stage.prompts_per_step + stage.refill_prompts
    asked, answers = lengths.draw(when, prompts, stage.group_size, stage.max_response_tokens, random)
    if not stage.refill_prompts:
        return Workload(asked, answers, stage.group_size)
    kept = tuple(bool(one) for one in random.random(prompts) < lengths.kept_share)
    return Workload(asked, answers, stage.group_size, kept, stage.prompts_per_step)


def kept_sequences(
    stage: StageConfig, workload: Workload, kept_share: float, random: np.random.Generator
) -> list[Int64Array]:
    """Return the sequences' lengths of each mini-batch, of the groups that are kept."""
    count = max(1, round(stage.prompts_per_step * (1 if stage.refill_prompts else kept_share)))
    chosen = np.sort(random.permutation(len(workload.prompt_tokens))[:count]).tolist()
    whole = workload.prompt_tokens[:, None] + workload.response_tokens.reshape(-1, workload.group_size)
    parts: Sequence[list[int]] = split(chosen, stage.prompts_per_step // stage.prompts_per_update)
    return [whole[part].ravel() for part in parts]


def _score_s(config: Config, machine: Machine, mini_batches: list[Int64Array]) -> float:
    """Return the seconds of the forward passes before the update: pi_k's log-probs where there are several SGD steps,
    and a reference's. At the update's speed, without communication."""
    forwards = (len(mini_batches) > 1) + (config.algorithm.kl.reference is not None)
    forwards += config.algorithm.entropy.estimate == "full" and len(mini_batches) == 1
    if not forwards:
        return 0.0
    lengths = np.concatenate(mini_batches).astype(np.float64)
    works = stage_work(config.parallel, machine.shape)
    operations = sum(
        (work.layer_token + work.head_token) * lengths.sum() + work.pair * np.square(lengths).sum() for work in works
    )
    speed = machine.rates.bf16_flops * machine.rates.update_share * config.parallel.ranks
    return float(forwards * operations / speed)
