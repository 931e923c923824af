"""Estimates the memory of each process of a run in each phase of a step, from shapes; refuses a run that does not fit.

Without GPUs this module estimates the host memory of all processes; lab/benchmarks/host_memory.py compares the estimate
with measurements. With GPUs it estimates one GPU's memory; lab/benchmarks/plan_gpu.py measures trainer ranks
(``storage.node_memory`` estimates the host memory of a GPU node).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from or1_megatron.config.schema import HOST_ROUND_BYTES, Config, ParallelConfig
from or1_megatron.kernels.tile_sizes import allocation_plan
from or1_megatron.sizing.conflicts import Device, longest_row
from or1_megatron.sizing.kv_cache import (
    ENGINE_RESERVE_BYTES,
    TRAINER_RESERVE_BYTES,
    logits_bytes,
    shared_kv_cache_bytes,
)
from or1_megatron.weights.shape import BYTES, Shape
from or1_megatron.weights.table import DeltaNet
from or1_verify.errors import UserError

Phase = Literal["start", "rollout", "wake", "update", "handoff", "save"]
PHASES: Final[tuple[Phase, ...]] = ("start", "rollout", "wake", "update", "handoff", "save")
"""start: models are loaded; rollout: engines decode; wake: engines sleep and the trainer's weights return to the GPU;
update: SGD steps; handoff: weights are sent to the engines; save: a checkpoint's copy is made."""
_MIB: Final = 1 << 20
_LAUNCHER_BYTES: Final = 220 * _MIB
_RANK_BYTES: Final = 430 * _MIB
_LOOP_BYTES: Final = 116 * _MIB
_ENGINE_BYTES: Final = 600 * _MIB
_MANAGER_BYTES: Final = 74 * _MIB
_VERIFIER_BYTES: Final = 51 * _MIB
_RAY_BYTES: Final = 421 * _MIB
"""Host memory of a process without a model, libraries included, by kind of process."""
_LOOP_RESPONSE_BYTES: Final = 28 << 10
_MANAGER_RESPONSE_BYTES: Final = 4 << 10
"""Host memory of the loop and the manager per response of a step, measured on responses of a few dozen tokens."""
_LOGITS_COPIES: Final = 4.25
"""Number of fp32 copies of all running responses' logits that vLLM's sampler holds at once on CPU: logits (1),
log-probs (1) and, to count each token's rank, comparisons of log-probs (0.25) and their 64-bit copy (2)."""
_SHOWN_BYTES: Final = 10 * _MIB
_START: Final[frozenset[Phase]] = frozenset({"start"})
_UPDATE: Final[frozenset[Phase]] = frozenset({"update"})
_HANDOFF: Final[frozenset[Phase]] = frozenset({"handoff"})
_AFTER_START: Final[frozenset[Phase]] = frozenset(PHASES) - _START
ENGINE: Final = "engine"
LOOP: Final = "rank 0, for the loop and Ray's driver"
"""Name of the memory that rank 0 needs in addition to a trainer rank's memory."""
STATE: Final = "weights, gradients, optimizer"
"""Name of the part of a trainer rank's memory that does not depend on the batch."""


class NotEnoughMemory(UserError, RuntimeError):
    """The run is estimated to need more memory than the machine has."""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The memory of each of ``count`` equal processes, in bytes by part."""

    process: str
    count: int
    parts: Mapping[str, int]
    when: Mapping[str, frozenset[Phase]] = field(default_factory=dict)
    """The phases in which a part is held; a part without an entry is held in all phases."""

    def at(self, phase: Phase) -> int:
        return sum(size for name, size in self.parts.items() if name not in self.when or phase in self.when[name])

    @property
    def peak_bytes(self) -> int:
        """Bytes of one process in the phase in which it holds most."""
        return max(map(self.at, PHASES))

    def __str__(self) -> str:
        parts = [f"{name} {gib(size)}" for name, size in self.parts.items() if size >= _SHOWN_BYTES]
        return f"{self.count:,} x {gib(self.peak_bytes)}" + (f" ({', '.join(parts)})" if len(parts) > 1 else "")


@dataclass(frozen=True, slots=True)
class StageWeights:
    """Number of weights that one rank of a pipeline stage holds."""

    dense: int
    experts: int
    copied: int
    """The part of ``dense`` that is the last stage's copy of the tied embedding, which checkpoints leave out."""
    adapters: tuple[int, int] | None = None
    """With LoRA: (weights of dense linears' adapters, weights of experts' adapters); no others are trained."""

    @property
    def held(self) -> int:
        return self.dense + self.experts + sum(self.adapters or ())

    @property
    def trained(self) -> tuple[int, int]:
        """Numbers of the weights that are trained: (weights outside of experts, weights of experts)."""
        return self.adapters or (self.dense, self.experts)


