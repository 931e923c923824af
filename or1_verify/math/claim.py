"""Finds the final answer that a response claims without ``\\boxed`` (``verify.math.without_box: claimed``).

The last sentence is a claim if it is only a value, or if a value follows known words that end in a verb or a colon. A
sentence with a hedge, a denial or a question claims nothing.
"""

from __future__ import annotations

import re

from or1_verify.math.reader.words import NAMING, WITHOUT_SPACES, change_nothing

_ANSWER = re.compile(
    r"(?:answer|result|respuesta|resposta|risposta|antwort|réponse|ответ|答案|答|答え|结果|정답|답)\b", re.I
)
_CLAIMS = re.compile(
    r"(?:\b(?:is|are|equals?|get|have|find|obtain|so|thus|hence|therefore|es|é|è|est|ist|lautet|是|为|は|选)\b[\s,:]*"
    r"(?:\b(?:an?|the|exactly|only|total|of|option)\s+)*|[:：]\s*)$",
    re.IGNORECASE,
)
_AFTERWARDS = re.compile(r"I hope it is correct\.?\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!。！])\s+|\n+")
_EMPHASIS = re.compile(r"\*\*|__|`|</?answer>")
_WORD = re.compile(r"[\s#>(\"✅✔]*([^\W\d_]{2,}|[^\W\d_a-zα-ω]|a(?= [a-z]{2}))(?!['’\w])[\s,:：，、]*", re.IGNORECASE)
_FRAMES = (NAMING | {"conclude", "find", "obtain", "as", "consequently", "to"}) - {"different", "possible", "candidate"}


def claimed_answer(text: str) -> str | None:
    """Return the one value that a text claims as its answer, or None.

    A text that claims two values claims none, so a guess after the answer, or a correction, earns nothing.
    """
    text = WITHOUT_SPACES.sub(r" \g<0> ", _EMPHASIS.sub("", _AFTERWARDS.sub("", text)))
    sentences = [part.strip() for part in _SENTENCE_END.split(text) if part.strip(" .。")]
    if not sentences or sentences[-1].endswith(("?", "？")):
        return None
    if sentences[-1] != text.strip().rpartition("\n")[2].strip() and not _WORD.match(sentences[-1]):
        return None  # a value alone has its own line
    claims = [_claim(sentence) for sentence in sentences]
    last = claims[-1][1]
    if last is None and claims[-2:-1] == [(True, "")]:  # "Final answer:", and the value a line below
        last = _plain(sentences[-1])
    # ``6*7 = 42`` claims 42, what its chain of equations comes to.
    others = [claim for asked, claim in claims if asked and claim not in (None, "", last)]
    if any(claim.rpartition("=")[2].strip() != last for claim in others if claim):
        return None
    return last if last and not last.startswith("~") else None


def _claim(sentence: str) -> tuple[bool, str | None]:
    """Return (whether a sentence speaks of the answer or is only a value, the value that it claims, or None)."""
    end = 0
    while (word := _WORD.match(sentence, end)) and change_nothing([word[1].lower()], _FRAMES):
        end = word.end()
    value, speaks = _plain(sentence[end:]), bool(_ANSWER.search(sentence[:end]))
    if re.search(r"\b(?:of\b.*|m(?:ax|in)\w*\s+)\banswers?\b", sentence[:end]):  # "the square of the answer is"
        return True, None
    if end and not value:
        return speaks, ""
    if end:
        return speaks, value.lstrip("= ") if _CLAIMS.search(sentence[:end]) or value.startswith("=") else None
    return True, None if re.search(r"(?<!\\)\b[^\W\d_]{2,}", value) else value


def _plain(value: str) -> str:
    value = re.sub(r"^[\s#>:-]*(?=\s)|[.。!！\s]+$", "", value).strip().strip("$").strip()
    shown = re.fullmatch(r"\\[(\[](.*)\\[)\]]", value)
    return shown[1].strip() if shown else value
