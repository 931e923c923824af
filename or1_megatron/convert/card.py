"""What a run's folder says about one of its checkpoints, and the model card that is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from or1_megatron.config.load import load_config
from or1_megatron.config.schema import Config
from or1_megatron.runtime.jsonl import read_steps
from or1_megatron.runtime.run_folder import RunFolder, step_of

_METRICS: Final = ("accuracy/all", "accuracy/non_truncated", "truncation/ratio", "length/mean", "entropy/full")


@dataclass(frozen=True, slots=True)
class RunOf:
    """The run of a checkpoint."""

    step: int
    config: Config
    base: Path | None
    """An HF folder with the model's config and tokenizer: the run's base model or its export; None if both are gone."""
    metrics: Mapping[str, Any]
    """Of the step, and the last evaluation's up to it."""


def run_of(checkpoint: Path) -> RunOf | None:
    """Return the run of ``<run>/checkpoints/step_N``; None for a checkpoint in another place."""
    checkpoint = checkpoint.resolve()  # best is a link
    folder = RunFolder(checkpoint.parents[1])
    step = step_of(checkpoint)
    if step is None or not folder.config.is_file():
        return None
    config = load_config(folder.config)
    steps = read_steps(folder.metrics) if folder.metrics.is_file() else {}
    evaluated = max((at for at, row in steps.items() if at <= step and "evaluation/accuracy" in row), default=None)
    metrics = {name: value for name, value in steps.get(step, {}).items() if name in _METRICS}
    if evaluated is not None:
        of_evaluation = {name: value for name, value in steps[evaluated].items() if name.startswith("evaluation/")}
        metrics |= {f"{name}, after step {evaluated}": value for name, value in of_evaluation.items()}
    bases = (base for base in (config.model.hf, folder.hf) if (base / "config.json").is_file())
    return RunOf(step, config, next(bases, None), metrics)


def model_card(run: RunOf) -> str:
    """Return Markdown with the front matter that model hubs read. It holds no path of this machine."""
    return "\n".join(_lines(run)) + "\n"


def _lines(run: RunOf) -> Iterator[str]:
    config, base = run.config, run.config.model.hf.name
    entropy, loss, optimizer = config.algorithm.entropy, config.algorithm.loss, config.optimizer
    yield from ("---", f"base_model: {base}", "library_name: transformers", "pipeline_tag: text-generation")
    yield from ("tags: [or1_megatron, reinforcement-learning, grpo]", "---", "", f"# {base}, trained with MAGIC", "")
    yield f"Step {run.step} of {sum(stage.steps for stage in config.stages)} of a run of or1_megatron: multi-stage"
    yield "GRPO without KL, token-level loss, zero-advantage groups rejected (Skywork-OR1, arXiv 2505.22312)."
    yield from ("", "| stage | steps | context of a response | prompts per step | prompts per update | group size |")
    yield "|---|---|---|---|---|---|"
    for stage in config.stages:
        cells = (stage.name, stage.steps, stage.max_response_tokens, stage.prompts_per_step, stage.prompts_per_update)
        yield f"| {' | '.join(map(str, (*cells, stage.group_size)))} |"
    yield from ("", f"- Entropy: {entropy.mode}, target {entropy.target:g}")
    yield f"- Clip: {loss.clip_low:g} below, {loss.clip_high:g} above"
    yield f"- AdamW: learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"
    yield f"- Parameters in {config.model.dtype}, seed {config.run.seed}"
    yield f"- Data: {', '.join(source.path.name for source in config.data.train)}"
    yield from ("", "| metric | |", "|---|---|")
    for name, value in run.metrics.items():
        yield f"| {name} | {value:.4g} |" if isinstance(value, int | float) else f"| {name} | {value} |"
