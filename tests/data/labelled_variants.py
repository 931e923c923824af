"""A labelled set for near-duplicates: statements, and for each one a variant that is the same problem or another one.

Every base statement (the example's mathematics and programs) gets one variant. Half of the variants are the same
problem in other words: formatting, commands, boilerplate, typing errors, other names, synonyms, one to three of them at
once. The other half are different problems that look alike: a number changed, numbers exchanged, a word that turns the
meaning, another quantity asked for. The bases stand first, so what is excluded is a variant or a base's twin.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from or1_megatron.data.pipeline.duplicates import DuplicateStep, ExactDuplicates, NearDuplicates
from or1_megatron.data.pipeline.recipe import DuplicatesConfig
from or1_megatron.data.pipeline.records import Candidate, Exclusion, write_shard

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "data"))
from code_problems import FUNCTIONS, STDIN
from exam_problems import EXAM
from math_problems import draw

Edit = Callable[[str, random.Random], str]

_NAMES = {"Marta": "Julia", "Ines": "Noor", "Ada": "Eva", "Bo": "Tom", "ABC": "XYZ", "taxi": "cab", "pump": "hose"}
_SYNONYMS = {
    "people": "persons", "altogether": "in total", "begins": "starts", "needed": "required", "miles": "leagues",
    "chosen": "selected", "rolled": "thrown", "different": "distinct", "equal": "identical", "walks": "moves",
    "Working": "Running", "length": "measure", "given": "provided", "stirred": "mixed", "surrounded": "enclosed",
    "written": "noted", "costs": "comes to", "shown": "visible", "empties": "drains",
    "text": "string", "list": "array", "today": "now", "numbers": "values",
}  # fmt: skip
_COMMANDS = {
    "Find ": "Determine ", "What is ": "Compute ", "Compute ": "Calculate ", "Evaluate ": "Work out ",
    "Print ": "Print out ", "Return ": "Give back ", "How many ": "Find how many ", "Determine ": "Find ",
}  # fmt: skip
_TURNS = {
    "more": "fewer", "positive": "negative", "larger": "smaller", "smaller": "larger", "largest": "smallest",
    "smallest": "largest", "remainder": "quotient", "sum": "product", "area": "perimeter", "odd": "even",
    "add": "multiply", "least": "greatest", "longest": "shortest", "front": "last", "reverse": "alphabetical",
    "zeros": "nines", "divisors": "multiples", "both": "neither", "shortest": "longest", "falling": "rising",
    "vowels": "consonants",
}  # fmt: skip


def dress(text: str, rng: random.Random) -> str:
    forms = (
        lambda t: f"{rng.randint(1, 40)}. {t}",
        lambda t: f"**Problem {rng.randint(1, 40)}.** {t}",
        lambda t: t.replace("$", " $ ").replace(", ", ",\n"),
        lambda t: t.replace("$", ""),
        lambda t: t.upper() if "\\" not in t else t,
        lambda t: t.replace("\\frac", "\\dfrac").rstrip("."),
    )
    return rng.choice(forms)(text)


def command(text: str, rng: random.Random) -> str:
    for before, after in _COMMANDS.items():
        if before in text:
            return text.replace(before, after, 1)
    return f"Please solve this: {text}"


def boilerplate(text: str, rng: random.Random) -> str:
    added = ("Express your answer in simplest form.", "Give your answer as a single number.", "Justify your answer.",
             "Please show all work.", "State the answer clearly.", "Write your final answer in a box.")  # fmt: skip
    return f"{text} {rng.choice(added)}"


def typing(text: str, rng: random.Random) -> str:
    """One letter of a longer word is lost."""
    words = list(re.finditer(r"(?<![\\\w])[a-z]{6,}(?!\w)", text))
    if not words:
        return text
    at = rng.choice(words).start() + rng.randint(1, 4)
    return text[:at] + text[at + 1 :]


def swap_words(table: dict[str, str], most: int) -> Edit:
    def edit(text: str, rng: random.Random) -> str:
        there = [word for word in table if re.search(rf"\b{word}\b", text)]
        for word in rng.sample(there, min(most, len(there))):
            text = re.sub(rf"\b{word}\b", table[word], text)
        return text

    return edit


SAME: tuple[Edit, ...] = (dress, command, boilerplate, typing, swap_words(_NAMES, 2), swap_words(_SYNONYMS, 2))


def other_number(text: str, rng: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    number = rng.choice(found)
    return text[: number.start()] + str(int(number[0]) + rng.choice([1, 2, 10])) + text[number.end() :]


def exchanged(text: str, rng: random.Random) -> str:
    found = list(re.finditer(r"\d+", text))
    if len({number[0] for number in found}) < 2:
        return text
    one, other = sorted(rng.sample(found, 2), key=lambda number: number.start())
    return text[: one.start()] + other[0] + text[one.end() : other.start()] + one[0] + text[other.end() :]


def asks_else(text: str, rng: random.Random) -> str:
    """The same story, another question: the hardest kind, since no number differs."""
    asks = (("length of the hypotenuse", "area of the triangle"), ("How old is Ines", "How old is Marta"),
            ("after how many hours do they meet", "how far apart are they after an hour"))  # fmt: skip
    for before, after in asks:
        if before in text:
            return text.replace(before, after)
    return text


OTHER: tuple[tuple[Edit, int], ...] = (
    (other_number, 5), (exchanged, 3), (swap_words(_TURNS, 1), 3), (asks_else, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Labelled:
    base: str
    variant: str
    same: bool


def labelled_set(seed: int, each: int) -> list[Labelled]:
    """Return a variant for every base statement, ``each`` of every kind of the example's; half are the same problem."""
    rng = random.Random(seed)
    bases = [problem.statement for problem in (*draw(seed, each), *EXAM)]
    bases += [problem.statement for problem in (*STDIN, *FUNCTIONS)]
    pairs = []
    for number, base in enumerate(bases):
        others = [edit for edit, weight in OTHER for _ in range(weight)]
        rng.shuffle(others)
        changed = [text for edit in others if (text := edit(base, rng)) != base] if number % 2 == 0 else []
        if changed:
            pairs.append(Labelled(base, changed[0], False))
            continue
        variant = base
        while variant == base:
            variant, edits = base, rng.sample(SAME, rng.randint(1, 3))
            for edit in sorted(edits, key=lambda edit: edit is dress):  # numbering stands before all else
                variant = edit(variant, rng)
        pairs.append(Labelled(base, variant, True))
    return pairs


