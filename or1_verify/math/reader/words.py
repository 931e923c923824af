"""The meaning of words in a final answer, from ``words.toml``: units, number words, words that change nothing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Set
from fractions import Fraction
from pathlib import Path

WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
"""The lists of words.toml by name: words, and LaTeX macros for ``reader.normalization``."""
_IN_TEXT_ONLY = frozenset({"force", "energy", "power", "voltage", "frequency", "amount", "gallon", "year"})
"""Dimensions whose units count only inside text macros: ``\\text{N}`` is newton, a bare N is a variable."""

UNITS = {
    spelling: (dimension, Fraction(size))
    for dimension, _, units in (line.partition(" ") for line in WORDS["units"].splitlines())
    for size, *names in map(str.split, units.split(";"))
    for name in names
    for spelling in ((name, f"{name}s") if len(name) > 2 or name in ("hr", "yr") else (name,))
}
"""Word of a unit -> (dimension, size in the dimension's base unit)."""

SYMBOL_UNITS = {"€": "euro", "£": "pound", "¤": "dollar", "¥": "yuan"}
POWER_WORDS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "cu": 3, "立方": 3}

NUMBER_WORDS = {word: number for number, word in enumerate(WORDS["numbers"].split())}
NUMBER_WORDS |= {word: 10 * n for n, word in enumerate(WORDS["tens"].split(), 2)}
ORDINAL_WORDS = tuple(WORDS["ordinals"].split())
MULTIPLIERS: dict[str, int | Fraction] = {"dozen": 12, "hundred": 100, "thousand": 1000, "half": Fraction(1, 2)}
MULTIPLIERS |= {name: 1000**n for n, name in enumerate(("million", "billion", "trillion"), 2)}
MULTIPLIERS |= {word: Fraction(1, n) for n, word in enumerate(ORDINAL_WORDS, 1) if n > 2}
MULTIPLIERS |= {"hundredth": Fraction(1, 100), "thousandth": Fraction(1, 1000), "halve": Fraction(1, 2)}
MULTIPLIERS |= {f"{name}s": size for name, size in MULTIPLIERS.items()}
ROMAN = ("i", "ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii")

HEDGES = frozenset((*WORDS["hedges"].split(), *NUMBER_WORDS, *MULTIPLIERS))
"""Words that change the meaning of a number beside them. A text with such a word is not read as a number."""

NEUTRAL = frozenset(WORDS["neutral"].split())
"""Words beside a number that change nothing: "apple", "each", "total". All other words are part of the answer."""

_ABROAD = frozenset(WORDS["abroad"].split())
LEAD_INS = _ABROAD | frozenset(WORDS["lead_ins"].split())
NAMING = LEAD_INS | NEUTRAL


def change_nothing(words: Iterable[str], known: Set[str] = NEUTRAL) -> bool:
    """Return whether all ``words`` beside a value, in singular or plural, are in ``known``, and so change nothing."""
    return all({word, word.removesuffix("s")} & known for word in words)


JOINERS = frozenset({"and", "or"})
SPOKEN = {word: known for known, words in WORDS["spoken"].items() for word in words.split()}
"""Word of another language -> the English word that the rules know."""
YES_NO = {word: said for said, words in WORDS["whole"].items() for word in words.split()}
"""Word -> its meaning if it is the whole answer, such as 是 for yes (before a value it means "is")."""
_DENSE = [word for word in {*NAMING, *UNITS, *SPOKEN, *POWER_WORDS} if word > "\u3000"]
WITHOUT_SPACES = re.compile("|".join(sorted(_DENSE, key=len, reverse=True)))
"""Words of NAMING, UNITS, SPOKEN and POWER_WORDS in languages that put no space between words."""
QUALIFIERS = frozenset({"where", "for", "with", "only", "here"})

KNOWN_WORDS = frozenset(
    {name.lower() for name, (dimension, _) in UNITS.items() if len(name) > 1 and dimension not in _IN_TEXT_ONLY}
    | set(NUMBER_WORDS)
    | HEDGES
    | (LEAD_INS - _ABROAD)
    | JOINERS
    | QUALIFIERS
    | frozenset(WORDS["common"].split())
) - {"a", "an", "in"}
"""Bare runs of letters that are read as words, not as products of variables."""
