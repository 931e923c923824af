"""The configuration schema ``Config`` and most of its sections, typed and frozen.

Other sections are in ``parallel``, ``stages`` and ``algorithm``; ``load`` makes a Config from YAML files and overrides.
Each part of the code receives the section that it needs, never the whole Config. Defaults are the recipe's
(Skywork-OR1 technical report, arXiv 2505.22312, and its released code).

The docstring of a key is its documentation (``explain``): its meaning, then ``Unit:`` unless the name ends in the unit,
then ``Recipe:`` with what the report or its released code says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, model_validator

from or1_megatron.config.algorithm import AdvantageConfig as AdvantageConfig
from or1_megatron.config.algorithm import AlgorithmConfig
from or1_megatron.config.algorithm import CorrectionConfig as CorrectionConfig
from or1_megatron.config.algorithm import EntropyConfig as EntropyConfig
from or1_megatron.config.algorithm import KLConfig as KLConfig
from or1_megatron.config.algorithm import LossConfig as LossConfig
from or1_megatron.config.base import (
    BelowOne,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
)
from or1_megatron.config.lora import LoraConfig as LoraConfig
from or1_megatron.config.parallel import ParallelConfig
from or1_megatron.config.stages import (
    EvaluationConfig,
    EvaluationSetConfig,
    PlateauConfig,
    ProblemSetConfig,
    StageConfig,
    StageEvaluationConfig,
    refuse_duplicates,
)
from or1_verify.config import VerifyConfig

__all__ = [  # of other modules, so that all sections can be imported from here
    "EvaluationConfig",
    "EvaluationSetConfig",
    "ParallelConfig",
    "PlateauConfig",
    "Section",
    "StageConfig",
    "StageEvaluationConfig",
]


class RunConfig(Section):
    """The run folder, the seed, the stage to run, and restarts."""

    dir: Path
    """The run folder, made if missing. If it holds checkpoints, the run resumes from the newest."""
    seed: NonNegative = 1
    """Seed of all random choices: the order of problems, and sampling. Unit: none."""
    stage: Positive | None = None
    """Run this stage alone (the first is 1), in ``dir``/stage_N, from the end of the previous stage. ``or1 train
    --stage N`` sets this key. Unset: all stages, one after another. Unit: stage."""
    max_restarts: NonNegative = 3
    """``or1 train`` restarts the ranks from the newest checkpoint if a rank, or a part that they need, dies: at most
    this many times without a finished step in between. 0: never. Unit: restarts."""
    previous: Path | None = None
    """With ``stage``: the previous stage's run folder, or one of its checkpoints, from which stage N then starts.
    Unset: ``dir``/stage_(N-1)."""

    @model_validator(mode="after")
    def _has_a_previous(self) -> Self:
        if self.previous is not None and (self.stage is None or self.stage == 1):
            raise ValueError(
                f"run.previous = {self.previous} is for a run of one stage after the first; run.stage is {self.stage}"
            )
        return self

    @property
    def folder(self) -> Path:
        """The folder that this run writes: ``dir``, or ``dir``/stage_N for a run of one stage."""
        return self.dir if self.stage is None else self.dir / f"stage_{self.stage}"


class ModelConfig(Section):
    """The model that training starts from."""

    hf: Path
    """HF folder: config.json, safetensors, tokenizer with a chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of parameters. bfloat16 keeps fp32 master weights and fp32 gradient reduction. Recipe: bfloat16
    with fp32 master weights and gradient reduction in every released model (docs/recipe.md, section 4)."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights (docs/lora.md). Unset: all weights. Recipe: all weights."""


class SourceConfig(ProblemSetConfig):
    """One problem set of the training data."""

    repeat: Positive = 1
    """How often each problem of the set appears per epoch. Unit: times. Recipe: code twice, math once; Math-7B trains
    on math alone (docs/recipe.md, section 4)."""


