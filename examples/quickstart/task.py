"""The quickstart's problems: multi-step integer arithmetic with brackets, every value within 0..MAX_VALUE.

A problem is an expression tree of two to four operations (+ - *), printed with the fewest brackets that keep its
meaning and always with at least one pair, so that answering at once is mostly wrong and writing the steps pays.
Rows have the schema of Skywork-OR1-RL-Data. A stable hash of the normalised problem text decides whether a problem
is held out, so a training and a held-out set are disjoint whatever seeds they were drawn with.

    python examples/quickstart/task.py --out DIR --train 8000 --held-out 256 --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_VALUE = 60  # the largest literal, intermediate value or answer; the tokenizer has one token per number up to it
MAX_LITERAL = 20
MAX_FACTOR = 9  # neither side of a product exceeds it
OPERATION_COUNTS = (2, 3, 4)
OPERATORS = ("+", "-", "*")
OPERATOR_WEIGHTS = (4, 4, 3)
REDRAW_WHOLE = 6  # of more operations, each side is drawn until its values are allowed: all anew would take seconds
HELD_OUT_ONE_IN = 8  # one problem text in eight is held out
PROMPT_PREFIX = "Compute "
PROMPT_SUFFIX = "."

_PRECEDENCE = {"+": 1, "-": 1, "*": 2}


@dataclass(frozen=True)
class Expression:
    """A number (`operator` is empty, no children) or an operation on two expressions; `value` is what it equals."""

    value: int
    operator: str = ""
    left: Expression | None = None
    right: Expression | None = None

    @property
    def is_number(self) -> bool:
        return not self.operator

    def children(self) -> tuple[Expression, Expression]:
        """Both operands of an operation; a number has none and raises ValueError."""
        if self.left is None or self.right is None:
            raise ValueError(f"{self.value} is a number: it has no operands")
        return self.left, self.right

    def render(self) -> str:
        """Text with the fewest brackets under the usual precedence and left-to-right grouping."""
        if self.is_number:
            return str(self.value)
        left, right = self.children()
        rank = _PRECEDENCE[self.operator]
        left_text, right_text = left.render(), right.render()
        if left.operator and _PRECEDENCE[left.operator] < rank:
            left_text = f"({left_text})"
        if right.operator and _PRECEDENCE[right.operator] <= rank:
            right_text = f"({right_text})"
        return f"{left_text}{self.operator}{right_text}"


@dataclass(frozen=True)
class Problem:
    """One problem: the text shown to the model, its tree and its number of operations."""

    text: str
    expression: Expression
    operations: int

    @property
    def answer(self) -> int:
        return self.expression.value


def apply_operator(operator: str, left: int, right: int) -> int | None:
    """The value of `left operator right`, or None where the task does not allow it (see the limits above)."""
    if operator == "*":
        value = left * right if max(left, right) <= MAX_FACTOR else -1
    else:
        value = left + right if operator == "+" else left - right
    return value if 0 <= value <= MAX_VALUE else None


def make_expression(rng: random.Random, operations: int) -> Expression | None:
    """A random tree with this many operations, or None when a value left the allowed range (draw again)."""
    if operations == 0:
        return Expression(rng.randint(1, rng.choice((MAX_FACTOR, MAX_LITERAL))))
    left_operations = rng.randrange(operations)
    left = make_expression(rng, left_operations)
    right = make_expression(rng, operations - 1 - left_operations)
    while operations > REDRAW_WHOLE and (left is None or right is None):
        left = left or make_expression(rng, left_operations)
        right = right or make_expression(rng, operations - 1 - left_operations)
    if left is None or right is None:
        return None
    operator = rng.choices(OPERATORS, OPERATOR_WEIGHTS)[0]
    value = apply_operator(operator, left.value, right.value)
    return None if value is None else Expression(value, operator, left, right)


def make_problem(rng: random.Random, operations: int, held_out: bool | None = None) -> Problem:
    """Draw a problem with at least one pair of brackets; `held_out` restricts it to one side of the hash."""
    if operations < 2:
        raise ValueError(f"a problem needs at least 2 operations to have brackets, got {operations}")
    while True:
        expression = make_expression(rng, operations)
        if expression is None or "(" not in expression.render():
            continue
        text = f"{PROMPT_PREFIX}{expression.render()}{PROMPT_SUFFIX}"
        if held_out is None or is_held_out(text) == held_out:
            return Problem(text, expression, operations)


def normalise(text: str) -> str:
    """What two statements of one problem share: the text without white space, in lower case."""
    return "".join(text.split()).lower()


def is_held_out(text: str) -> bool:
    """Which side of the split a problem belongs to: a function of its normalised text alone."""
    digest = hashlib.sha256(normalise(text).encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def problem_row(problem: Problem, index: int, failures_of_16: Mapping[str, int] | None = None) -> dict[str, Any]:
    """A row in the schema of Skywork-OR1-RL-Data.

    `failures_of_16` maps a model's name to how many of 16 attempts it failed; nobody has measured new problems,
    so by default the mapping is empty.
    """
    return {
        "data_source": f"quickstart-arith-{problem.operations}ops",
        "prompt": [{"role": "user", "content": problem.text}],
        "ability": "math",
        "reward_model": {"ground_truth": json.dumps([str(problem.answer)]), "style": "rule"},
        "extra_info": {"index": index, "model_difficulty": dict(failures_of_16 or {})},
    }


def draw_problems(seed: int, held_out: bool, operations: Sequence[int] = OPERATION_COUNTS) -> Iterator[Problem]:
    """Distinct problems of one side of the split without end, the numbers of operations by turns."""
    rng = random.Random(f"quickstart problems, seed {seed}, held out {held_out}")
    seen: set[str] = set()
    turn = 0
    while True:
        problem = make_problem(rng, operations[turn % len(operations)], held_out)
        key = normalise(problem.text)
        if key not in seen:
            seen.add(key)
            turn += 1
            yield problem


def dataset_text(
    seed: int, held_out: bool, count: int, operations: Sequence[int] = OPERATION_COUNTS, wrong_one_in: int = 0
) -> str:
    """`count` rows as JSON lines; a smaller count with the same seed gives a prefix of a larger one.

    One gold answer in `wrong_one_in` is off by one, as in data that nobody has verified; 0: none.
    """
    problems = draw_problems(seed, held_out, operations)
    rows = [problem_row(next(problems), index) for index in range(count)]
    for row in rows[wrong_one_in - 1 :: wrong_one_in] if wrong_one_in else ():
        right = int(json.loads(row["reward_model"]["ground_truth"])[0])
        row["reward_model"]["ground_truth"] = json.dumps([str(right + 1)])
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_if_changed(path: Path, text: str) -> bool:
    """Put `text` at `path` in one move, or leave a file that already holds it alone. Returns whether it wrote."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the quickstart's train.jsonl and heldout.jsonl.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--train", type=int, default=8000, help="number of training problems")
    parser.add_argument("--held-out", type=int, default=256, help="number of held-out problems")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--operations", type=int, nargs="+", default=OPERATION_COUNTS, help="of the problems, by turns")
    parser.add_argument("--wrong-one-in", type=int, default=0, help="of the training problems' answers; 0: none")
    options = parser.parse_args()
    for name, held_out, count in (("train", False, options.train), ("heldout", True, options.held_out)):
        path = options.out / f"{name}.jsonl"
        wrong_one_in = 0 if held_out else options.wrong_one_in
        text = dataset_text(options.seed, held_out, count, options.operations, wrong_one_in)
        wrote = write_if_changed(path, text)
        print(f"{path}: {count} problems, {'written' if wrote else 'already there'}")


if __name__ == "__main__":
    main()
