r"""Compares answers in special notations: bases, times, dates, multiple choice, ordinals.

Each rule gets the cleaned gold and answer, and returns whether they agree, or None if the notation is not used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import combinations

from or1_verify.math.reader.normalization import plain
from or1_verify.math.reader.words import NEUTRAL, NUMBER_WORDS, ORDINAL_WORDS, ROMAN

SameValue = Callable[[str, str], bool]

_BASE = re.compile(r"\(?([0-9][0-9A-Z]*|[A-F][0-9A-F]+)\)?_(?:\{([^{}]*)\}|(\d))")
_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?( ?[ap]m)?|(\d{1,2})( ?[ap]m)")
_CHOICE = re.compile(
    r"(?:(?:«(?:option|choice|answer)» ?)?\(([A-H])\)|«(?:Option|Choice|option|choice)» ?([A-H])"
    r"|([A-H]) ?(?:[).:]|-(?= (?:an? )?«)))(.*)|([A-H]) ?(\([^(),]*\))"
)
_SECOND_CHOICE = re.compile(
    r"\b[A-H]\b|^\W*[a-h]\b(?:\W*\b[a-h]\b)*\W*$|(?i:^[\W_]*(?:is|was|can|could|may|might|false)\b"
    r"|\b(?:or|and|not?|nor|neither|wrong|incorrect|maybe|perhaps|possibly|probably|rejected|fails|unless)\b)"
)
_BARE_LETTER = re.compile(r"[A-H]")
_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?"
)
_DATE = re.compile(
    rf"(?:the )?(?:(?P<month>{_MONTH}) ?\.? (?P<day>\d{{1,2}})|(?P<before>\d{{1,2}}) (?:of )?(?P<of>{_MONTH}))"
    r"(?:,? (?P<year>\d{4}))?"
)
_NUMBERED = re.compile(r"(\d{1,3}) ?(?:st|nd|rd|th)(?: ([a-z]{3,}))?")
_ORDINAL_WORD = re.compile(r"([a-z]+)(?: ([a-z]{3,}))?")
_ROMAN_BEHIND = re.compile(r"([a-z]{3,}) ([ivx]+)")
_RISING = {"".join(letters) for n in range(2, 9) for letters in combinations("ABCDEFGH", n)}


def based(cleaned: str) -> tuple[str, int] | None:
    """Return (digits, base) of a number such as ``1011_2``; None for any other text."""
    text = re.sub(r"[\s«»]", "", cleaned)
    match = _BASE.fullmatch(text)
    if match is None:
        return None
    said = (match[2] or match[3] or "").lower()
    base = int(said) if said.isdigit() else NUMBER_WORDS.get(said, 0)
    return (match[1], base) if 2 <= base <= 36 else None


def bases(gold: str, answer: str, _: SameValue) -> bool | None:
    """Compare digits and base. An answer without a base has the gold's base; a gold without a base has base ten."""
    ours, theirs = based(gold), based(answer)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return ours == theirs
    digits = re.sub(r"[\s«»(){}]", "", answer if ours else gold)
    known = ours or theirs
    assert known is not None
    return digits == known[0] and (ours is not None or known[1] == 10)


def times(gold: str, answer: str, _: SameValue) -> bool | None:
    """Compare times of day on a 12- or 24-hour clock. A time that can be am or pm agrees with both."""
    both = [_TIME.fullmatch(re.sub(r" ?([ap])\.? ?m\.?$", r"\1m", plain(text))) for text in (gold, answer)]
    if not (both[0] and both[1]):
        return False if both[0] and _is_clock(both[0]) and plain(gold) not in plain(answer) else None
    ours, theirs = (_clock(match) for match in both if match)
    return ours == theirs or (None in (ours[0], theirs[0]) and ours[1] == theirs[1])


def _is_clock(match: re.Match[str]) -> bool:
    """Return whether ``10:30`` is no ratio, because 10 and 30 have a common factor or the minutes begin with 0."""
    if match[2] is None or int(match[1]) > 24:
        return False
    return match[2].startswith("0") or math.gcd(int(match[1]), int(match[2])) > 1


