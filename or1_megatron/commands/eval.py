"""``or1 eval``: evaluates a model (avg@k, pass@k) on a benchmark or problem file, with our engines or an endpoint."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from or1_megatron.commands.user_errors import report_user_errors
from or1_megatron.evaluate.response_store import RESULTS, EvaluationError, ResponseStore
from or1_megatron.report.console.evaluation import show_evaluation
from or1_megatron.runtime.console import outlive_console
from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.nvidia_driver import check_driver

if TYPE_CHECKING:
    from or1_megatron.evaluate.response_store import Response
    from or1_megatron.evaluate.settings import EvaluationSettings
    from or1_megatron.interfaces import Sampler
    from or1_verify.types import Problem
    from or1_verify.verifier_threads import VerifierThreads

_DAY = "%Y-%m-%d"


def evaluate(
    model: Annotated[str, typer.Option(help="An HF folder, a Megatron checkpoint, or http://host:port/v1.")] = "",
    data: Annotated[
        str, typer.Option(help="aime24, livecodebench, math500, ..., a problem file or folder, a hub id.")
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Responses, results, picture; the same command resumes it."),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=1, help="Samples per problem. Default: the paper's k for its benchmarks, else 1.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A file of configs/eval; else the paper's settings.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="E.g. --set max_response_tokens=8192.")
    ] = None,
    since: Annotated[
        datetime.datetime | None, typer.Option(formats=[_DAY], help="Only problems from this day on.")
    ] = None,
    until: Annotated[
        datetime.datetime | None, typer.Option(formats=[_DAY], help="Only problems up to this day's midnight.")
    ] = None,
    sets: Annotated[Path, typer.Option(help="Where known sets are looked for before the hub.")] = Path("data/eval"),
) -> None:
    """Measure avg@k and pass@k of MODEL on DATA, with intervals, by response length and by context budget."""
    with report_user_errors():
        missing = [f"--{name}" for name, value in (("model", model), ("data", data), ("out", out)) if not value]
        if missing or out is None:
            raise typer.BadParameter(f"expected {', '.join(missing)}")
        outlive_console()
        if not model.startswith(("http://", "https://")):  # the model runs on our own engines
            check_driver()
        from or1_megatron.config.load import load_as
        from or1_megatron.evaluate.settings import EvaluationSettings

        settings = load_as(EvaluationSettings, config, overrides or ())
        days = [None if day is None else day.date() for day in (since, until)]
        evaluate_model(model, data, k, out, settings, Console(), sets, *days)


def evaluate_model(
    model: str,
    data: str,
    samples: int | None,
    out: Path,
    settings: EvaluationSettings,
    console: Console,
    sets: Path,
    since: datetime.date | None = None,
    until: datetime.date | None = None,
) -> dict[str, Any]:
    """Evaluate ``model`` (an HF folder, a Megatron checkpoint, or an endpoint's URL) on ``data``; return the results.

    Responses are written to ``out``/responses.jsonl as they arrive, and then results.json and results.svg. The same
    call after a kill, or a call with larger ``samples``, resumes and samples only missing responses. ``samples`` None:
    the paper's number for a set of the paper, else 1.

    Raises:
        DataError: the set, or the model's tokenizer or chat template, cannot be used.
        ModelError: the model's folder cannot be used.
        ConvertError: the Megatron checkpoint cannot be converted.
        EngineError: an engine does not start, or fails.
        EvaluationError: the folder holds another evaluation, requests failed, or too many verdicts failed.
    """
    from or1_megatron.commands.open_model import open_model, with_length
    from or1_megatron.data.problems import check_ground_truths
    from or1_megatron.evaluate.benchmarks import load_set
    from or1_megatron.evaluate.sample_and_judge import evaluate
    from or1_megatron.report.figures.evaluation import draw_evaluation
    from or1_megatron.rl.fatal_checks import frequent_reasons
    from or1_verify.problems.rows import DataError
    from or1_verify.problems.unusable import FILE_NAME, UnusableRows

    unusable = UnusableRows()
    loaded = load_set(data, sets, since, until, unusable)
    name, problems = loaded.name, loaded.problems
    samples = _samples(samples, name, settings)
    console.print(str(loaded), highlight=False, soft_wrap=True)
    started_s = time.perf_counter()
    with closing(_verifiers(problems, settings)) as verifiers:
        with verifiers.borrowed() as at_hand:
            problems = check_ground_truths(problems, at_hand, unusable)
        unusable.settle(settings.unusable, out / FILE_NAME, "--set unusable=drop")
        if not problems:
            raise DataError(f"--data {data}: no usable problem is left")
        settings = with_length(settings, model, problems, out, console)
        asked = {"model": model, "data": name, "problems": _digest(problems), **_request_settings(settings)}
        with closing(ResponseStore(out, asked)) as store, _bar(console) as bar:
            task = bar.add_task(name)

            def show(judged: int, wanted: int) -> None:
                bar.update(task, completed=judged, total=wanted)

            def start(missing: int) -> AbstractContextManager[Sampler]:
                verifiers.start()  # its processes load while the engines do
                return open_model(model, settings, problems, missing, out, console)

            responses = evaluate(problems, samples, start, verifiers.verdict, store, settings.seed, show)
    results = _results(
        model, name, responses, settings, (since, until), loaded.release, time.perf_counter() - started_s
    )
    write_atomically(out / RESULTS, (json.dumps(results, indent=2) + "\n").encode(), "the evaluation's results")
    write_atomically(out / "results.svg", draw_evaluation(results).encode(), "the evaluation's picture")
    show_evaluation(results, console)
    if not any(response.reward for row in responses for response in row):
        reasons = frequent_reasons(response for row in responses for response in row)
        console.print(f"no response earned a reward: {reasons}", highlight=False, soft_wrap=True)
    return results


def _samples(given: int | None, name: str, settings: EvaluationSettings) -> int:
    """Return the number of samples per problem. Raises EvaluationError for several samples at temperature 0."""
    from or1_megatron.evaluate.benchmarks import BENCHMARKS

    greedy = settings.temperature == 0.0
    if greedy and given is not None and given > 1:
        raise EvaluationError(
            f"--k {given} with temperature 0, at which all samples of a problem are the same; expected --k 1, or a "
            "higher temperature"
        )
    known = BENCHMARKS.get(name)
    return given or (1 if greedy or known is None else known.samples)


def _verifiers(problems: Sequence[Problem], settings: EvaluationSettings) -> VerifierThreads:
    from or1_verify.verifier_threads import VerifierThreads
    from or1_verify.verifiers import build_verifiers, known_abilities

    config = settings.verify
    abilities = frozenset(problem.ability for problem in problems) & known_abilities(config)
    return VerifierThreads(lambda: build_verifiers(config, abilities), config.workers)


def _digest(problems: Sequence[Problem]) -> str:
    text = json.dumps([[problem.id, problem.ground_truth] for problem in problems])
    return f"{len(problems)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _request_settings(settings: EvaluationSettings) -> dict[str, Any]:
    """Return the settings on which a response and its verdict depend, such as temperature, but not concurrency."""
    from or1_verify.config import MathConfig

    names = {"max_response_tokens", "temperature", "top_p", "seed", "max_prompt_tokens", "dtype", "model"}
    fields = settings.model_dump(mode="json", include=names)
    if settings.verify.math != MathConfig():
        fields["verify.math"] = settings.verify.math.model_dump(mode="json")
    if settings.verify.custom:
        fields["verify.custom"] = settings.verify.custom
    return {("endpoint_model" if name == "model" else name): value for name, value in fields.items()}


def _results(
    model: str,
    data: str,
    responses: Sequence[Sequence[Response]],
    settings: EvaluationSettings,
    window: tuple[datetime.date | None, datetime.date | None],
    release: str,
    wall_s: float,
) -> dict[str, Any]:
    from or1_megatron.evaluate.scores import check_verdicts, summarise

    assert settings.max_response_tokens is not None
    outcome = summarise(responses, settings.max_response_tokens)
    check_verdicts(outcome, settings.verify.max_error_fraction)
    return {
        "model": model,
        "data": data,
        "since": None if window[0] is None else window[0].isoformat(),
        "until": None if window[1] is None else window[1].isoformat(),
        "release": release or None,
        **_request_settings(settings),
        "wall_s": wall_s,
        "outcome": asdict(outcome),
    }


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
