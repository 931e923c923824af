"""The only configuration schema: typed, frozen, unknown keys refused.

Every part receives the section it needs, never the root. Defaults are the recipe's (Skywork-OR1 technical report,
arXiv 2505.22312; where its released code differs, the field says so). How files, overlays and overrides become this
object is in ``config_file``. The sections of the algorithm are in ``config_algorithm``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from or1_megatron.config.algorithm import AdvantageConfig as AdvantageConfig
from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.config.algorithm import CorrectionConfig as CorrectionConfig
from or1_megatron.config.algorithm import EntropyConfig as EntropyConfig
from or1_megatron.config.algorithm import KLConfig as KLConfig
from or1_megatron.config.algorithm import LossConfig as LossConfig
from or1_megatron.config.base import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from or1_megatron.config.stages import (
    EvaluationConfig,
    EvaluationSetConfig,
    PlateauConfig,
    StageConfig,
    StageEvaluationConfig,
    refuse_twice,
)

__all__ = [  # of other modules: those of a whole configuration are found here
    "EvaluationConfig",
    "EvaluationSetConfig",
    "PlateauConfig",
    "Section",
    "StageConfig",
    "StageEvaluationConfig",
]


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    dir: Path
    """Run folder; made if missing. A run whose folder holds checkpoints resumes from the newest."""
    seed: NonNegative = 1
    stage: Positive | None = None
    """Run this stage alone (the first is 1), in ``dir``/stage_N, from where the one before it ended. ``or1 train
    --stage N`` sets it. None: all stages, one after another."""
    previous: Path | None = None
    """With ``stage``: the previous stage's run folder, or one checkpoint in it, which is then taken for the end of that
    stage. None: ``dir``/stage_(N-1)."""

    @model_validator(mode="after")
    def _has_a_previous(self) -> Self:
        if self.previous is not None and (self.stage is None or self.stage == 1):
            raise ValueError(
                f"run.previous = {self.previous} is for a run of one stage after the first; run.stage is {self.stage}"
            )
        return self

    @property
    def folder(self) -> Path:
        """Where this run writes."""
        return self.dir if self.stage is None else self.dir / f"stage_{self.stage}"


class ModelConfig(Section):
    """The model to start from."""

    hf: Path
    """HF folder: config.json, safetensors, tokenizer with a chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of parameters. bfloat16 keeps fp32 master weights and fp32 gradient reduction."""


class SourceConfig(Section):
    """One problem set."""

    path: Path
    """A JSONL or Parquet file, a folder of them, or a Hugging Face hub id: Skywork-OR1-RL-Data's schema, JSONL of
    {prompt, answer}, AIME's or LiveCodeBench's."""
    split: str | None = None
    """Of a folder or a hub id, e.g. math or code."""
    weight: Fraction = 1.0
    """Share of its problems that take part in an epoch, others each time: 0.5 with repeat 3 is 1.5 times on average."""
    repeat: Positive = 1
    """How often each problem appears per epoch (the released mix: code 2, math 1)."""
    name: str | None = None
    """By which a stage's ``mixture`` calls it. Not set: the file's name without its ending, and the split if any."""

    @property
    def title(self) -> str:
        return self.name or (self.path.stem if self.split is None else f"{self.path.stem}_{self.split}")


class DataConfig(Section):
    train: tuple[SourceConfig, ...] = Field(min_length=1)
    max_prompt_tokens: Positive = 2048
    """Longer prompts are dropped and counted."""
    difficulty_model: str | None = None
    """Key of ``model_difficulty``: problems at which that model failed 0 or all of its 16 tries are dropped."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be used: not JSON, a missing field, a ground truth that its verifier cannot read, a problem that
    occurs twice. refuse: list them and do not start; drop: train without them and say how many, by reason."""


class OptimizerConfig(Section):
    """AdamW on fp32 master weights."""

    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegative = 0
    """SGD steps over which lr rises linearly from 0."""
    decay_steps: NonNegative = 0
    """SGD step at which lr has fallen linearly to 0, counted from the first; 0: constant, as in the recipe."""
    beta1: NonNegativeFloat = 0.9
    beta2: NonNegativeFloat = 0.999
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.01
    clip_grad: PositiveFloat = 1.0


class ParallelConfig(Section):
    """How the policy is spread over trainer ranks; data parallelism is what remains."""

    ranks: Positive = 1
    """Trainer ranks in all (torchrun processes)."""
    tensor: Positive = 1
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline stage (interleaved 1F1B); layers go round the stages this many times."""
    layers_per_stage: tuple[Positive, ...] | None = None
    """Decoder layers of each of the pipeline * virtual_pipeline chunks, in the model's order, where they are not equal:
    the first and last stages also hold the embedding and the head."""
    context: Positive = 1
    """Context parallelism: every sequence is cut zig-zag over this many ranks."""
    expert: Positive = 1
    """Expert parallelism: each layer's experts are spread over this many of the context- and data-parallel ranks."""
    sequence: bool = False
    """Sequence parallelism within the tensor-parallel group."""
    distributed_optimizer: bool = True
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass. selective: MLPs (and norms, under
    Transformer Engine), where most of the memory is; full: whole layers."""
    head: Literal["recompute", "one_pass"] = "recompute"
    """The fused head. recompute: logits are computed again in the backward pass, smallest workspace; one_pass: the
    gradient is formed in the forward pass, three products of tokens and vocabulary instead of four."""
    layers: Literal["auto", "own", "transformer_engine"] = "auto"
    """Whose linears, norms and attention. auto: Transformer Engine's on a GPU where it is installed, else ours."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the last micro-batch's backward pass still runs."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass instead of in the step; pays only where one follows at
    once (N_SGD > 1), since a handoff waits for them. Needs distributed_optimizer and overlap_grad_reduce."""
    overlap_tensor: bool = False
    """Overlap tensor parallelism's communication with the products around it (Transformer Engine's userbuffers). Needs
    its layers and sequence parallelism, and pads every row to micro_batch_tokens."""
    offload: Literal["auto", "always", "never"] = "auto"
    """Move optimizer state and gradients to the host before the engines wake, and parameters once they are handed over.
    auto: where engines take turns with the trainer on its GPUs."""
    micro_batch_tokens: Positive = 8192
    """Token budget of one packed micro-batch row; never below the longest prompt + response."""
    threads_per_rank: Positive | None = None
    """CPU only: torch threads per rank; by default the cores divided by the ranks."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        model_parallel = self.tensor * self.pipeline * self.context
        if self.ranks % model_parallel:
            raise ValueError(
                f"parallel: ranks = {self.ranks} is not a multiple of tensor * pipeline * context = "
                f"{self.tensor} * {self.pipeline} * {self.context} = {model_parallel}"
            )
        if (self.context * self.data) % self.expert:
            raise ValueError(
                f"parallel: expert = {self.expert} does not divide context * data parallelism = {self.context} * "
                f"{self.data}; experts are spread over these ranks"
            )
        if self.sequence and self.tensor == 1:
            raise ValueError("parallel: sequence needs tensor > 1 (sequence parallelism splits within the TP group)")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"parallel: virtual_pipeline = {self.virtual_pipeline} needs pipeline > 1 (it interleaves stages)"
            )
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("parallel: overlap_param_gather needs distributed_optimizer and overlap_grad_reduce")
        if self.overlap_tensor and not self.sequence:
            raise ValueError("parallel: overlap_tensor needs sequence (and tensor > 1): there is nothing to overlap")
        if self.overlap_tensor and self.layers == "own":
            raise ValueError("parallel: overlap_tensor needs Transformer Engine's layers; layers is 'own'")
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.chunks:
            raise ValueError(
                f"parallel: layers_per_stage has {len(self.layers_per_stage)} numbers; expected one for each of the "
                f"pipeline * virtual_pipeline = {self.pipeline} * {self.virtual_pipeline} = {self.chunks} chunks"
            )
        return self

    @property
    def chunks(self) -> int:
        """Pieces into which the pipeline cuts the model: PP * VPP."""
        return self.pipeline * self.virtual_pipeline

    def chunk_layers(self, layers: int) -> tuple[range, ...]:
        """The decoder layers of each chunk, in the model's order; chunk i lies on pipeline stage i % PP.

        Raises:
            ValueError: a model of ``layers`` layers cannot be cut so.
        """
        sizes = self.layers_per_stage
        if sizes is None:
            if layers % self.chunks:
                raise ValueError(
                    f"parallel.pipeline * virtual_pipeline = {self.pipeline} * {self.virtual_pipeline} = {self.chunks} "
                    f"does not divide the model's num_hidden_layers = {layers}; choose another, or say in "
                    "parallel.layers_per_stage how many layers each chunk has"
                )
            sizes = (layers // self.chunks,) * self.chunks
        if sum(sizes) != layers:
            raise ValueError(
                f"parallel.layers_per_stage = {list(sizes)} holds {sum(sizes)} layers; the model's num_hidden_layers "
                f"is {layers}"
            )
        ends = list(itertools.accumulate(sizes))
        return tuple(range(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline * self.context)


class RolloutConfig(Section):
    """The inference engines."""

    engines: Positive = 1
    tensor_parallel: Positive = 1
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: engines take turns with the trainer on its devices; separate: devices of their own."""
    max_concurrent: Positive = 256
    """Responses that one engine decodes at once."""
    kv_cache_bytes: Positive | None = None
    """KV cache per engine; required on CPU. On GPU None lets vLLM take gpu_memory_fraction."""
    gpu_memory_fraction: Fraction = 0.85
    threads_per_engine: Positive = 1
    """CPU only: OpenMP threads per engine."""
    start_timeout_s: PositiveFloat = 600.0
    max_engine_restarts: NonNegative = 2
    """How often each engine is started again when it dies, before its death ends the run."""
    old_kv_cache: Literal["recompute", "keep"] = "recompute"
    """Of responses in flight over a handoff. recompute: the new weights read them anew; keep: the old weights' keys and
    values stay, which is cheaper, and what follows is sampled from no version's model."""
    step_timeout_s: PositiveFloat = 7200.0
    """A roll-out that takes longer ends the run, naming the requests that are still out."""
    max_staleness: Literal[0, 1] = 0
    """By how many steps the weights that sampled a response may be older than those it trains. 1: the next step is
    sampled while this one trains."""


class VerifyConfig(Section):
    workers: Positive = 1
    """Verifier actors."""
    timeout_s: PositiveFloat = 5.0
    """Hard limit for one verdict; the worker is killed and replaced."""
    max_error_fraction: Fraction = 0.05
    """A step in which more of the verdicts than this are ``error`` stops the run."""
    custom: dict[str, str] = Field(default_factory=dict)
    """Ability: a verifier of your own, as package.module:name or an entry point of group or1_megatron.verifiers."""
    early_stop: bool = True
    """A submission's first failed test is its last; otherwise all are run, and the verdict says how each ended."""
    budget_s: PositiveFloat = 120.0
    """Wall time of all tests of one submission together."""
    checker_headers: Path | None = None
    """A folder that holds testlib.h, for C++ checkers that include it."""
    sandbox: Literal["auto", "bubblewrap", "landlock", "weak"] = "auto"
    """Of untrusted programs. auto: bubblewrap where the machine grants namespaces, else Landlock; weak: neither, and
    files of this machine can be read: only where it holds nothing of value."""
    memory_bytes: Positive = 4 << 30
    """Of one untrusted program (the report allows 50 GB)."""
    node_memory_bytes: Positive | None = None
    """Of all untrusted programs on one node together; where cgroups cannot be used, each worker's programs get the
    worker's share of it. None: half of its memory."""
    processes: Positive = 64
    """Processes and threads of one untrusted program."""
    max_pending: Positive = 16384
    """Responses that wait for a verifier; more are not taken until some have their verdict."""
    worker_memory_bytes: Positive = 2 << 30
    """A verifier whose memory has grown beyond this is replaced by a fresh one."""


Transport = Literal["gloo", "shared_memory", "gloo+shared_memory", "nccl", "cuda_ipc", "nccl+cuda_ipc"]


class HandoffConfig(Section):
    backend: Literal["gloo", "shard", "nccl", "ipc", "sharded_rdt", "nccl_m2n"] = "shard"
    """shard: all trainer ranks send, and each engine rank receives just the slices that its loaders ask for; gloo: rank
    0 gathers whole tensors and sends them to all engines, the plain fallback. The others are vLLM's own, on GPUs."""
    transport: Transport | None = None
    """For shard. CPU: gloo; shared_memory on one node. GPU: nccl with placement separate, cuda_ipc on one node. Two
    names are two hops: among trainer ranks, and from each to the engine on its device (placement colocated). None: by
    where the ranks run, shared_memory on one node, else gloo; with GPUs nccl+cuda_ipc if they are shared, else nccl."""
    bucket_bytes: Positive = 512 << 20
    """What an engine rank receives at a time, from all its senders; a trainer rank holds two of them at most."""
    probe_every_steps: NonNegative | None = None
    """0: never. None: every step without a GPU, every 10 with."""
    probe_tokens: Positive | None = None
    """Tokens that are scored. None: 94 in float32, 512 in bfloat16."""
    probe_bound: PositiveFloat | None = None
    """float32: largest tolerated |engine - policy| log-prob of any token (None: 1e-3). bfloat16: of the mean over all
    tokens at the run's first handoff (None: 0.1)."""
    probe_growth: PositiveFloat = 3.0
    """bfloat16: the mean may be so many times what it was at the run's first handoff."""
    timeout_s: PositiveFloat = 600.0


class CheckpointConfig(Section):
    every_steps: Positive = 10
    asynchronous: bool = True
    """Saves are written while training goes on, and hold the loop for a copy of the state only. It takes host memory:
    12 bytes per parameter in fp32, 14 in bf16, over all ranks, and up to twice that where it is page-locked. False: the
    loop waits until all is on disk."""
    keep_last: Positive = 2
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation beside the newest."""
    keep_every_steps: NonNegative = 0
    """Keep every checkpoint whose step is a multiple of this for good. 0: none."""
    export_hf_every_steps: NonNegative = 0
    """0: only at the end of the run."""
    signal_grace_s: PositiveFloat = 120.0
    """After SIGTERM or SIGUSR1: finish or abandon the current verb, save and exit within this time."""


class SafetyConfig(Section):
    """When numbers go wrong. The report gives no thresholds: these are ours."""

    max_skipped_in_a_row: Positive = 3
    """SGD steps without finite loss or gradient are skipped; so many in a row end the run."""
    max_rejected_in_a_row: Positive = 10
    """Rollout steps of which every group was rejected teach nothing; so many in a row end the run."""
    keep_dumps: NonNegative = 2
    """A skipped step's batch is set aside for ``or1 replay``; of these the newest stay. 0: none is made."""
    dump_weights: bool = True
    """With the weights that it was computed on, as an HF folder: the model's size on disk for each dump."""
    dump_steps: tuple[Positive, ...] = ()
    """Rollout steps whose batches are set aside in any case, to be looked into; these dumps all stay."""
    alarms: bool = True
    grad_norm_factor: PositiveFloat = 10.0
    """Alarm when the gradient norm is more than this many times its running median."""
    mismatch_mean: PositiveFloat | None = None
    """Alarm when engine and policy differ by more nats per token, on average over a step's sampled tokens. None: 1e-4
    in float32, 0.05 in bfloat16."""
    mismatch_max: PositiveFloat | None = None
    """The same of the token that differs most. None: 0.01 in float32, 5 in bfloat16."""
    low_entropy: NonNegativeFloat = 0.05
    """nats per token: below this the rollouts' entropy counts as near zero."""


class TrackConfig(Section):
    tensorboard: bool = True
    wandb_project: str | None = None
    rollouts_every_steps: Positive = 1
    """Every n-th step's rollouts are kept."""
    rollouts_keep_bytes: Positive = 10 << 30
    """Oldest rollout files are deleted beyond this."""
    console: Literal["auto", "rich", "plain"] = "auto"


class ClusterConfig(Section):
    ray_address: str | None = None
    """None: Ray is started embedded, on this machine alone. "auto" or host:port: attach to a running cluster."""
    nodes: Positive = 1
    """Nodes that must have joined the cluster at ``ray_address`` before anything is placed on it."""
    join_timeout_s: PositiveFloat = 600.0
    verb_timeout_s: PositiveFloat = 1800.0
    """Deadline of one lockstep verb (update, hand_off, save, ...) on every rank."""
    gpu_memory_gb: PositiveFloat | None = None
    """Of one GPU, in 1e9 bytes: lets the dry run say when a trainer rank would not fit."""


class Config(Section):
    """A whole run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    rollout: RolloutConfig = RolloutConfig()
    verify: VerifyConfig = VerifyConfig()
    handoff: HandoffConfig = HandoffConfig()
    evaluate: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    safety: SafetyConfig = SafetyConfig()
    track: TrackConfig = TrackConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _stages_are_what_they_name(self) -> Self:
        if self.run.stage is not None and self.run.stage > len(self.stages):
            raise ValueError(
                f"run.stage = {self.run.stage}, but there are {len(self.stages)} stages; choose one of them, or add "
                "entries to 'stages'"
            )
        sources = [source.title for source in self.data.train]
        for stage in self.stages:
            if stage.mixture is None:
                continue
            refuse_twice(sources, "data.train")
            if set(stage.mixture) != set(sources):
                raise ValueError(
                    f"stage '{stage.name}': mixture names {sorted(stage.mixture)}; expected each source of data.train "
                    f"once, 0 for one that is left out: {sorted(sources)}"
                )
        return self

    def repeats(self, stage: StageConfig) -> tuple[int, ...]:
        """How often each source of ``data.train`` appears per epoch of ``stage``."""
        return tuple(
            source.repeat if stage.mixture is None else stage.mixture[source.title] for source in self.data.train
        )

    @property
    def longest_response(self) -> int:
        """T of whatever is sampled with the longest one, evaluations included."""
        longest = [stage.max_response_tokens for stage in self.stages]
        for stage in self.stages if self.evaluate.data else ():
            settings = self.evaluate.in_stage(stage)
            default = settings.max_response_tokens or self.stages[-1].max_response_tokens
            longest += [each.max_response_tokens or default for each in settings.data]
        return max(longest)

    @property
    def total_steps(self) -> int:
        """Rollout steps up to the end of this run, at most; those before its first stage included."""
        return sum(stage.steps for stage in self.stages[: self.run.stage])
