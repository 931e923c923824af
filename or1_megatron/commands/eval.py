"""``or1 eval``: a model's engines or endpoint, verifiers, and the evaluation between them."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from or1_megatron.commands.local_model import load_local_model
from or1_megatron.config.schema import MathConfig
from or1_megatron.convert.to_hf import megatron_to_hf
from or1_megatron.data.problems import check_ground_truths
from or1_megatron.data.rows import DataError
from or1_megatron.data.unusable import FILE_NAME, UnusableRows
from or1_megatron.data.verifier_threads import VerifierThreads
from or1_megatron.evaluate.benchmarks import BENCHMARKS, load_set, published
from or1_megatron.evaluate.comparison import compare
from or1_megatron.evaluate.outcome import check_verdicts, summarise
from or1_megatron.evaluate.responses import RESULTS, EvaluationError, Response, ResponseStore, settings_begun_with
from or1_megatron.evaluate.run import evaluate, missing_count
from or1_megatron.evaluate.settings import PAPER_RESPONSE_TOKENS, EvaluationSettings
from or1_megatron.interfaces import Sampler
from or1_megatron.report.comparison import comparison_page, show_comparison
from or1_megatron.report.console.evaluation import show_evaluation
from or1_megatron.report.figures.evaluation import draw_evaluation
from or1_megatron.rollout.openai_sampler import Endpoint, OpenAISampler
from or1_megatron.runtime.files import write_atomically
from or1_megatron.types import Problem, Sampling
from or1_megatron.verify.registry import build_verifiers, known_abilities

_LIST_TIMEOUT_S = 10.0


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

    ``out`` gets responses.jsonl as they come, then results.json and results.svg. After a kill the same call resumes and
    samples only what is missing; a larger ``samples`` adds to what there is. ``samples`` None: as many as the report
    has of a set, else one.

    Raises:
        DataError, ModelError, ConvertError, EngineError: the set, the model or an engine cannot be used.
        EvaluationError: the folder holds another evaluation, requests failed, or too many verdicts failed.
    """
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
        settings, chosen = with_length(settings, model, problems, out, console)
        asked = {"model": model, "data": name, "problems": _digest(problems), **_request_settings(settings)}
        with closing(ResponseStore(out, asked)) as store, _bar(console) as bar:
            task = bar.add_task(name)

            def show(judged: int, wanted: int) -> None:
                bar.update(task, completed=judged, total=wanted)

            opened: AbstractContextManager[Sampler | None] = nullcontext()
            if missing := missing_count(problems, samples, store):  # else the model is not started
                verifiers.start()  # its processes load while the engines do
                opened = open_model(model, settings, problems, missing, out, console, chosen)
            with opened as sampler:
                responses = evaluate(problems, samples, sampler, verifiers.verdict, store, settings.seed, show)
    results = _results(
        model, name, responses, settings, (since, until), loaded.release, time.perf_counter() - started_s
    )
    write_atomically(out / RESULTS, (json.dumps(results, indent=2) + "\n").encode(), "the evaluation's results")
    write_atomically(out / "results.svg", draw_evaluation(results).encode(), "the evaluation's picture")
    show_evaluation(results, published(name), console)
    return results


def compare_evaluations(first: Path, second: Path, out: Path | None, console: Console) -> None:
    """Print how two finished evaluations differ, and write ``out``/comparison.md. Raises EvaluationError."""
    found = asdict(compare(first, second))
    show_comparison(found, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / "comparison.md", comparison_page(found).encode(), "the comparison")
        console.print(str(out / "comparison.md"), highlight=False, soft_wrap=True)


def _samples(given: int | None, name: str, settings: EvaluationSettings) -> int:
    """Return how many samples to take. Raises EvaluationError for several where all would be the same."""
    greedy = settings.temperature == 0.0
    if greedy and given is not None and given > 1:
        raise EvaluationError(
            f"--k {given} with temperature 0, at which all samples of a problem are the same; expected --k 1, or a "
            "higher temperature"
        )
    known = BENCHMARKS.get(name)
    return given or (1 if greedy or known is None else known.samples)


def _verifiers(problems: Sequence[Problem], settings: EvaluationSettings) -> VerifierThreads:
    config = settings.verify
    abilities = frozenset(problem.ability for problem in problems) & known_abilities(config)
    return VerifierThreads(lambda: build_verifiers(config, abilities), config.workers)