def _clock(match: re.Match[str]) -> tuple[int | None, tuple[int, int, int]]:
    """Return (0 for am, 1 for pm or None if unknown; (hour, minute, second) on a 12-hour clock)."""
    hour, minute, second = int(match[1] or match[5]), int(match[2] or 0), int(match[3] or 0)
    named = match[4] or match[6]
    half = None if not named else int("p" in named)
    if hour > 12 or hour == 0 or (not named and (match[1] or "").startswith("0")):
        half = int(hour >= 12)
    return half, (hour % 12, minute, second)


def choices(gold: str, answer: str, same_value: SameValue) -> bool | None:
    """Compare the letters of a multiple choice, and if both sides have values behind the letters, the values too."""
    ours, theirs = _choice(gold), _choice(answer)
    if ours is None:
        return None
    if theirs is None:
        return ours[1] != "" and same_value(ours[1], answer) if not _BARE_LETTER.fullmatch(gold) else None
    if ours[0] != theirs[0] or _SECOND_CHOICE.search(theirs[1]):
        return False
    return not ours[1] or not theirs[1] or same_value(ours[1], theirs[1])


def _choice(cleaned: str) -> tuple[str, str] | None:
    text = cleaned.strip(" {}")
    if _BARE_LETTER.fullmatch(text):
        return text, ""
    match = _CHOICE.fullmatch(text)
    if match is None:
        return None
    return match[1] or match[2] or match[3] or match[5], (match[4] or match[6] or "").strip(" .:()")


def dates(gold: str, answer: str, _: SameValue) -> bool | None:
    """Compare month and day, and also the year if both sides have one."""
    ours, theirs = (_date(plain(text)) for text in (gold, answer))
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None:
        return False
    return ours[:2] == theirs[:2] and (None in (ours[2], theirs[2]) or ours[2] == theirs[2])


def _date(text: str) -> tuple[str, int, str | None] | None:
    match = _DATE.fullmatch(text)
    if match is None:
        return None
    return (match["month"] or match["of"])[:3], int(match["day"] or match["before"]), match["year"]


def several_choices(gold: str, answer: str, _: SameValue) -> bool | None:
    """Compare several choices: ``ABD``, ``A, B, D``. The letters of the gold must be in alphabetical order."""
    bare = [re.sub(r"\(\s*([A-H])\s*\)", r"\1", text) for text in (gold, answer)]
    texts = [re.sub(r"«?\band\b»?|[\\{}«»,;\s]", "", text) for text in bare]
    if texts[0] not in _RISING or not re.fullmatch("(?:[A-H]|or)+", texts[1]):
        return None
    return texts[0] == "".join(sorted(texts[1]))


_PLACED = NEUTRAL | {"quadrant", "place", "position", "row", "column", "floor", "day", "one"}


def ordinals(gold: str, answer: str) -> bool | None:
    """Compare uncleaned texts as ordinals: ``third`` with ``3^{rd}``, ``second quadrant`` with ``Quadrant II``."""
    ours, theirs = _ordinal(gold), _ordinal(answer)
    if ours is None or theirs is None or not (ours[2] or theirs[2]):
        return None
    said = ours[1] == theirs[1] or theirs[1] == "" or (ours[1] == "" and theirs[1] in _PLACED)
    return ours[0] == theirs[0] and said


def _ordinal(raw: str) -> tuple[int, str, bool] | None:
    """Return an ordinal's (number, noun or "", whether the number is in words or Roman); None for other texts."""
    text = re.sub(r"\\(?:text\w*|mathrm|mbox)|\\[ ,;]|[{}^$~\s]+", " ", raw)
    text = re.sub(r"\s+", " ", text).strip(" .").lower().removeprefix("the ")
    if match := _NUMBERED.fullmatch(text):
        return int(match[1]), match[2] or "", False
    if (match := _ORDINAL_WORD.fullmatch(text)) and match[1] in ORDINAL_WORDS:
        return ORDINAL_WORDS.index(match[1]) + 1, match[2] or "", True
    if (match := _ROMAN_BEHIND.fullmatch(text)) and match[2] in ROMAN:
        return ROMAN.index(match[2]) + 1, match[1], True
    return None


RULES: tuple[tuple[str, Callable[[str, str, SameValue], bool | None]], ...] = (
    ("compared as numerals in a base", bases),
    ("compared as times of day", times),
    ("compared as dates", dates),
    ("compared as choices", choices),
    ("compared as several choices", several_choices),
)
