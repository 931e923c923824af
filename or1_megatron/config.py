"""The only configuration schema: typed, frozen, unknown keys refused.

Every part receives the section it needs, never the root. Defaults are the recipe's (Skywork-OR1 technical report,
arXiv 2505.22312; where its released code differs, the field says so). How files, overlays and overrides become this
object is in ``config_file``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """Base of all sections: immutable, and strict about names and types."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    dir: Path
    """Run folder; made if missing. A run whose folder holds checkpoints resumes from the newest."""
    seed: NonNegative = 1


class ModelConfig(Section):
    """The model to start from."""

    hf: Path
    """HF folder: config.json, safetensors, tokenizer with a chat template."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of parameters. bfloat16 keeps fp32 master weights and fp32 gradient reduction."""


class SourceConfig(Section):
    """One problem file."""

    path: Path
    """JSONL or parquet in the schema of Skywork-OR1-RL-Data, or JSONL of {prompt, answer}."""
    repeat: Positive = 1
    """How often each problem appears per epoch (the released mix: code 2, math 1)."""


class DataConfig(Section):
    train: tuple[SourceConfig, ...] = Field(min_length=1)
    max_prompt_tokens: Positive = 2048
    """Longer prompts are dropped and counted."""
    difficulty_model: str | None = None
    """Key of ``model_difficulty``: problems at which that model failed 0 or all of its 16 tries are dropped."""


class StageConfig(Section):
    """One stage: how much is sampled, how it is cut into SGD steps, for how long. RECIPE section 4."""

    name: str
    steps: Positive
    """Rollout steps in this stage."""
    max_response_tokens: Positive
    """T: the context given to a response; what is cut off gets reward 0."""
    prompts_per_step: Positive
    """D_R: prompts sampled per rollout step."""
    prompts_per_update: Positive
    """D_T: prompts per SGD step; divides D_R."""
    group_size: Annotated[int, Field(ge=2)]
    """gs, M: responses per prompt."""
    reuse: Positive = 1
    """N_reuse: passes over a step's data. SGD steps per rollout step: N_SGD = D_R / D_T * reuse."""
    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    filter_solved: bool = True
    """Online filter: at this stage's start drop the prompts whose every sample was right in the previous stage."""

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.prompts_per_step % self.prompts_per_update:
            raise ValueError(
                f"stage '{self.name}': prompts_per_step (D_R = {self.prompts_per_step}) is not a multiple of "
                f"prompts_per_update (D_T = {self.prompts_per_update}); choose a D_T that divides D_R"
            )
        return self

    @property
    def sgd_steps(self) -> int:
        """N_SGD = (D_R / D_T) * N_reuse."""
        return self.prompts_per_step // self.prompts_per_update * self.reuse


class AdvantageConfig(Section):
    """A = (r - mean) / (std + eps) over the group."""

    std_ddof: Literal[0, 1] = 1
    eps: NonNegativeFloat = 1e-6
    truncation_mask: Literal["none", "before", "after"] = "none"
    """RECIPE section 3. none: the recipe; before: truncated responses stay out of mean and std and get 0; after: they
    count in mean and std, then get 0."""
    reject_uniform_groups: bool = True
    """Groups whose advantages are all zero never enter the batch."""


class LossConfig(Section):
    clip_low: NonNegativeFloat = 0.2
    clip_high: NonNegativeFloat = 0.2


class EntropyConfig(Section):
    """Adaptive entropy control, RECIPE section 2: alpha_k = c_k * 1{e_k <= target}, c moves by delta per step."""

    mode: Literal["off", "fixed", "adaptive"] = "adaptive"
    coefficient: NonNegativeFloat = 0.0
    """alpha when fixed; c_0 when adaptive."""
    target: NonNegativeFloat = 0.2
    delta: NonNegativeFloat = 0.005
    minimum: NonNegativeFloat = 0.0
    maximum: PositiveFloat | None = None

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        highest = float("inf") if self.maximum is None else self.maximum
        if self.minimum > highest:
            raise ValueError(f"entropy: minimum = {self.minimum} is above maximum = {self.maximum}")
        if self.mode == "adaptive" and not self.minimum <= self.coefficient <= highest:
            raise ValueError(
                f"entropy: coefficient (c_0) = {self.coefficient:g} is outside [minimum, maximum] = "
                f"[{self.minimum:g}, {highest:g}]"
            )
        return self


class AlgorithmConfig(Section):
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    entropy: EntropyConfig = EntropyConfig()


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
    step_timeout_s: PositiveFloat = 7200.0
    """A roll-out that takes longer ends the run, naming the requests that are still out."""


class VerifyConfig(Section):
    workers: Positive = 1
    """Verifier actors."""
    timeout_s: PositiveFloat = 5.0
    """Hard limit for one verdict; the worker is killed and replaced."""
    max_error_fraction: Fraction = 0.05
    """A step in which more of the verdicts than this are ``error`` stops the run."""


class HandoffConfig(Section):
    backend: Literal["gloo", "shard"] = "gloo"
    """gloo: rank 0 gathers whole tensors and broadcasts them to all engines; shard: all trainer ranks send, and each
    engine rank receives just the slices that its loaders ask for."""
    bucket_bytes: Positive = 512 << 20
    """Of what travels in one piece; a trainer rank holds at most two of them."""
    probe_every_steps: NonNegative = 1
    """0: never."""
    probe_tokens: Positive = 64
    probe_bound: PositiveFloat = 1e-3
    """Largest tolerated |engine - policy| log-prob on the probe's tokens (fp32; bf16 wants about 0.3)."""
    timeout_s: PositiveFloat = 600.0


class EvaluationConfig(Section):
    """Held-out evaluation on the same engines, in the final stage's context unless ``max_response_tokens`` is set."""

    data: tuple[SourceConfig, ...] = ()
    every_steps: NonNegative = 0
    """0: only before and after training."""
    samples: Positive = 8
    """k of avg@k before and after training."""
    samples_during: Positive = 1
    """k of avg@k every ``every_steps``."""
    temperature: NonNegativeFloat = 1.0
    top_p: Fraction = 1.0
    max_response_tokens: Positive | None = None
    seed: NonNegative = 20250522


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
