"""The configuration schema: typed, frozen, unknown keys refused.

Every part of the code receives the section that it needs, never the whole. Defaults are the recipe's (Skywork-OR1
technical report, arXiv 2505.22312, and its released code). ``load`` says how files, overlays and overrides become a
Config; other sections are in ``parallel``, ``stages`` and ``algorithm``.

The docstring of a key is its documentation (``explain``): what it is, then ``Unit:`` where the name does not end in the
unit, then ``Recipe:``, what the report or its released code says, where it says something.
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
    refuse_twice,
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
    """Where the run is written, and what makes it repeatable."""

    dir: Path
    """Run folder; made if missing. A run whose folder holds checkpoints resumes from the newest."""
    seed: NonNegative = 1
    """Seed of everything that is drawn: the order of problems, samples. Unit: none."""
    stage: Positive | None = None
    """Run this stage alone (the first is 1), in ``dir``/stage_N, from where the one before it ended. ``or1 train
    --stage N`` sets it. Unset: all stages, one after another. Unit: stage."""
    max_restarts: NonNegative = 3
    """How often ``or1 train`` starts the ranks again from the newest checkpoint, in a row without a new step, after one
    of them or a part that they need has died. 0: never. Unit: restarts."""
    previous: Path | None = None
    """With ``stage``: the previous stage's run folder, or one checkpoint in it, which then counts as the end of that
    stage. Unset: ``dir``/stage_(N-1)."""

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
    """Compute dtype of parameters. bfloat16 keeps fp32 master weights and fp32 gradient reduction. Recipe: bfloat16
    with fp32 master weights and gradient reduction in every released model (docs/recipe.md, section 4)."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights (docs/lora.md). Unset: all weights. Recipe: all weights."""


class SourceConfig(ProblemSetConfig):
    """One problem set of the training data."""

    repeat: Positive = 1
    """How often each problem appears per epoch. Unit: times. Recipe: code twice, math once; Math-7B: math alone
    (docs/recipe.md, section 4)."""


class DataConfig(Section):
    """The problems to train on."""

    train: tuple[SourceConfig, ...] = Field(min_length=1)
    """The problem sets."""
    max_prompt_tokens: Positive = 2048
    """Longer prompts are dropped and counted. Recipe: 2048 (docs/recipe.md, section 1)."""
    difficulty_model: str | None = None
    """Key of ``model_difficulty`` in the data: problems at which that model failed 0 or all of its 16 tries are
    dropped. Recipe: the base model is asked (docs/recipe.md, section 3)."""
    unusable: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be used: not JSON, a missing field, a ground truth that its verifier refuses, a problem with two
    answers. refuse: list them and do not start; drop: train without them and say how many, by reason."""


class OptimizerConfig(Section):
    """AdamW on fp32 master weights."""

    lr: PositiveFloat = 1e-6
    """Learning rate. Unit: none. Recipe: 1e-6, constant, in every released model (docs/recipe.md, section 4)."""
    warmup_steps: NonNegative = 0
    """SGD steps over which lr rises linearly to its value. Unit: SGD steps. Recipe: no warm-up (docs/recipe.md, section
    4)."""
    decay_steps: NonNegative = 0
    """SGD step, counted from the first, at which lr has fallen linearly to 0; 0: lr stays constant. Unit: SGD steps.
    Recipe: constant (docs/recipe.md, section 4)."""
    beta1: BelowOne = 0.9
    """Decay of the first moment. Unit: none. Recipe: 0.9 (docs/recipe.md, section 4)."""
    beta2: BelowOne = 0.999
    """Decay of the second moment. Unit: none. Recipe: 0.999 (docs/recipe.md, section 4)."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment. Unit: none."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay of every parameter; multiplied with lr. Unit: none. Recipe: 0.01 (docs/recipe.md, section
    4)."""
    clip_grad: PositiveFloat = 1.0
    """Largest gradient norm; a larger gradient is scaled down to it. Unit: none. Recipe: 1.0 (docs/recipe.md, section
    4)."""


class RolloutConfig(Section):
    """The inference engines."""

    engines: Positive = 1
    """How many engines. Unit: engines."""
    tensor_parallel: Positive = 1
    """Tensor parallelism of one engine. Unit: devices."""
    placement: Literal["colocated", "separate"] = "colocated"
    """colocated: engines take turns with the trainer on its devices; separate: devices of their own."""
    max_concurrent: Positive = 256
    """Responses that one engine decodes at once. Unit: responses."""
    kv_cache_bytes: Positive | None = None
    """KV cache on each device of an engine; required on CPU. Unset, on GPU: an engine that takes turns with a trainer
    that offloads gets what both leave free (sizing/kv_cache.py); any other takes what gpu_memory_fraction of the GPU
    leaves beside the weights."""
    gpu_memory_fraction: Fraction = 0.85
    """Share of a GPU's memory that vLLM may take. GPU alone. Unit: share."""
    threads_per_engine: Positive = 1
    """OpenMP threads of one engine. CPU alone. Unit: threads."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's engine by their names there, ``speculative_config`` too (docs/stages.md). What the
    trainer sets itself is refused, and what would break seeds, log-probs, weight transfer or sleep."""
    start_timeout_s: PositiveFloat | None = None
    """Deadline for the engines to start. Unset: 600 s, and the time to read the model's weights at 0.2 GB/s."""
    max_engine_restarts: NonNegative = 2
    """How often each engine is started again when it dies, before its death ends the run. Unit: restarts."""
    step_timeout_s: PositiveFloat = 7200.0
    """A rollout that takes longer ends the run, naming the requests that are still out."""
    max_staleness: NonNegative = 0
    """N: how many steps older than the trained weights those that sampled a token may be. The N next steps are asked
    while this one is sampled and trains. Unit: rollout steps."""
    router_replay: bool = False
    """Compute each token of the training data with the experts that the engine chose for it, in all passes of policy
    and reference (R3, arXiv 2510.11370). For mixtures of experts."""