class DataConfig(Section):
    """The problems to train on."""

    train: tuple[SourceConfig, ...] = Field(min_length=1)
    """The problem sets."""
    max_prompt_tokens: Positive = 2048
    """Longest prompt; longer prompts are dropped and counted. Recipe: 2048 (docs/recipe.md, section 1)."""
    difficulty_model: str | None = None
    """A model named in the data's column ``model_difficulty``: problems that this model solved in all or none of its 16
    tries are dropped. Recipe: the base model's difficulty is used (docs/recipe.md, section 3)."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """What to do with data rows that cannot be used: not JSON, a missing field, a ground truth that its verifier
    refuses, a problem with two answers. refuse: list them and do not start; drop: leave them out, counted by reason."""


class OptimizerConfig(Section):
    """AdamW on fp32 master weights."""

    lr: PositiveFloat = 1e-6
    """Learning rate. Unit: none. Recipe: 1e-6, constant, in every released model (docs/recipe.md, section 4)."""
    warmup_steps: NonNegative = 0
    """SGD steps over which the learning rate rises linearly to ``lr``. Unit: SGD steps. Recipe: no warm-up
    (docs/recipe.md, section 4)."""
    decay_steps: NonNegative = 0
    """SGD step, counted from the first, at which the learning rate has fallen linearly to zero. 0: it is constant.
    Unit: SGD steps. Recipe: constant (docs/recipe.md, section 4)."""
    beta1: BelowOne = 0.9
    """Decay of the first moment. Unit: none. Recipe: 0.9 (docs/recipe.md, section 4)."""
    beta2: BelowOne = 0.999
    """Decay of the second moment. Unit: none. Recipe: 0.999 (docs/recipe.md, section 4)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment. Unit: none."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of every parameter; the decay is multiplied by the learning rate. Unit: none. Recipe: 0.01
    (docs/recipe.md, section 4)."""
    clip_grad: PositiveFloat = 1.0
    """Norm to which a gradient of larger norm is scaled down. Unit: none. Recipe: 1.0 (docs/recipe.md, section 4)."""


class RolloutConfig(Section):
    """The inference engines."""

    engines: Positive = 1
    """Number of vLLM engines. Unit: engines."""
    tensor_parallel: Positive = 1
    """Tensor parallelism of one engine: the number of its devices. Unit: devices."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: engines and trainer use the same devices in turn; separate: engines have devices of their own."""
    max_concurrent: Positive = 256
    """Largest number of responses that one engine decodes at once. Unit: responses."""
    kv_cache_bytes: Positive | None = None
    """Size of the KV cache on each device of an engine; required on CPU. Unset, on GPU: with placement colocated and
    offload, the memory that trainer and engine leave free (sizing/kv_cache.py); otherwise the part of
    gpu_memory_fraction that the weights leave free."""
    gpu_memory_fraction: Fraction = 0.85
    """Share of a GPU's memory that vLLM may take; not used on CPU. Unit: share."""
    threads_per_engine: Positive = 1
    """OpenMP threads of one engine; used only on CPU. Unit: threads."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine by vLLM's names, such as ``speculative_config`` (docs/stages.md). Arguments
    that the trainer sets, or that would break seeds, log-probs, weight transfer or sleep, are refused."""
    start_timeout_s: PositiveFloat | None = None
    """Deadline for the engines to start. Unset: 600 s plus the time to read the model's weights at 0.2 GB/s."""
    max_engine_restarts: NonNegative = 2
    """How often each engine is restarted after it dies; its next death ends the run. Unit: restarts."""
    step_timeout_s: PositiveFloat = 7200.0
    """Deadline of a step's rollout: after it, the run ends with an error that names the unanswered requests."""
    max_staleness: NonNegative = 0
    """N: a step may train on tokens that weights up to N steps older have sampled. When a step begins, the engines
    also get the requests of up to N later steps, so that they need not wait for the update. Unit: rollout steps."""
    router_replay: bool = False
    """Compute each token of the training data with the experts that the engine chose for it, in all passes of policy
    and reference (R3, arXiv 2510.11370). For mixtures of experts."""


class AskedModelConfig(Section):
    """How ``or1 eval`` and ``or1 data build`` ask a model: an HF folder on engines of our own, or an endpoint."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    engines: RolloutConfig = RolloutConfig(placement="separate")
    model: str | None = None
    """The name that the endpoint gives the model. Unset: for ``or1 data build`` the model's ``name``, for
    ``or1 eval`` the first model that the endpoint lists."""
    api_key_variable: str | None = None
    """The environment variable that holds the endpoint's key."""
    concurrent: Positive = 64
    """Largest number of requests under way at the endpoint. Unit: requests."""
    tries: Positive = 4
    """Largest number of times that one request is sent to the endpoint. Unit: times."""


Transport = Literal["gloo", "shared_memory", "gloo+shared_memory", "nccl", "cuda_ipc", "nccl+cuda_ipc"]


HOST_ROUND_BYTES: Final = 32 << 20
"""Largest number of bytes that an engine rank gets at a time through host memory, where small messages are faster."""


