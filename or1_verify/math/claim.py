"""Finds the answer that a response without a box claims (``verify.math.without_box: claimed``).

A claim is the last sentence: a phrase that says what the answer is, and the value behind it; or the value alone, with
words round it that change nothing. What hedges, denies or asks claims nothing.
"""

from __future__ import annotations

import re

from or1_verify.math.reader.units import LEAD_INS

_PHRASE = re.compile(
    r"(?:\bthe\s+)?(?:\bfinal\s+|\bcorrect\s+)*\banswer\s*(?:(?:\s+is\b|\s+equals)(?!')\s*[:=]?|[:=])"
    r"|(?:所以|因此|故)?(?:最终|最后|正确)?(?:的)?(?:答案|结果)\s*(?:是|为)?\s*[:：]?|答え\s*[はが]?\s*[:：]?"
    r"|\bla (?:respuesta|réponse)(?: (?:final|finale))?\s*(?:es|est)?\s*:?|\bdie antwort\s*(?:ist|lautet)?\s*:?"
    r"|(?:\bокончательный )?\bответ\s*:",
    re.IGNORECASE,
)
_AFTERWARDS = re.compile(r"I hope it is correct\.?\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!。！])\s+|\n+")
_EMPHASIS = re.compile(r"\*\*|__|`")
_WORD = re.compile(r"(?<!\\)\b[A-Za-z]{2,}\b")


def claimed_answer(text: str) -> str | None:
    """Return the one value that a text claims as its answer, or None.

    A text that claims two values claims none, so a guess behind the answer, or a correction, earns nothing.
    """
    sentences = [part.strip() for part in _SENTENCE_END.split(_AFTERWARDS.sub("", text).strip()) if part.strip()]
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
    return last or None


def _behind_phrase(sentence: str) -> str | None:
    """Return what stands behind the last phrase of a sentence, "" if nothing does; None without a phrase."""
    phrases = list(_PHRASE.finditer(_EMPHASIS.sub("", sentence)))
    return _plain(_EMPHASIS.sub("", sentence)[phrases[-1].end() :]) if phrases else None


def _alone(sentence: str) -> str | None:
    """Return the value of a sentence that holds nothing else but words that change nothing."""
    bold = re.findall(r"\*\*(.+?)\*\*", sentence)
    words = _WORD.findall(sentence if len(bold) != 1 else sentence.replace(f"**{bold[0]}**", ""))
    if not all(word.lower() in LEAD_INS | {"them"} for word in words):
        return None
    value = bold[0] if len(bold) == 1 else sentence
    return _plain(value) if re.search(r"\d", value) else None


def _plain(value: str) -> str:
    """Strip emphasis, dollar signs and the end of a sentence."""
    return re.sub(r"^[\s#>-]*(?=\s)|[.。!！\s]+$", "", _EMPHASIS.sub("", value)).strip().strip("$").strip()