class AskedModelConfig(Section):
    """How ``or1 eval`` and ``or1 data build`` ask a model: an HF folder on engines of our own, or an endpoint."""

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    engines: RolloutConfig = RolloutConfig(placement="separate")
    model: str | None = None
    """An endpoint's name of the model. Unset: in a recipe the model's ``name``, else the first that it lists."""
    api_key_variable: str | None = None
    """The environment variable that holds the endpoint's key."""
    concurrent: Positive = 64
    """Requests under way at the endpoint."""
    tries: Positive = 4
    """How often one request to the endpoint is sent at most. Unit: times."""


Transport = Literal["gloo", "shared_memory", "gloo+shared_memory", "nccl", "cuda_ipc", "nccl+cuda_ipc"]


HOST_ROUND_BYTES: Final = 32 << 20
"""The most that an engine rank receives at a time through host memory, where small messages are faster."""


class HandoffConfig(Section):
    """How weights get from the policy to the engines, and how it is checked that they did."""

    transport: Transport | None = None
    """CPU: gloo; shared_memory on one node. GPU: nccl with placement separate, cuda_ipc on one node. Two
    names are two hops: among trainer ranks, and from each to the engine on its device (placement colocated). Unset: by
    where the ranks run, shared_memory on one node, else gloo; with GPUs nccl+cuda_ipc if they are shared, else nccl."""
    bucket_bytes: Positive = 512 << 20
    """What an engine rank receives at a time, from all its senders, but through host memory 32 MiB at most. A trainer
    rank holds two of them at most."""
    probe_every_steps: NonNegative | None = None
    """Handoffs between two log-prob probes of the engines; 0: never. Unset: 1 without a GPU, 10 with. Unit:
    handoffs."""
    probe_tokens: Positive | None = None
    """Tokens that a probe scores. Unset: 94 in float32, 512 in bfloat16."""
    probe_bound: PositiveFloat | None = None
    """float32: largest |engine - policy| log-prob of any token (unset: 1e-3). bfloat16: largest mean over all tokens at
    the run's first handoff (unset: 0.1). Unit: nats."""
    probe_growth: PositiveFloat = 3.0
    """bfloat16: largest mean of a later handoff, as a multiple of the first handoff's. Unit: factor."""
    timeout_s: PositiveFloat = 600.0
    """Deadline of one handoff; an engine or rank that does not keep up fails it."""


class CheckpointConfig(Section):
    """When state is saved, and what is kept."""

    every_steps: Positive = 10
    """Save after every n-th step; the last step and a stop signal save too."""
    asynchronous: bool = True
    """Write saves while training goes on; the loop waits for a copy of the state only. It takes host memory: 12 bytes
    per parameter in fp32, 14 in bf16, over all ranks, and up to twice that where it is page-locked. False: the loop
    waits until all is on disk."""
    keep_last: Positive = 2
    """How many of the newest checkpoints to keep. Unit: checkpoints."""
    keep_best: bool = True
    """Keep the checkpoint with the best evaluation beside the newest."""
    keep_every_steps: NonNegative = 0
    """Keep every checkpoint whose step is a multiple of this for good. 0: none."""
    export_hf_every_steps: NonNegative = 0
    """Export the model as an HF folder every n-th step. 0: only at the end of the run."""
    signal_grace_s: PositiveFloat = 120.0
    """After SIGTERM or SIGUSR1: finish or abandon the current verb, save and exit within this time."""