def process_memory(config: Config, shape: Shape, device: Device) -> tuple[ProcessMemory, ...]:
    """Return the memory of one node's processes ("cpu"), or of a GPU of each pipeline stage and engine ("cuda")."""
    return tuple(_on_gpu(config, shape) if device == "cuda" else _on_host(config, shape))


def needed(config: Config, processes: Sequence[ProcessMemory], device: Device) -> int:
    """Return the bytes of memory that one GPU ("cuda") or the host ("cpu") needs, in the phase that needs most.

    A GPU holds a trainer rank and a colocated engine; the host holds all processes.
    """
    return max(phase_bytes(config, processes, device, phase) for phase in PHASES)


def phase_bytes(config: Config, processes: Sequence[ProcessMemory], device: Device, phase: Phase) -> int:
    """Return the bytes that the fullest GPU ("cuda") or the host ("cpu") holds in one phase."""
    if device == "cpu":
        return sum(process.count * process.at(phase) for process in processes)
    engine = max((held.at(phase) for held in processes if held.process == ENGINE), default=0)
    trainer = max((held.at(phase) for held in processes if held.process != ENGINE), default=0)
    return trainer + engine if config.rollout.placement == "colocated" else max(trainer, engine)


def memory_short(config: Config, shape: Shape, device: Device, there: int) -> str:
    """Return an error text if ``config`` needs more than ``there`` bytes, else an empty text. ``there`` is the host's
    free memory, or a GPU's whole memory."""
    processes = process_memory(config, shape, device)
    if (wanted := needed(config, processes, device)) <= there:
        return ""
    has = "a GPU has" if device == "cuda" else "this machine has free"
    lines = [f"the run needs about {gib(wanted)} of memory, and {has} {gib(there)}:"]
    lines += [f"  - {process.process}: {process}" for process in processes]
    lighter = [f"{setting} saves {gib(saved)}" for setting, saved in _savings(config, shape, device)[:3]]
    lighter.append("raise parallel.tensor or pipeline" if device == "cuda" else "take a smaller model")
    lighter.append("or start all the same with cluster.check_memory=false")
    return "\n".join([*lines, "; ".join(lighter)])