class HandoffConfig(Section):
    """How weights get from the policy to the engines, and how their arrival is checked."""

    transport: Transport | None = None
    """What carries the weights. On CPU: gloo, or shared_memory on one node. On GPU: nccl (placement separate), or
    cuda_ipc on one node. A+B (placement colocated): A among trainer ranks, then B from each rank to the engine on its
    device. Unset, on CPU: shared_memory if there is one node, else gloo. Unset, on GPU: nccl+cuda_ipc with placement
    colocated, else nccl."""
    bucket_bytes: Positive = 512 << 20
    """Bytes that an engine rank receives at a time from all its senders; at most 32 MiB if they pass through host
    memory. A trainer rank holds at most two buckets of this size."""
    probe_every_steps: NonNegative | None = None
    """Compare the engines' log-probs with the policy's after every n-th handoff; 0: never. Unset: 1 without a GPU, 10
    with one. Unit: handoffs."""
    probe_tokens: Positive | None = None
    """Number of tokens whose log-probs a probe compares. Unset: 94 in float32, 512 in bfloat16."""
    probe_bound: PositiveFloat | None = None
    """Largest |engine - policy| log-prob that a probe allows. float32: at any token (unset: 1e-3); bfloat16: on average
    over all tokens at the run's first handoff (unset: 0.1). Unit: nats."""
    probe_growth: PositiveFloat = 3.0
    """With bfloat16: largest ratio of a later probe's mean to the mean of the first handoff's probe. Unit: factor."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one handoff: after it, the handoff fails."""


class CheckpointConfig(Section):
    """When checkpoints are saved, and which are kept."""

    every_steps: Positive = 10
    """Save a checkpoint after every n-th step, after the last step, and on a stop signal."""
    asynchronous: bool = True
    """Write checkpoints while training goes on: the loop waits only for a copy of the state in host memory. The copy
    takes 12 bytes per parameter in fp32, 14 in bf16, over all ranks, and up to twice that if page-locked. False: the
    loop waits until the checkpoint is on disk."""
    keep_last: Positive = 2
    """How many of the newest checkpoints to keep. Unit: checkpoints."""
    keep_best: bool = True
    """Keep also the checkpoint with the best evaluation."""
    keep_every_steps: NonNegative = 0
    """Never delete a checkpoint whose step is a multiple of this number. 0: no rule."""
    export_hf_every_steps: NonNegative = 0
    """Export the model as an HF folder after every n-th step. 0: only at the end of the run."""
    signal_grace_s: PositiveFloat = 120.0
    """Time after SIGTERM or SIGUSR1 in which the run finishes or abandons the loop's current verb, saves and exits."""


class SafetyConfig(Section):
    """Limits that end a run or raise an alarm when its numbers go wrong; the report gives none, so these are ours."""

    max_skipped_in_a_row: Positive = 3
    """An SGD step whose loss or gradient is not finite is skipped; this many in a row end the run. Unit: SGD steps."""
    max_rejected_in_a_row: Positive = 10
    """If all its groups are rejected, a step trains nothing; this many in a row end the run. Unit: rollout steps."""
    alarms: bool = True
    """Print a sentence (an alarm) when a step's metrics look as they do in a run that goes wrong."""
    grad_norm_factor: PositiveFloat = 10.0
    """Alarm when the gradient norm is more than this many times its running median. Unit: factor."""
    mismatch_limit: Literal["off", "warn", "stop"] = "warn"
    """What follows when engine and policy differ by more than rounding explains. warn: an alarm after the step. stop:
    every step first scores 16 of its responses, and the run ends before it trains on them if |engine - policy|
    log-prob is above ``mismatch_mean`` and above 3 times the mean of the last handoff's probe."""
    mismatch_mean: PositiveFloat | None = None
    """Alarm when |engine - policy| log-prob is above this on average over a step's sampled tokens. Unset: 1e-4 in
    float32, 0.05 in bfloat16. Unit: nats."""
    mismatch_max: PositiveFloat | None = None
    """Alarm when |engine - policy| log-prob is above this at any sampled token of a step. Unset: 0.01 in float32, 5 in
    bfloat16. Unit: nats."""
    low_entropy: NonNegativeFloat = 0.05
    """Alarm when the rollouts' entropy falls below this. Unit: nats per token."""