class SafetyConfig(Section):
    """What happens when numbers go wrong. The report gives no thresholds; these are ours."""

    max_skipped_in_a_row: Positive = 3
    """SGD steps without a finite loss or gradient are skipped; this many in a row end the run. Unit: SGD steps."""
    max_rejected_in_a_row: Positive = 10
    """A step with every group rejected trains nothing; this many in a row end the run. Unit: rollout steps."""
    alarms: bool = True
    """Say in words when a step's numbers look as they do in a run that goes wrong."""
    grad_norm_factor: PositiveFloat = 10.0
    """Alarm when the gradient norm is more than this many times its running median. Unit: factor."""
    mismatch_mean: PositiveFloat | None = None
    """Alarm when engine and policy differ by more per token, on average over a step's sampled tokens. Unset: 1e-4 in
    float32, 0.05 in bfloat16. Unit: nats."""
    mismatch_max: PositiveFloat | None = None
    """Alarm when engine and policy differ by more at any sampled token of a step. Unset: 0.01 in float32, 5 in
    bfloat16. Unit: nats."""
    low_entropy: NonNegativeFloat = 0.05
    """Alarm when the rollouts' entropy falls below this. Unit: nats per token."""


class TrackConfig(Section):
    """What a run records and shows."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb_project: str | None = None
    """Log to this project of Weights & Biases too. Needs the extra ``wandb``."""
    mlflow_experiment: str | None = None
    """Log to this experiment of MLflow too, at MLFLOW_TRACKING_URI. Needs the package mlflow."""
    tracker: str | None = None
    """A tracker of your own: package.module:Class or path/to/file.py:Class."""
    rollouts_every_steps: Positive = 1
    """Keep every n-th step's rollouts."""
    rollouts_keep_bytes: Positive = 10 << 30
    """Delete the oldest rollout files beyond this."""
    console: Literal["auto", "rich", "plain"] = "auto"
    """rich: a live table; plain: a line per step; auto: rich on a terminal."""


class ClusterConfig(Section):
    """The machines: Ray, deadlines, memory."""

    ray_address: str | None = None
    """Unset: Ray is started embedded, on this machine alone. "auto" or host:port: attach to a running cluster."""
    nodes: Positive = 1
    """Nodes that must have joined the cluster at ``ray_address`` before anything is placed on it. Unit: nodes."""
    join_timeout_s: PositiveFloat = 600.0
    """Deadline for those nodes to join."""
    heartbeat_s: PositiveFloat = 10.0
    """A process of the run that is stopped, or asleep without a sign of life, for this long is killed, and what depends
    on it is started again. Phases that are known to take long have deadlines of their own."""
    verb_timeout_s: PositiveFloat = 1800.0
    """Deadline of one lockstep verb (update, hand_off, save, ...) on every rank."""
    gpu_memory_gb: PositiveFloat | None = None
    """Memory of one GPU: a run that needs more is refused, and a colocated engine's KV cache is sized by it. Unset:
    that of the GPUs here, if any. Unit: 1e9 bytes."""
    check_memory: bool = True
    """Refuse to start if the estimate of memory (``or1 plan`` shows it) exceeds what there is: free host
    memory on CPU, a GPU's whole memory with GPUs. False: start all the same."""


class Config(Section):
    """A whole run."""

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
            refuse_twice(sources, "data.train")
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
        """The longest T, evaluations included."""
        last = self.stages[-1].max_response_tokens
        evaluated = [
            settings.longest_of(held_out, last)
            for settings in map(self.evaluate.in_stage, self.stages)
            for held_out in settings.data
        ]
        return max([stage.max_response_tokens for stage in self.stages] + evaluated)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt and the longest response, evaluations included."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def devices(self) -> int:
        """Accelerators (on CPU: processes) that trainer and engines take together."""
        engines = self.rollout.engines * self.rollout.tensor_parallel
        together = max if self.rollout.placement == "colocated" else sum
        return together((self.parallel.ranks, engines))

    @property
    def trainer_leaves(self) -> bool:
        """Whether the trainer's state leaves its GPUs while engines work."""
        offload = self.parallel.offload
        return offload == "always" or (offload == "auto" and self.rollout.placement == "colocated")

    @property
    def loads_reference(self) -> bool:
        """Whether the KL penalty's reference has weights of its own: with LoRA the run's own start has none."""
        reference = self.algorithm.kl.reference
        own_start = reference is not None and reference.resolve() == self.model.hf.resolve()
        return reference is not None and not (own_start and self.model.lora is not None)

    @property
    def total_steps(self) -> int:
        """The most rollout steps up to the end of this run, steps before its first stage included."""
        return sum(stage.steps for stage in self.stages[: self.run.stage])
