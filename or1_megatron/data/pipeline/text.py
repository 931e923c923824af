"""Normalises problem statements, and hashes them to MinHash signatures, a batch at once in NumPy.

datasketch, which takes one statement at a time, needs ten times as long.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UInt32Array = NDArray[np.uint32]
UInt64Array = NDArray[np.uint64]

_NUMBERING = re.compile(
    r"^\s*(?:\*\*|##* *)?(?:(?:problem|example|exercise|question|task)\s*)?[([]?\d{1,4}(?:\.\d{1,3})*\s*[.):\]]\**\s+|"
    r"^\s*(?:\*\*|##* *)?(?:problem|example|exercise|question|task)\s*\d{1,4}[.):]?\**\s*", re.I
)  # fmt: skip
_LATEX = re.compile(
    r"\\(?:left|right|displaystyle|mathrm|textbf|textit|text|mathbf|operatorname|quad|qquad|limits|rm|bf)(?![a-z])"
    r"|\\[,;:! ()\[\]]|[${}*_`~]|\\\\"
)
_FRACTION = re.compile(r"\\[dt]frac")
_MACRO = re.compile(r"\\(?=[a-z])")
_COMMANDS = re.compile(
    r"\b(?:please|find|determine|compute|calculate|evaluate|work out|what is|what are|the value of|given that"
    r"|suppose that|suppose|assume that|assume|let us|let)\b"
)
_BOILERPLATE = re.compile(
    r"\b(?:(?:express|give|write|state|leave|enter|simplify|report) (?:your|the) (?:final )?(?:answer|result)"
    r"|justify your|explain your|show your work|show all)(?: (?!(?:if|when|where|given|let)\b)[a-z/]+)*"
)
_PUNCTUATION = re.compile(r"[.,;:!?'\"’‘“”]+(?!\d)")
_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)?|[^\sa-z\d]")
_COUNTING = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_NUMBER_WORDS = {word: str(value) for value, word in enumerate(_COUNTING, start=2)}
_NUMBER_WORD = re.compile(rf"\b(?:{'|'.join(_NUMBER_WORDS)})\b")
_DECIDING_STEMS = ("maxim", "minim", "larg", "small", "great", "increas", "decreas", "ascend", "descend")
_DECIDING = frozenset(
    [
        *("least", "most", "highest", "lowest", "longest", "shortest", "more", "less", "fewer", "first", "last"),
        *("odd", "even", "positive", "negative", "nonnegative", "prime", "composite", "not", "never", "no", "always"),
        *("sum", "difference", "product", "quotient", "remainder", "ratio", "mean", "median", "divisors", "multiples"),
        *("area", "perimeter", "volume", "circumference", "diameter", "radius", "row", "rows", "column", "columns"),
        *("union", "intersection", "without", "inside", "outside", "sin", "cos", "tan", "log", "vowels"),
        *("consonants", "uppercase", "lowercase", "<", ">", "≤", "≥", "leq", "geq", "le", "ge", "+", "-", "!"),
    ]
)


def plain(statement: str) -> str:
    """Return a statement in lower case with single spaces, without numbering, LaTeX markup and punctuation."""
    text = statement if statement.isascii() else unicodedata.normalize("NFKC", statement)
    text = _NUMBERING.sub("", text.lower(), count=1)
    text = _MACRO.sub("", _LATEX.sub(" ", _FRACTION.sub(r"\\frac", text)))
    return " ".join(_PUNCTUATION.sub(" ", text).split())


def comparable(statement: str) -> str:
    """Return ``plain(statement)`` without commands ("find") and words about the form of the answer.

    Number words ("two") become digits.
    """
    text = plain(statement)
    if "your" in text or "the answer" in text or "show all" in text:
        text = _BOILERPLATE.sub(" ", text)
    text = _NUMBER_WORD.sub(lambda match: _NUMBER_WORDS[match[0]], _COMMANDS.sub(" ", text))
    return " ".join(text.split())


def text_key(text: str) -> int:
    """Return a 64-bit hash of a text without its spaces. Exact duplicates have equal hashes."""
    return int.from_bytes(hashlib.blake2b(text.replace(" ", "").encode(), digest_size=8).digest(), "big")


def decisive(text: str) -> tuple[str, ...]:
    """Return, in order, a text's numbers and the words that decide its meaning. Copies of a problem share them.

    The order counts: 3 red and 5 blue balls are not 5 red and 3 blue balls.
    """
    return tuple(
        word for word in words(text) if word in _DECIDING or word[0].isdecimal() or word.startswith(_DECIDING_STEMS)
    )


def words(text: str) -> list[str]:
    return _WORDS.findall(text)


def shingles(text: str, chars: int) -> UInt64Array:
    """Return the sorted, distinct hashes of a text's shingles (runs of ``chars`` bytes). A shorter text is padded."""
    return np.unique(_batch_shingles([text], chars)[0])


def jaccard(one: UInt64Array, other: UInt64Array) -> float:
    """Return the Jaccard similarity of two sets, given as sorted arrays."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def signatures(texts: Sequence[str], chars: int, size: int) -> UInt32Array:
    """Return MinHash signatures [texts, size]; two texts' share of equal columns estimates their Jaccard similarity.

    Each column permutes all hashes in its own way, h -> a h + b modulo 2^32, and keeps each text's smallest result.
    """
    hashes, starts = _batch_shingles(texts, chars)
    low = (hashes >> np.uint64(32)).astype(np.uint32)
    generator = np.random.Generator(np.random.PCG64(20250522))
    factors = generator.integers(0, 1 << 31, size, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    offsets = generator.integers(0, 1 << 32, size, dtype=np.uint32)
    columns = [np.minimum.reduceat(low * a + b, starts) for a, b in zip(factors, offsets, strict=True)]
    return np.stack(columns, axis=1)


def band_keys(signed: UInt32Array, bands: int, guards: UInt64Array) -> UInt64Array:
    """Return band keys [texts, bands]. Texts share a key only if the band's columns and the texts' guards agree."""
    rows, size = signed.shape
    grouped = signed.reshape(rows, bands, size // bands).astype(np.uint64)
    keys = np.broadcast_to(guards[:, None], (rows, bands)) + np.arange(bands, dtype=np.uint64)
    for column in range(grouped.shape[2]):
        keys = mixed(keys ^ grouped[:, :, column])
    return keys


def mixed(values: UInt64Array) -> UInt64Array:
    """Return the values mixed by splitmix64's finaliser: every bit of a result depends on every bit of its value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _batch_shingles(texts: Sequence[str], chars: int) -> tuple[UInt64Array, NDArray[np.int64]]:
    """Return (hashes of all shingles, index of each text's first hash). A short text is padded to one shingle."""
    coded = [text.encode().ljust(chars, b"\0") for text in texts]
    whole = np.frombuffer(b"".join(coded), dtype=np.uint8).astype(np.uint64)
    counts = np.array([len(code) - chars + 1 for code in coded])
    starts = np.cumsum(counts) - counts
    first_bytes = np.arange(counts.sum()) + np.repeat(np.arange(len(texts)) * (chars - 1), counts)
    packed = np.zeros(len(first_bytes), dtype=np.uint64)
    for offset in range(chars):
        packed = packed * np.uint64(257) + whole[first_bytes + offset]  # exact up to 7 bytes, a hash beyond
    return mixed(packed + np.uint64(0x9E3779B97F4A7C15)), starts