def with_length(
    settings: EvaluationSettings, model: str, problems: Sequence[Problem], out: Path, console: Console
) -> tuple[EvaluationSettings, str]:
    """Return the settings with ``max_response_tokens``, and what was chosen.

    If none is given it is that of the evaluation in ``out``, else the paper's, or what the longest prompt leaves of the
    model's context if that is less.
    """
    if settings.max_response_tokens is not None:
        return settings, ""
    tokens, chosen = PAPER_RESPONSE_TOKENS, ""
    if (begun := settings_begun_with(out)) is not None:
        tokens = begun.get("max_response_tokens", tokens)
    elif not _is_endpoint(model):
        local = load_local_model(_hf_folder(Path(model), out, console))
        context = local.shape.positions
        prompt = local.longest_prompt(problems, min(settings.max_prompt_tokens, context - 1))
        if context - prompt < tokens:
            tokens = context - prompt
            chosen = (
                f"responses of up to {tokens} tokens, the model's context of {context} less the longest prompt's "
                f"{prompt} (max_response_tokens)"
            )
    return settings.model_copy(update={"max_response_tokens": tokens}), chosen


@contextmanager
def open_model(
    model: str,
    settings: EvaluationSettings,
    problems: Sequence[Problem],
    requests: int,
    out: Path,
    console: Console,
    chosen: str = "",
) -> Iterator[Sampler]:
    """Open a sampler over the model for so many requests; it ends with the context.

    Args:
        chosen: what else was chosen for the user, to be printed with the size of the KV cache.
    """
    assert settings.max_response_tokens is not None
    sampling = Sampling(settings.temperature, settings.top_p, settings.max_response_tokens)
    if _is_endpoint(model):
        yield OpenAISampler(_endpoint(model, settings), sampling)
        return
    local = load_local_model(_hf_folder(Path(model), out, console))
    limit = min(settings.max_prompt_tokens, local.shape.positions - settings.max_response_tokens)
    if limit < 1:
        raise EvaluationError(
            f"max_response_tokens = {settings.max_response_tokens} leaves no room for a prompt within the model's "
            f"max_position_embeddings = {local.shape.positions}; lower it (--set max_response_tokens=...)"
        )
    longest = max(1, local.longest_prompt(problems, limit)) + settings.max_response_tokens
    engines, cache = local.fit_kv_cache(settings.dtype, settings.engines, longest, requests)
    if chosen or cache:
        console.print("; ".join(filter(None, (chosen, cache))), highlight=False, soft_wrap=True)
    with local.sampler(settings.dtype, engines, longest, sampling, limit) as sampler:
        yield sampler


def _is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


def _hf_folder(model: Path, out: Path, console: Console) -> Path:
    """Return the folder itself, or one made of a Megatron checkpoint, which is kept for the next call."""
    if (model / "config.json").is_file():
        return model
    if not model.is_dir():
        raise EvaluationError(
            f"--model {model}: no such folder; expected an HF folder, a Megatron checkpoint, or the URL of an "
            "OpenAI-compatible server (http://host:8000/v1)"
        )
    made = out / "model"
    if not (made / "config.json").is_file():
        megatron_to_hf(model, made, console)
    return made


def _endpoint(url: str, settings: EvaluationSettings) -> Endpoint:
    key = None
    if settings.api_key_variable is not None:
        key = os.environ.get(settings.api_key_variable)
        if not key:
            raise EvaluationError(
                f"environment variable {settings.api_key_variable}, which should hold the key, is not set"
            )
    name = settings.model or _first_model(url, key)
    return Endpoint(url, name, key, settings.concurrent, settings.request_timeout_s, settings.tries)


def _first_model(url: str, key: str | None) -> str:
    request = urllib.request.Request(
        f"{url.rstrip('/')}/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=_LIST_TIMEOUT_S) as reply:
            return str(json.loads(reply.read())["data"][0]["id"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise EvaluationError(
            f"--model {url}: its /models names no model ({type(error).__name__}: {error}); expected an "
            "OpenAI-compatible server, the URL up to /chat/completions (http://host:8000/v1), or --set model=NAME"
        ) from None


def _digest(problems: Sequence[Problem]) -> str:
    text = json.dumps([[problem.id, problem.ground_truth] for problem in problems])
    return f"{len(problems)} {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _request_settings(settings: EvaluationSettings) -> dict[str, Any]:
    """Return what a response and its verdict depend on: not how many engines or requests serve it."""
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