def _savings(config: Config, shape: Shape, device: Device) -> list[tuple[str, int]]:
    """Return settings that would lower the needed memory, each with the bytes that it saves, the largest first."""
    before = needed(config, process_memory(config, shape, device), device)
    longest = longest_row(config)
    savings = []
    for section, key, value in (
        ("checkpoint", "asynchronous", False),
        ("rollout", "engines", 1),
        ("rollout", "max_concurrent", max(1, config.rollout.max_concurrent // 4)),
        ("parallel", "micro_batch_tokens", longest * 3 // 2),
        ("parallel", "recompute", "full"),
    ):
        changed = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
        saved = before - needed(changed, process_memory(changed, shape, device), device)
        if saved >= _SHOWN_BYTES:
            savings.append((f"{section}.{key}={str(value).lower()}", saved))
    return sorted(savings, key=lambda saving: -saving[1])


def gib(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GiB"


def stage_weights(parallel: ParallelConfig, shape: Shape) -> tuple[StageWeights, ...]:
    """Return the number of weights that a rank of each pipeline stage holds, with embedding and output layer."""
    vocabulary, weights = shape.vocab * shape.hidden, []
    for stage, layers in enumerate(parallel.stage_layers(shape.layers)):
        first, last = stage == 0, stage == parallel.pipeline - 1
        copied = vocabulary if last and shape.tied and not first else 0
        output = copied if shape.tied else vocabulary * last
        experts = shape.expert_parameters(layers)
        dense = sum(map(shape.layer_parameters, layers)) - experts + vocabulary * first + output + shape.hidden * last
        weights.append(
            StageWeights(
                _cut(dense, parallel.tensor),
                _cut(experts, parallel.tensor * parallel.expert),
                _cut(copied, parallel.tensor),
                _stage_adapters(parallel, shape, layers) if shape.adapters else None,
            )
        )
    return tuple(weights)


def _stage_adapters(parallel: ParallelConfig, shape: Shape, layers: Collection[int]) -> tuple[int, int]:
    """Return two numbers of a rank's weights: (in the adapters of dense linears, in the adapters of experts)."""
    dense, experts = 0, 0
    for (layer, of_expert, cut), count in shape.adapters.items():
        if layer in layers:
            part = _cut(count, (parallel.tensor if cut else 1) * (parallel.expert if of_expert else 1))
            dense, experts = (dense, experts + part) if of_expert else (dense + part, experts)
    return dense, experts


def fullest_stage(parallel: ParallelConfig, shape: Shape) -> StageWeights:
    """Return the number of weights that a rank holds in the pipeline stage with the most weights."""
    return max(stage_weights(parallel, shape), key=lambda stage: stage.held)


def offloaded_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes that a rank copies to host memory and back: weights and optimizer state, but no gradients."""
    weights = fullest_stage(config.parallel, shape)
    own, optimizer = BYTES[config.model.dtype], _optimizer_bytes(config) / config.parallel.optimizer_ranks
    return int(weights.held * own + sum(weights.trained) * optimizer)


def state_bytes(config: Config, weights: StageWeights) -> int:
    """Return the bytes of a rank's weights, gradients and optimizer state.

    The weights include those of a KL reference. Only trained weights have fp32 gradients and optimizer state. A rank
    holds 1 / ``optimizer_ranks`` of the fp32 master weights (only for bf16) and of two fp32 moments.
    """
    own, reference = BYTES[config.model.dtype], weights.dense + weights.experts if config.loads_reference else 0
    total = (weights.held + reference) * own + 4 * sum(weights.trained)
    return total + _shards(config, *weights.trained) * _optimizer_bytes(config)


def activation_bytes(config: Config, shape: Shape, stage: int, device: Device) -> int:
    """Return the bytes of activations that a rank of pipeline stage ``stage`` holds, over all micro-batches in flight.

    A micro-batch is a packed row of ``micro_batch_tokens`` tokens. A layer keeps ``layer_numbers`` numbers per token.
    The layer being computed holds all activations and as many gradients. The last stage also has the head's workspace.
    """
    parallel = config.parallel
    own = device == "cpu" or parallel.layers == "own" or config.model.dtype == "float32"
    kept, whole = (layer_numbers(parallel, shape, recompute, own) for recompute in (parallel.recompute, "none"))
    tokens = parallel.micro_batch_tokens / parallel.context
    in_flight = parallel.pipeline - stage if parallel.virtual_pipeline == 1 else parallel.pipeline
    layers = len(parallel.stage_layers(shape.layers)[stage])
    total = int(BYTES[config.model.dtype] * tokens * (kept * layers * in_flight + 2 * whole))
    if shape.delta_net is not None:
        total += 2 * delta_net_bytes(shape.delta_net, longest_row(config), parallel.tensor * parallel.context)
    return total + (_head_bytes(config, shape, device) if stage == parallel.pipeline - 1 else 0)


def delta_net_bytes(net: DeltaNet, tokens: int, cut: int) -> int:
    """Return the bytes that a layer's linear attention keeps on one of the ``cut`` ranks that divide its heads, while
    one sequence is recomputed. The counts per token and value head were fitted (tests/parallel/test_delta_net.py)."""
    return 4 * tokens * net.value_heads // cut * (13 * (net.key_head_dim + net.value_head_dim) + 290)


def layer_numbers(
    parallel: ParallelConfig, shape: Shape, recompute: Literal["none", "selective", "full"], own: bool = False
) -> float:
    """Return how many numbers (of the compute dtype) per token a layer keeps on a rank for the backward pass.

    With "none" a layer keeps the residual stream twice, both norms' outputs, queries, keys, values, attention's output,
    and the MLP's gate, up and their product; with "selective" all but the MLP's three; with "full" only the layer's
    input. Our own layers (``own``) also keep attention's output reordered, and the sines and cosines of queries and
    keys. The counts were measured on CPU in fp32. On a GPU in bf16 the estimated peak is within 6% of the measured.
    """
    hidden = shape.hidden / (parallel.tensor if parallel.sequence else 1)
    if recompute == "full":
        return hidden
    attention = sum(map(shape.attention_channels, range(shape.layers))) / shape.layers / parallel.tensor
    experts = shape.experts
    width = shape.intermediate if experts is None else experts.chosen * experts.intermediate + experts.shared
    mlp = 3 * width / parallel.tensor if recompute == "none" else 0.0
    return 4 * hidden + attention + mlp + (3 * hidden + 4 * shape.head_dim if own else 0)


def _head_bytes(config: Config, shape: Shape, device: Device) -> int:
    parallel = config.parallel
    head = allocation_plan(
        parallel.micro_batch_tokens // parallel.context,
        shape.hidden,
        _cut(shape.vocab, parallel.tensor),
        getattr(torch, config.model.dtype),
        parallel.head,
        device_type=device,
        scratch=device == "cpu",
        ranks=parallel.tensor,
    )
    return head.workspace_bytes + head.accumulator_bytes


def _on_gpu(config: Config, shape: Shape) -> Iterator[ProcessMemory]:
    """Yield the GPU memory of a rank of each pipeline stage, and of an engine, which shares the GPU if colocated."""
    leaves = config.trainer_leaves
    number = BYTES[config.model.dtype]
    for stage, weights in enumerate(stage_weights(config.parallel, shape)):
        own = weights.held * number
        parts = {
            "weights": own,
            "gradients, optimizer": state_bytes(config, weights) - own,
            "activations": activation_bytes(config, shape, stage, "cuda"),
            "reserve": TRAINER_RESERVE_BYTES,
        }
        when = {"activations": _UPDATE}
        if leaves:
            when["weights"] = frozenset({"start", "wake", "update", "handoff", "save"})
            when["gradients, optimizer"] = _UPDATE
        yield ProcessMemory(_rank(config, stage), config.parallel.ranks // config.parallel.pipeline, parts, when)
    rollout = config.rollout
    asleep = leaves and rollout.placement == "colocated"
    parts = {
        "weights": _cut(shape.parameters * number, rollout.tensor_parallel),
        "KV cache": rollout.kv_cache_bytes or shared_kv_cache_bytes(config, shape) or 0,
        "logits": logits_bytes(config, shape),
        "reserve": ENGINE_RESERVE_BYTES,
    }
    when = {"logits": frozenset({"rollout"})}
    if asleep:
        when |= {"weights": frozenset({"rollout", "handoff"}), "KV cache": frozenset({"rollout"})}
    yield ProcessMemory(ENGINE, rollout.engines * rollout.tensor_parallel, parts, when)


def _on_host(config: Config, shape: Shape) -> Iterator[ProcessMemory]:
    """Yield the memory of the run's processes on this host; with several nodes, only of the trainer's processes."""
    yield ProcessMemory("launcher", 1, {"base": _LAUNCHER_BYTES})
    ranks, buckets = config.parallel.ranks // config.parallel.pipeline, _bucket_bytes(config, shape)
    for stage, weights in enumerate(stage_weights(config.parallel, shape)):
        embedding = weights.copied if stage else _cut(shape.vocab * shape.hidden, config.parallel.tensor)
        parts = {
            STATE: state_bytes(config, weights),
            "copy for checkpoints": _checkpoint_bytes(config, weights) if config.checkpoint.asynchronous else 0,
            "activations": activation_bytes(config, shape, stage, "cpu"),
            # The whole gradient, before it is accumulated. A tied model's last stage briefly holds one of this size.
            "embedding's gradient": 0 if shape.adapters else BYTES[config.model.dtype] * embedding,
            "handoff": buckets // config.parallel.ranks,
            "base": _RANK_BYTES,
        }
        # The saver makes its copy when constructed and keeps it.
        when = {"activations": _UPDATE, "embedding's gradient": _UPDATE, "copy for checkpoints": _AFTER_START}
        when["handoff"] = _HANDOFF
        yield ProcessMemory(_rank(config, stage), ranks, parts, when)
    stages = config.stages if config.run.stage is None else config.stages[config.run.stage - 1 : config.run.stage]
    responses = max(stage.prompts_per_step * stage.group_size for stage in stages)
    routed = 2 * routed_bytes(config, shape)  # as received, and while the message that they come in is read
    parts = {"base": _LOOP_BYTES, "responses": responses * _LOOP_RESPONSE_BYTES, "routed experts": routed}
    yield ProcessMemory(LOOP, 1, parts)
    if config.cluster.nodes > 1:
        return
    yield _host_engine(config, shape)
    manager = {"base": _MANAGER_BYTES, "responses": responses * _MANAGER_RESPONSE_BYTES, "routed experts": routed}
    yield ProcessMemory("rollout manager", 1, manager)
    # A worker and its child, which is killed if a verdict takes too long. Untrusted programs have limits of their own.
    yield ProcessMemory("verifier process", 2 * config.verify.workers, {"base": _VERIFIER_BYTES})
    yield ProcessMemory("Ray", 1, {"base": _RAY_BYTES})


def routed_bytes(config: Config, shape: Shape) -> int:
    """Return the largest size in bytes of the expert ids recorded for a step's tokens; 0 without router replay."""
    if not config.rollout.router_replay or shape.experts is None:
        return 0
    experts = shape.experts
    of_token = len(experts.layers) * experts.chosen * (1 if experts.count <= 256 else 2)
    return of_token * max(
        stage.prompts_per_step * stage.group_size * (config.data.max_prompt_tokens + stage.max_response_tokens)
        for stage in config.stages
    )


def _host_engine(config: Config, shape: Shape) -> ProcessMemory:
    """Return the memory of an engine's process on the host.

    vLLM maps the weights' files to load them, and packs linear layers for oneDNN; only the output layer also keeps its
    unpacked weight. A handoff fills embeddings in place.
    """
    rollout, number = config.rollout, BYTES[config.model.dtype]
    vocabulary = _cut(shape.vocab * shape.hidden * number, rollout.tensor_parallel)
    parts = {
        "weights": _cut(shape.parameters * number, rollout.tensor_parallel),
        "weights' file": shape.parameters * number // (rollout.engines * rollout.tensor_parallel),
        "packed output layer": vocabulary,
        "handoff": _bucket_bytes(config, shape),
        "KV cache": rollout.kv_cache_bytes or 0,
        "logits": int(_LOGITS_COPIES * 4 * rollout.max_concurrent * shape.vocab),
        "base": _ENGINE_BYTES,
    }
    when = {
        "weights' file": _START,
        "packed output layer": _AFTER_START,
        "KV cache": _AFTER_START,
        "handoff": _HANDOFF,
    }
    if not rollout.max_staleness:  # else engines sample while the trainer works
        when["logits"] = frozenset({"rollout"})
    return ProcessMemory(ENGINE, rollout.engines * rollout.tensor_parallel, parts, when)


def _checkpoint_bytes(config: Config, weights: StageWeights) -> int:
    """Return the bytes of a rank's copy for checkpoints; data-parallel replicas divide weights and optimizer state."""
    parallel = config.parallel
    replicas = parallel.data * parallel.context
    dense, experts = weights.adapters or (weights.dense - weights.copied, weights.experts)
    saved = _cut(dense, replicas) + _cut(experts, replicas // parallel.expert)
    return saved * (12 if config.model.dtype == "float32" else 14)


def _bucket_bytes(config: Config, shape: Shape) -> int:
    """Return the bytes of the handoff's shared memory, divided by the number of processes that map it. The memory holds
    two buckets, or all weights if these have fewer bytes."""
    processes = config.rollout.engines * config.rollout.tensor_parallel
    buckets = 2 * min(config.handoff.bucket_bytes, HOST_ROUND_BYTES) * config.rollout.tensor_parallel
    return min(buckets, shape.parameters * BYTES[config.model.dtype]) // (1 + processes)


def _rank(config: Config, stage: int) -> str:
    return "trainer rank" if config.parallel.pipeline == 1 else f"trainer rank, pipeline stage {stage}"


def _optimizer_bytes(config: Config) -> int:
    """Return the bytes of optimizer state per parameter: two fp32 moments, and fp32 master weights for bf16."""
    return 8 + (4 if config.model.dtype == "bfloat16" else 0)


def _shards(config: Config, dense: int, experts: int) -> int:
    """Return the number of parameters that a rank's optimizer updates."""
    parallel, replicas = config.parallel, config.parallel.optimizer_ranks
    return _cut(dense, replicas) + _cut(experts, max(1, replicas // parallel.expert))


def _cut(count: int, by: int) -> int:
    return -(-count // by)
