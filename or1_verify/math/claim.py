"""Finds the answer that a response without a box claims (``verify.math.without_box: claimed``).

A claim is the last sentence: a phrase that says what the answer is, with nothing before it but words of a list, and the
value behind it; or the value alone, with words round it that change nothing. What hedges, denies or asks claims
nothing.
"""

from __future__ import annotations

import re

from or1_verify.math.reader.units import NAMING, UNITS, WITHOUT_SPACES, change_nothing

_NOUN = "answer|result|option|choice|respuesta|resposta|risposta|antwort|réponse|ответ|答案|答|答え|结果|정답|답"
_PHRASE = re.compile(
    rf"\b(?:{_NOUN})\b(?: to (?:the|this) (?:problem|question))?\s*"
    r"(?:(?:is|equals|es|é|è|est|ist|lautet|是|为|は)\b(?!')(?: option\b)?\s*[:=]?|[:=])|选\s*:?",
    re.IGNORECASE,
)
_AFTERWARDS = re.compile(r"I hope it is correct\.?\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!。！])\s+|\n+")
_EMPHASIS = re.compile(r"\*\*|__|`")
_WORD = re.compile(r"(?<!\\)\b[^\W\d_]{2,}\b|[^\W\d_a-zA-Zα-ωΑ-Ω]")
_VERB = re.compile(
    r"[^\d=<>]*\b(?:is|are|equals|get|have|so|thus|hence|therefore)\b[\s,:]*|[^\d=<>:]*[:=]\s*(?=\S)", re.IGNORECASE
)
_BEFORE = frozenset({"a", "an", "the", "exactly", "only", "total", "of"})
_FRAMES = NAMING | {*UNITS, "them", "conclude", "find", "obtain", "as", "consequently"}


def claimed_answer(text: str) -> str | None:
    """Return the one value that a text claims as its answer, or None.

    A text that claims two values claims none, so a guess behind the answer, or a correction, earns nothing.
    """
    text = WITHOUT_SPACES.sub(r" \g<0> ", _AFTERWARDS.sub("", text).strip().replace("：", ":"))
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part.strip(" .。")]
    if not sentences or sentences[-1].endswith(("?", "？")):
        return None
    values = [_behind_phrase(sentence) for sentence in sentences]
    if values[-1] == "" and len(sentences) > 1:
        return None
    last = values[-1] if values[-1] is not None else _alone(sentences[-1])
    if values[-1] is None and len(sentences) > 1 and values[-2] == "":  # "Final answer:", and the value a line below
        last = _plain(sentences[-1])
    claims = [_alone(sentence) if value is None else value for sentence, value in zip(sentences, values, strict=True)]
    # ``6*7 = 42`` claims 42, what its chain of equations comes to.
    if any(claim not in (None, "", last) and claim.rpartition("=")[2].strip() != last for claim in claims):
        return None
    return last if last and not last.startswith("~") else None


def _behind_phrase(sentence: str) -> str | None:
    """Return what stands behind the last phrase of a sentence, "" if nothing does; None without a phrase.

    Where other words than those of the list stand before it, the sentence is returned whole, and is no value.
    """
    sentence = _EMPHASIS.sub("", sentence)
    phrases = list(_PHRASE.finditer(sentence))
    if not phrases:
        return None
    before = map(str.lower, _WORD.findall(sentence[: phrases[-1].start()]))
    return _plain(sentence[phrases[-1].end() :]) if change_nothing(before, _FRAMES) else sentence


def _alone(sentence: str) -> str | None:
    """Return the value of a sentence that holds nothing else but words that change nothing, and a verb."""
    bold = re.findall(r"\*\*(.+?)\*\*", sentence)
    around = sentence.replace(f"**{bold[0]}**", "") if len(bold) == 1 else sentence
    words = [word.lower() for word in _WORD.findall(around)]
    verb = _VERB.match(around)
    if not change_nothing(words, _FRAMES):
        return None
    value = bold[0] if len(bold) == 1 else sentence[verb.end() :] if verb and "=" not in verb[0] else sentence
    named = _WORD.findall(re.split(r"[\d=:]", value if verb else around)[0])
    if not all(word.lower() in _BEFORE for word in named):  # "page 17"
        return None
    return _plain(value) if re.search(r"\d", value) else None


def _plain(value: str) -> str:
    """Strip emphasis, dollar signs and the end of a sentence."""
    value = re.sub(r"^[\s#>:-]*(?=\s)|[.。!！\s]+$", "", _EMPHASIS.sub("", value)).strip().strip("$").strip()
    shown = re.fullmatch(r"\\[(\[](.*)\\[)\]]", value)
    return shown[1].strip() if shown else value
