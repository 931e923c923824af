"""Problem files into ``Problem`` records, strictly: a row that cannot be used is named by file, line and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from or1_megatron.data.files import read_rows
from or1_verify.problems.problem import DIFFICULTY_TRIES, check_ground_truth, read_problem
from or1_verify.problems.rows import DataError, RowError
from or1_verify.problems.unusable import UnusableRows
from or1_verify.types import Problem, Verifier


def load_problems(
    path: Path, split: str | None = None, unusable: UnusableRows | None = None, subset: str | None = None
) -> list[Problem]:
    """Read all problems of a ``.jsonl`` or ``.parquet`` file, a folder of them, or a set on the hub, in their order.

    The layout is any of ``or1_verify.problems.layouts``: Skywork-OR1-RL-Data, {prompt, answer}, AIME, ... ``split``
    chooses among a folder's or a hub set's splits, such as math and code; ``subset`` is a hub set's configuration. That
    a ground truth can be read is left to ``check_ground_truths``, since the abilities that occur say which verifiers
    are needed.

    Args:
        unusable: takes the rows that cannot be used, a second row of the same problem among them; the caller settles
            them. None: they are refused.

    Raises:
        DataError: a file that is missing or cannot be read, a set without rows, or unusable rows.
    """
    path = Path(path)
    problems: list[Problem] = []
    origin_of: dict[str, str] = {}
    faults = UnusableRows() if unusable is None else unusable
    count = 0
    for origin, raw in read_rows(path, split, subset):
        count += 1
        try:
            problem = read_problem(raw, origin, default_source=path.stem)
            if problem.id in origin_of:
                raise RowError(
                    origin,
                    "the same problem as an earlier row",
                    f"the same problem as {origin_of[problem.id]} (source '{problem.source}' and messages are equal); "
                    "expected each problem once: delete one, or raise the source's repeat",
                )
        except RowError as error:
            faults.add(error)
        else:
            origin_of[problem.id] = origin
            problems.append(problem)
    if not count:
        raise DataError(f"{path}: holds no problems; expected at least one row")
    if unusable is None:
        faults.refuse()
    return problems


def check_ground_truths(
    problems: Sequence[Problem], verifiers: Mapping[str, Verifier], unusable: UnusableRows
) -> list[Problem]:
    """Return the problems whose ability has a verifier that can use their ground truth; the others are ``unusable``."""
    usable = []
    for problem in problems:
        try:
            check_ground_truth(problem, verifiers)
            usable.append(problem)
        except RowError as error:
            unusable.add(error)
    return usable


def filter_by_difficulty(problems: Sequence[Problem], model: str, unusable: UnusableRows) -> list[Problem]:
    """Return the problems that ``model`` neither always solved nor never (failures other than 0 and 16).

    A problem at which that model was not measured is ``unusable``. Raises DataError when nothing is left otherwise.
    """
    kept, before = [], len(unusable)
    for problem in problems:
        if model not in problem.difficulty:
            measured = ", ".join(sorted(problem.difficulty)) or "none"
            unusable.add(
                RowError(
                    problem.origin,
                    f"no model_difficulty of '{model}'",
                    f"field 'extra_info.model_difficulty': no entry for '{model}' (measured: {measured}); expected its "
                    f"failures in {DIFFICULTY_TRIES} tries; drop data.difficulty_model or name a measured model",
                )
            )
        elif problem.difficulty[model] not in (0, DIFFICULTY_TRIES):
            kept.append(problem)
    if not kept and len(unusable) == before:
        raise DataError(
            f"difficulty filter for '{model}' leaves none of {len(problems)} problems: at each it failed 0 or "
            f"{DIFFICULTY_TRIES} of {DIFFICULTY_TRIES} tries"
        )
    return kept