class TrackConfig(Section):
    """What a run records and shows: trackers, rollouts, console output."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases too. Needs the extra ``wandb``."""
    mlflow_experiment: str | None = None
    """Log to this experiment of MLflow too, at MLFLOW_TRACKING_URI. Needs the package mlflow."""
    tracker: str | None = None
    """A tracker of your own: package.module:Class or path/to/file.py:Class."""
    prometheus_port: Positive | None = None
    """Serve the run's metrics to Prometheus at this port, and the metrics of engine i's vLLM at port + 1 + i.
    docs/watch.md says more. Unit: TCP port."""
    rollouts_every_steps: Positive = 1
    """Keep the rollouts (all responses) of every n-th step."""
    rollouts_keep_bytes: Positive = 10 << 30
    """Largest size of all stored responses: 3/4 for rollouts, 1/4 for held-out responses. The oldest files are deleted
    when a part is full."""
    console: Literal["auto", "rich", "plain"] = "auto"
    """rich: a live table; plain: a line per step; auto: rich on a terminal, else plain."""
    timeline: bool = False
    """Write what each process does, from when to when, and for whom it waits; ``or1 timeline`` shows a step."""
    profile_steps: tuple[Positive, ...] = ()
    """Write traces of torch.profiler of these rollout steps, a file for each trainer rank. Unit: steps."""


class ClusterConfig(Section):
    """The machines of a run: Ray, deadlines, memory."""

    ray_address: str | None = None
    """Ray cluster to attach to: "auto" or host:port. Unset: the run starts a Ray of its own on this machine."""
    nodes: Positive = 1
    """Number of nodes that must have joined the cluster at ``ray_address`` before a run starts. Unit: nodes."""
    join_timeout_s: PositiveFloat = 600.0
    """Deadline for the ``nodes`` to join the cluster."""
    heartbeat_s: PositiveFloat = 10.0
    """A process of the run is killed if it is stopped, or sleeps without a sign of life, for this long. The process and
    the parts that depend on it are restarted. Phases that are known to take long have deadlines of their own."""
    verb_timeout_s: PositiveFloat = 1800.0
    """Deadline of one verb of the loop that all ranks execute together (update, hand_off, save, ...)."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of one GPU. A run that needs more is refused, and a colocated engine's KV cache is sized for this memory.
    Unset: the memory of this machine's GPUs, if any. Unit: 1e9 bytes."""
    check_memory: bool = True
    """Refuse to start if the estimated memory (``or1 plan`` shows it) exceeds the free host memory (on CPU) or a GPU's
    whole memory. False: start all the same."""


class Config(Section):
    """The configuration of a whole run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    stages: tuple[StageConfig, ...] = Field(min_length=1)
    """The stages, one after another."""
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
            refuse_duplicates(sources, "data.train")
            if set(stage.mixture) != set(sources):
                raise ValueError(
                    f"stage '{stage.name}': mixture names {sorted(stage.mixture)}; expected each source of data.train "
                    f"once, 0 for one that is left out: {sorted(sources)}"
                )
        return self

    def repeats(self, stage: StageConfig) -> tuple[int, ...]:
        """Return how often each source of ``data.train`` appears per epoch of ``stage``."""
        return tuple(
            source.repeat if stage.mixture is None else stage.mixture[source.title] for source in self.data.train
        )

    @property
    def longest_response(self) -> int:
        """The longest max_response_tokens of all stages and evaluations, in tokens."""
        last = self.stages[-1].max_response_tokens
        evaluated = [
            settings.longest_of(held_out, last)
            for settings in map(self.evaluate.in_stage, self.stages)
            for held_out in settings.data
        ]
        return max([stage.max_response_tokens for stage in self.stages] + evaluated)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt plus the longest response, evaluations included."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def devices(self) -> int:
        """Number of GPUs (on CPU: processes) that trainer and engines take together."""
        engines = self.rollout.engines * self.rollout.tensor_parallel
        together = max if self.rollout.placement == "colocated" else sum
        return together((self.parallel.ranks, engines))

    @property
    def trainer_leaves(self) -> bool:
        """Whether the trainer's state is offloaded from its GPUs while engines work."""
        offload = self.parallel.offload
        return offload == "always" or (offload == "auto" and self.rollout.placement == "colocated")

    @property
    def loads_reference(self) -> bool:
        """Whether a KL reference is loaded. A LoRA run's own start is not loaded: it is the policy without adapters."""
        reference = self.algorithm.kl.reference
        own_start = reference is not None and reference.resolve() == self.model.hf.resolve()
        return reference is not None and not (own_start and self.model.lora is not None)

    @property
    def total_steps(self) -> int:
        """The rollout step at which this run ends at the latest, counted from the start of the first stage."""
        return sum(stage.steps for stage in self.stages[: self.run.stage])
