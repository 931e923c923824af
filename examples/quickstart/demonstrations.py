"""Demonstrations that warm the quickstart's base model up: three habits, told apart by their first token.

- careful: reduces the expression one operation at a time and gives the answer. Which of the possible operations
  comes first, and the words between steps, are free choices, so that a policy which is always careful still has
  entropy.
- guess: answers at once or after one step, mostly wrong.
- ramble: repeats, hedges and starts again at length; some of it is still going on where a context ends, the rest
  stops with a guess or by turning careful.

Reinforcement learning then has a good habit to prefer, and need not teach arithmetic that supervision did not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the folder of an example is not a package
from task import MAX_VALUE, OPERATION_COUNTS, Expression, Problem, make_problem

CAREFUL, GUESS, RAMBLE = "careful", "guess", "ramble"
HABIT_SHARES = {CAREFUL: 0.30, GUESS: 0.32, RAMBLE: 0.38}
OPERATION_COUNT_WEIGHTS = (1, 2, 4)  # of OPERATION_COUNTS: long problems are what takes practice
HABIT_PREFIXES = {CAREFUL: "Step by step: ", GUESS: "Easy: ", RAMBLE: "Hmm, "}  # one token each
CAREFUL_PREFIX = HABIT_PREFIXES[CAREFUL]  # append it to the generation prompt to force the careful habit

STEP_OPENERS = {"": 4, "Now ": 3, "Next ": 2, "Then ": 2}
STEP_CONNECTIVES = {", so ": 5, ", leaving ": 3, ", giving ": 2, ", hence ": 2}
HEDGES = ("maybe ", "perhaps ", "about ")
DOUBTS = ("wait, ", "no, ", "again ")
GUESS_RIGHT_SHARE = 0.1
GUESS_STEP_SHARE = 0.5  # of the guesses, those that write one step first
GUESS_ERROR_MAX = 9
RAMBLE_STOP_SHARE = 0.12  # the chance that each wandering remark is the last
RAMBLE_CAREFUL_END_SHARE = 0.5  # of the rambles that stop, those that end by careful steps
RAMBLE_MAX_REMARKS = 24


@dataclass(frozen=True)
class Demonstration:
    """One supervised example. The response follows the template's `<think>\\n`; the end token is the trainer's."""

    prompt_messages: list[dict[str, str]]
    response: str
    habit: str
    problem: Problem


def draw(rng: random.Random, weights: dict[str, int]) -> str:
    """One key, by weight."""
    return rng.choices(list(weights), list(weights.values()))[0]


def reducible(expression: Expression) -> list[Expression]:
    """The operations whose operands are both numbers, left to right: each may be worked out next."""
    if expression.is_number:
        return []
    left, right = expression.children()
    if left.is_number and right.is_number:
        return [expression]
    return reducible(left) + reducible(right)


def reduce_at(expression: Expression, target: Expression) -> Expression:
    """The expression with `target` (one of its nodes, by identity) replaced by its value."""
    if expression is target:
        return Expression(target.value)
    if expression.is_number:
        return expression
    left, right = expression.children()
    return Expression(expression.value, expression.operator, reduce_at(left, target), reduce_at(right, target))


def equation(operation: Expression) -> str:
    return f"{operation.render()}={operation.value}"


def answer(value: int) -> str:
    """The end of the reasoning and the answer."""
    return f"</think>\\boxed{{{value}}}"


def careful_steps(rng: random.Random, expression: Expression, one_wording: bool = False) -> str:
    """One line per operation, with what is left of the expression after it, then the answer.

    `one_wording`: always the leftmost operation and the first words, so that nothing is a free choice.
    """
    lines: list[str] = []
    while not expression.is_number:
        operation = reducible(expression)[0] if one_wording else rng.choice(reducible(expression))
        expression = reduce_at(expression, operation)
        opener, connective = "", next(iter(STEP_CONNECTIVES))
        if not one_wording:
            opener = "" if not lines else draw(rng, STEP_OPENERS)
            connective = "" if expression.is_number else draw(rng, STEP_CONNECTIVES)
        line = opener + equation(operation)
        lines.append(line if expression.is_number else line + connective + expression.render())
    return "\n".join(lines) + "\n" + answer(expression.value)


def guessed_value(rng: random.Random, right: int) -> int:
    """A number near the right one; the right one itself in GUESS_RIGHT_SHARE of the cases."""
    if rng.random() < GUESS_RIGHT_SHARE:
        return right
    low, high = max(0, right - GUESS_ERROR_MAX), min(MAX_VALUE, right + GUESS_ERROR_MAX)
    return rng.choice([value for value in range(low, high + 1) if value != right])


def guess_response(rng: random.Random, expression: Expression) -> str:
    """At most one step, then a number that is near the right one."""
    step = ""
    if rng.random() < GUESS_STEP_SHARE:
        step = equation(rng.choice(reducible(expression))) + "\n"
    return HABIT_PREFIXES[GUESS] + step + answer(guessed_value(rng, expression.value))


def wandering_remark(rng: random.Random, expression: Expression) -> str:
    """A hedge, the question once more, or a first step that leads nowhere."""
    kind = rng.randrange(3)
    if kind == 0:
        return rng.choice(HEDGES) + str(guessed_value(rng, expression.value)) + "?"
    if kind == 1:
        return rng.choice(DOUBTS) + expression.render() + "?"
    return rng.choice(DOUBTS) + equation(rng.choice(reducible(expression))) + "?"


def ramble_response(rng: random.Random, expression: Expression, one_wording: bool = False) -> str:
    """Remarks of geometric number; one that stops gives a guess or turns careful, the longest never stop."""
    lines = [HABIT_PREFIXES[RAMBLE] + wandering_remark(rng, expression)]
    while rng.random() >= RAMBLE_STOP_SHARE:
        lines.append(wandering_remark(rng, expression))
        if len(lines) >= RAMBLE_MAX_REMARKS:
            break
    if rng.random() < RAMBLE_CAREFUL_END_SHARE:
        ending = CAREFUL_PREFIX + careful_steps(rng, expression, one_wording)
    else:
        ending = answer(guessed_value(rng, expression.value))
    return "\n".join(lines) + "\n" + ending


def respond(rng: random.Random, expression: Expression, habit: str, one_wording: bool = False) -> str:
    """A response of one habit to one problem."""
    if habit == CAREFUL:
        return CAREFUL_PREFIX + careful_steps(rng, expression, one_wording)
    return guess_response(rng, expression) if habit == GUESS else ramble_response(rng, expression, one_wording)


def demonstrations(seed: int, careful_first: int = 0, one_wording: bool = False) -> Iterator[Demonstration]:
    """Demonstrations without end, on problems of the training side only; the same arguments give the same ones.

    The first `careful_first` are all careful: the arithmetic is learnt soonest from them. The rest mix the habits
    by HABIT_SHARES. `one_wording`: of careful_steps.
    """
    rng = random.Random(f"quickstart demonstrations, seed {seed}")
    for index in count():
        operations = rng.choices(OPERATION_COUNTS, OPERATION_COUNT_WEIGHTS)[0]
        problem = make_problem(rng, operations, held_out=False)
        mixed_habit = rng.choices(list(HABIT_SHARES), list(HABIT_SHARES.values()))[0]
        habit = CAREFUL if index < careful_first else mixed_habit
        response = respond(rng, problem.expression, habit, one_wording)
        yield Demonstration([{"role": "user", "content": problem.text}], response, habit, problem)
