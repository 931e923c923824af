"""``or1 doctor mismatch``: says why a run's engine and policy give different log-probs (``selftest.mismatch``)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from or1_megatron.commands.options import Overrides, config_file
from or1_megatron.commands.user_errors import report_user_errors

if TYPE_CHECKING:
    from or1_megatron.config.schema import Config
    from or1_megatron.selftest.mismatch.measure import Comparison, Inputs


def mismatch(
    run: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="A run folder, a YAML file or a recipe's name.")],
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Longest response that is sampled.")] = 256,
    out: Annotated[Path, typer.Option(help="The picture, by position and by token.")] = Path("mismatch.svg"),
) -> None:
    """Say why engine and policy differ: compare each with transformers on a run's weights and prompts, part by part.

    Needs one device for policy, engine and a model in float32. Exits with 1 if the cause is not noise.
    """
    with report_user_errors(FileNotFoundError, ValueError), tempfile.TemporaryDirectory() as folder:
        from or1_megatron.config.load import load_as
        from or1_megatron.config.schema import Config
        from or1_megatron.report.figures.mismatch import draw_mismatch
        from or1_megatron.selftest.mismatch.causes import verdict

        own = run / "config.yaml"
        config = load_as(Config, own if own.is_file() else config_file(run), overrides or (), own.is_file())
        inputs = inputs_of(config, run if own.is_file() else None, prompts, tokens, Path(folder))
        comparison = measure(inputs, config.parallel.head)
    table = Table(
        "log-probs minus transformers' in float32", "mean, nats", "largest", "noise up to", "tokens", box=None
    )
    for row in comparison.rows.values():
        figures = (row.mean, abs(row.values).max(), row.limit)
        table.add_row(row.name, *(f"{figure:.2g}" for figure in figures), str(len(row.values)))
    Console().print(table)
    out.write_text(draw_mismatch({row.name: (row.places, row.values, row.noise) for row in comparison.rows.values()}))
    sentences = verdict(comparison)
    print(*sentences, f"picture: {out}", sep="\n")
    raise typer.Exit(0 if sentences[0].startswith("noise") else 1)


def measure(inputs: Inputs, head: Any) -> Comparison:
    """Compare an engine on one device and a policy on one rank (with the output head ``head``) with transformers."""
    from or1_megatron.commands.open_model import LocalModel
    from or1_megatron.config.schema import ParallelConfig, RolloutConfig
    from or1_megatron.selftest.mismatch.measure import Comparison
    from or1_megatron.selftest.models import one_rank

    prompts, longest = len(inputs.prompts), max(map(len, inputs.prompts)) + inputs.sampling.max_response_tokens
    engines = RolloutConfig(max_concurrent=prompts, engine_args={"enforce_eager": True})
    oldest = LocalModel(inputs.folders[min(inputs.folders)])
    with oldest.sampler(inputs.dtype, engines, inputs.sampling, longest, longest, 2 * prompts, print) as sampler:
        comparison = Comparison(inputs, sampler.engines[0], one_rank(), ParallelConfig(head=head))
        comparison.hand_off()
        comparison.examine()
    return comparison


def inputs_of(config: Config, run: Path | None, count: int, tokens: int, folder: Path) -> Inputs:
    """Return the inputs of the comparison: the newest checkpoint of ``run`` and responses that its weights sampled, or,
    if ``run`` is None, the configured model. ``folder``: where checkpoints are converted to HF folders."""
    import numpy as np

    from or1_megatron.checkpoint.keeper import CheckpointKeeper
    from or1_megatron.convert.to_hf import megatron_to_hf
    from or1_megatron.data.problems import load_problems
    from or1_megatron.data.template import ChatTemplate, load_tokenizer
    from or1_megatron.runtime.rollout_store import read_rollouts, rollout_files
    from or1_megatron.runtime.run_folder import RunFolder, step_of
    from or1_megatron.selftest.mismatch.measure import Inputs
    from or1_megatron.types import Sampling
    from or1_verify.problems.unusable import UnusableRows

    folders = {0: config.model.hf}
    rows: list[dict[str, Any]] = []
    if run is not None:
        files = {step_of(file): file for file in rollout_files(RunFolder(run).rollouts)}
        saved = {step_of(path) or 0: path for path in CheckpointKeeper(RunFolder(run).checkpoints, 1, False).complete()}
        newest = max((step for step in saved if step + 1 in files), default=max(saved, default=0))
        for step in [step for step in saved if step <= newest][-2:]:
            folders[step] = folder / saved[step].name
            megatron_to_hf(saved[step], folders[step], Console(stderr=True))
        rows = read_rollouts(files.get(newest + 1) or [*files.values()][-1]).to_pylist() if files else []
    tokenizer, unusable = load_tokenizer(config.model.hf), UnusableRows()
    template = ChatTemplate(tokenizer)
    sets = [load_problems(each.path, each.split, unusable, columns=each.columns) for each in config.data.train]
    problems = {problem.id: problem.messages for problems in sets for problem in problems}
    asked: dict[str, Any] = {row["problem_id"]: row for row in rows} or dict.fromkeys(problems)
    asked = {name: row for name, row in list(asked.items())[:count] if name in problems}
    made = {name: template.token_ids(problems[name]) for name in asked}
    used = {name: np.array(row["prompt_token_ids"], np.int32) if row else made[name] for name, row in asked.items()}
    recorded = [
        (used[name], np.array(row["response_token_ids"], np.int32), np.array(row["log_probs"], np.float32))
        for name, row in asked.items()
        if row and {span["version"] for span in row["versions"]} == {max(folders)}
    ]
    named = {stage.name: stage for stage in config.stages}
    stage = named[rows[0]["stage"]] if rows else config.stages[0]
    sampling = Sampling(stage.temperature, stage.top_p, min(tokens, stage.max_response_tokens))
    compared = [(name, used[name], made[name]) for name in asked]
    return Inputs(folders, config.model.dtype, [*used.values()], sampling, recorded, compared, tokenizer.bos_token_id)
