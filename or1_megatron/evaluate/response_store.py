"""Stores the responses of ``or1 eval`` on disk, a JSON line each, as soon as they are judged, and resumes from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from or1_megatron.runtime.files import write_atomically
from or1_megatron.runtime.jsonl import JsonlWriter, read_rows
from or1_verify.errors import UserError


class EvaluationError(UserError, ValueError):
    """An evaluation cannot be made, resumed or trusted; the message says why."""


@dataclass(frozen=True, slots=True)
class Response:
    """One response with its verdict: a line of ``responses.jsonl``."""

    problem_id: str
    sample: int
    source: str
    ability: str
    ground_truth: str
    prompt: str
    response: str
    tokens: int | None
    """Length of the response; None if an endpoint does not report the length, or nothing was sampled."""
    truncated: bool
    reward: float
    status: str
    """Status of the verdict, or ``unasked`` if the prompt is too long."""
    answer: str
    detail: str
    seed: int


RESPONSES, RESULTS = "responses.jsonl", "results.json"
_SETTINGS = "evaluation.json"
_FIELDS = tuple(field.name for field in fields(Response))


class ResponseStore:
    """The files of one evaluation: ``responses.jsonl``, and ``evaluation.json`` with its problems and settings."""

    def __init__(self, folder: Path, request_settings: Mapping[str, Any]) -> None:
        """Open the store in ``folder``. ``request_settings``: the settings on which responses depend.

        Raises:
            EvaluationError: the folder holds an evaluation with other settings, or a damaged evaluation.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RESPONSES
        wanted = json.loads(json.dumps(dict(request_settings)))
        if (begun := settings_begun_with(folder)) is not None:
            keys = [key for key in dict.fromkeys((*begun, *wanted)) if begun.get(key) != wanted.get(key)]
            changed = "\n".join(f"  {key}: was {begun.get(key)!r}, now {wanted.get(key)!r}" for key in keys)
            if keys:
                otherwise = "holds an evaluation that was made otherwise; name another --out, or put these back"
                raise EvaluationError(f"{folder} {otherwise}:\n{changed}")
        else:
            content = (json.dumps(wanted, indent=2) + "\n").encode()
            write_atomically(folder / _SETTINGS, content, "the evaluation's settings")
        self._writer = JsonlWriter(self.path, "responses")
        self._known: dict[tuple[str, int], Response] = {}
        for number, row in enumerate(read_rows(self.path), start=1):
            try:
                response = Response(**row)
            except TypeError as error:
                raise EvaluationError(
                    f"{self.path}: row {number} is no response of an evaluation ({error}); found {sorted(row)}, "
                    f"expected {sorted(_FIELDS)}: take the row out, and it is asked for again, or name another --out"
                ) from None
            self._known[response.problem_id, response.sample] = response

    def get(self, problem_id: str, sample: int) -> Response | None:
        return self._known.get((problem_id, sample))

    def add(self, response: Response) -> None:
        self._writer.write({name: getattr(response, name) for name in _FIELDS})  # asdict copies: 50 us a response
        self._known[response.problem_id, response.sample] = response

    def close(self) -> None:
        self._writer.close()


def settings_begun_with(folder: Path) -> dict[str, Any] | None:
    """Return the settings of the evaluation in a folder; None if the folder holds no responses. Raises EvaluationError
    if the settings are not JSON."""
    responses, settings = folder / RESPONSES, folder / _SETTINGS
    if not (settings.is_file() and responses.is_file() and responses.stat().st_size):
        return None
    try:
        begun: dict[str, Any] = json.loads(settings.read_text())
    except ValueError as error:
        raise EvaluationError(
            f"{settings}: not JSON ({error}), so that how {folder} was asked is not known; name another --out, or "
            "delete the file if it was asked as now"
        ) from None
    return begun