def judged(pairs: list[Labelled], config: DuplicatesConfig) -> list[bool]:
    """Return for each variant whether the steps take it for a copy of its own base."""
    texts = [pair.base for pair in pairs] + [pair.variant for pair in pairs]
    rows = [Candidate("math", text, '["1"]', id=str(n), origin=str(n)) for n, text in enumerate(texts)]
    hits = [False] * len(pairs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part-00000.parquet"
        step: DuplicateStep
        for step in (ExactDuplicates(), NearDuplicates(config)):
            write_shard(path, rows)
            step.prepare([path])
            outcomes = step.apply(rows, 0)
            for outcome in outcomes:
                if isinstance(outcome, Exclusion):
                    own = int(outcome.candidate.id) - len(pairs)
                    # by chance a variant can be another base word for word: a copy, but not of its own base
                    hits[own] |= own >= 0 and outcome.evidence["of"] == str(own)
            rows = [outcome for outcome in outcomes if isinstance(outcome, Candidate)]
    return hits


def scores(pairs: list[Labelled], hits: list[bool]) -> tuple[float, float]:
    """(recall, precision)."""
    right = sum(pair.same and hit for pair, hit in zip(pairs, hits, strict=True))
    return right / sum(pair.same for pair in pairs), right / max(sum(hits), 1)
