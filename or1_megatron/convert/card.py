"""The model card of a run's checkpoint: its base model, recipe, step and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from or1_megatron.convert.run_source import RunOf

_METRICS = ("accuracy/all", "accuracy/non_truncated", "truncation/ratio", "length/mean", "entropy/full")


def model_card(run: RunOf) -> str:
    """Return Markdown with the front matter that model hubs read. It holds no path of this machine."""
    base = run.config.model.hf.name
    done = f"{run.step} of {sum(stage.steps for stage in run.config.stages)}"
    lines = [
        *("---", f"base_model: {base}", "library_name: transformers", "pipeline_tag: text-generation"),
        *("tags: [or1_megatron, reinforcement-learning, grpo]", "---", ""),
        *(f"# {base}, trained with MAGIC", ""),
        f"Step {done} of a run of or1_megatron: multi-stage GRPO without KL, token-level loss, zero-advantage groups "
        "rejected (Skywork-OR1, arXiv 2505.22312).",
        *("", "## Recipe", ""),
        *_stages(run),
        "",
        *_settings(run),
        *("", "## Metrics", ""),
        *_metrics(run),
    ]
    return "\n".join(lines) + "\n"


def _stages(run: RunOf) -> Iterator[str]:
    yield "| stage | steps | context of a response | prompts per step | prompts per update | group size |"
    yield "|---|---|---|---|---|---|"
    for stage in run.config.stages:
        cells = (stage.name, stage.steps, stage.max_response_tokens, stage.prompts_per_step)
        yield f"| {' | '.join(map(str, (*cells, stage.prompts_per_update, stage.group_size)))} |"


def _settings(run: RunOf) -> Iterator[str]:
    algorithm, optimizer = run.config.algorithm, run.config.optimizer
    entropy = algorithm.entropy
    yield f"- Entropy: {entropy.mode}, target {entropy.target:g}"
    yield f"- Clip: {algorithm.loss.clip_low:g} below, {algorithm.loss.clip_high:g} above"
    yield f"- AdamW: learning rate {optimizer.lr:g}, weight decay {optimizer.weight_decay:g}"
    yield f"- Parameters in {run.config.model.dtype}, seed {run.config.run.seed}"
    yield f"- Data: {', '.join(source.path.name for source in run.config.data.train)}"


def _metrics(run: RunOf) -> Iterator[str]:
    if run.evaluation is not None:
        step, row = run.evaluation
        yield from _table(f"held out, after step {step}", {k: v for k, v in row.items() if k.startswith("evaluation/")})
        yield ""
    found = {name: run.metrics[name] for name in _METRICS if name in run.metrics}
    if found:
        yield from _table(f"sampled in step {run.step}", found)
    elif run.evaluation is None:
        yield "None were recorded."


def _table(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield f"| {title} | |"
    yield "|---|---|"
    for name, value in values.items():
        yield f"| {name} | {value:.4g} |" if isinstance(value, int | float) else f"| {name} | {value} |"
