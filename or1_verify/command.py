"""The command ``or1-verify``: scores a file of recorded responses. It exits with 2 if its input is wrong."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from or1_verify.config import read_config
from or1_verify.errors import UserError
from or1_verify.problems.rows import shown
from or1_verify.recorded import RecordedRow, try_verifier, verify_file
from or1_verify.types import Verdict, VerdictStatus

_USER_ERRORS = (UserError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (by default those of the process), and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        config = read_config(options.config).model_copy(update={"workers": options.workers})
        if options.verifier:
            try_verifier(options.file, options.verifier, config, _explain)
            print(f"right: from {config.right_reward:g} up (verify.right_reward)")
            return 0
        if options.out is None:
            raise UserError("--out is missing: expected a file for the verdicts, or --try FILE:function")
        tally = verify_file(options.file, options.out, config, options.unusable, _explain if options.explain else None)
    except _USER_ERRORS as error:
        print(f"or1-verify: error: {error}", file=sys.stderr)
        return 2
    print(_table(tally))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "or1-verify",
        description="Score recorded responses: ground truths as in training, 'truncated' optional. Prints a table by "
        "source.",
    )
    parser.add_argument(
        "file", type=Path, metavar="IN", help="rows of problems (.jsonl, .parquet), each with a 'response'"
    )
    parser.add_argument("--out", type=Path, help="the same rows with reward, status and detail; resumed, if begun")
    parser.add_argument(
        "--try",
        dest="verifier",
        metavar="FILE:function",
        help="show what a verifier or reward function of your own says of the first 20 rows; writes nothing",
    )
    parser.add_argument("--config", type=Path, help="a YAML file, for its section verify")
    parser.add_argument("--workers", type=_positive, default=1, metavar="N", help="rows judged at once (1)")
    parser.add_argument(
        "--unusable",
        choices=("refuse", "drop"),
        default="refuse",
        help="rows that cannot be used. refuse: list them and stop; drop: give them the status error (refuse)",
    )
    parser.add_argument("--explain", action="store_true", help="print why, row by row")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer above 0")
    return int(text)


def _explain(row: RecordedRow, verdict: Verdict) -> None:
    answer = shown(verdict.answer) if verdict.answer else "no answer"
    print(f"{row.origin}  {verdict.status}  {verdict.reward:g}  {row.source}  {verdict.detail}  [{answer}]", flush=True)


def _table(tally: Mapping[str, Counter[str]]) -> str:
    statuses = [status for status in get_args(VerdictStatus) if any(counts[status] for counts in tally.values())]
    rows = [("source", "rows", "accuracy", *statuses)]
    total: Counter[str] = sum(tally.values(), Counter())
    for source, counts in [*sorted(tally.items()), *([("all", total)] if len(tally) > 1 else [])]:
        count = counts.total()
        rows.append((source, str(count), f"{counts['right'] / count:.3f}", *(str(counts[name]) for name in statuses)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows
    )
