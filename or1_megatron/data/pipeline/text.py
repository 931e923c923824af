"""Make statements comparable: strip formatting, hash shingles and n-grams to integers, whole batches at once in NumPy.

datasketch's MinHash, the usual library, takes about a millisecond for a statement, one permutation per row of NumPy:
five times the budget. One-permutation hashing (Li, Owen, Zhang 2012) with densification (Shrivastava 2017) reads each
shingle once, so that a batch is a few NumPy calls.
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
    """Return the text in lower case with single spaces, without numbering, LaTeX markup and punctuation."""
    text = statement if statement.isascii() else unicodedata.normalize("NFKC", statement)
    text = _NUMBERING.sub("", text.lower(), count=1)
    text = _MACRO.sub("", _LATEX.sub(" ", _FRACTION.sub(r"\\frac", text)))
    return " ".join(_PUNCTUATION.sub(" ", text).split())


def comparable(statement: str) -> str:
    """Return ``plain`` text without commands ("find") and without how the answer is to be written."""
    text = plain(statement)
    if "your" in text or "the answer" in text or "show all" in text:
        text = _BOILERPLATE.sub(" ", text)
    text = _NUMBER_WORD.sub(lambda match: _NUMBER_WORDS[match[0]], _COMMANDS.sub(" ", text))
    return " ".join(text.split())


def text_key(text: str) -> int:
    """Return 64 bits of a text without its white space: equal for exact duplicates."""
    return int.from_bytes(hashlib.blake2b(text.replace(" ", "").encode(), digest_size=8).digest(), "big")


def decisive(text: str) -> tuple[str, ...]:
    """Return what must agree, in order, in two statements of one problem: numbers, and words that turn its meaning.

    The order counts: 3 red and 5 blue balls are not 5 red and 3 blue ones.
    """
    return tuple(
        word for word in words(text) if word in _DECIDING or word[0].isdecimal() or word.startswith(_DECIDING_STEMS)
    )


def words(text: str) -> list[str]:
    return _WORDS.findall(text)


def shingles(text: str, chars: int) -> UInt64Array:
    """Return the set of a text's runs of ``chars`` bytes, hashed; of a shorter text the one of all its bytes."""
    found, _ = _batch_shingles([text], chars)
    return np.unique(found)


def jaccard(one: UInt64Array, other: UInt64Array) -> float:
    """Return the Jaccard similarity of two sorted sets."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


def signatures(texts: Sequence[str], chars: int, size: int) -> UInt32Array:
    """Return MinHash signatures [len(texts), size]: two rows agree in about the Jaccard share of their places."""
    hashes, row_of = _batch_shingles(texts, chars)
    places = (((hashes >> np.uint64(32)) * np.uint64(size)) >> np.uint64(32)).astype(np.int64)
    found = np.full(len(texts) * size, np.iinfo(np.uint32).max, dtype=np.uint32)
    np.minimum.at(found, row_of * size + places, (hashes & np.uint64(0xFFFFFFFF)).astype(np.uint32))
    return _densified(found.reshape(len(texts), size))


def _densified(found: UInt32Array) -> UInt32Array:
    """Fill empty places from another place of the row, chosen by the place alone, so the same in every row."""
    empty = found == np.iinfo(np.uint32).max
    filled = found.copy()
    size = found.shape[1]
    generator = np.random.Generator(np.random.PCG64(20250522))
    attempts = [generator.integers(0, size, size) for _ in range(8)]
    attempts += [(np.arange(size) + shift) % size for shift in range(1, size)]  # in the end some place must do
    rows = np.flatnonzero(empty.any(axis=1))
    left = empty[rows]
    for attempt, donors in enumerate(attempts):
        if not len(rows):
            break
        takes = left & ~empty[rows][:, donors]
        # mixed with the attempt, else places with one donor would count as several independent agreements
        values = found[rows][:, donors] * np.uint32(2 * attempt + 0x9E3779B1)
        filled[rows] = np.where(takes, values, filled[rows])
        left &= ~takes
        going = left.any(axis=1)
        rows, left = rows[going], left[going]
    return filled


def band_keys(found: UInt32Array, bands: int, guards: UInt64Array) -> UInt64Array:
    """Return keys [rows, bands]: equal in a band only for rows that agree in all its places and in their guard."""
    rows, size = found.shape
    grouped = found.reshape(rows, bands, size // bands).astype(np.uint64)
    keys = np.broadcast_to(guards[:, None], (rows, bands)) + np.arange(bands, dtype=np.uint64)
    for place in range(grouped.shape[2]):
        keys = mixed(keys ^ grouped[:, :, place])
    return keys


def mixed(values: UInt64Array) -> UInt64Array:
    """Apply splitmix64's finaliser: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def ngram_hashes(word_lists: Sequence[Sequence[str]], size: int) -> tuple[UInt64Array, NDArray[np.int64]]:
    """Return (hash of every run of ``size`` words, its list's number). Hashes hold within this process only."""
    values = np.fromiter((hash(word) for words in word_lists for word in words), dtype=np.int64).astype(np.uint64)
    starts, row_of = _window_starts(np.array([len(words) for words in word_lists]), size)
    hashes = np.zeros(len(starts), dtype=np.uint64)
    for place in range(size):
        hashes = mixed(hashes ^ values[starts + place]) + np.uint64(place)
    return hashes, row_of


def _batch_shingles(texts: Sequence[str], chars: int) -> tuple[UInt64Array, NDArray[np.int64]]:
    """Return (hash of every shingle, number of its text); shorter texts are padded to one shingle."""
    coded = [text.encode().ljust(chars, b"\0") for text in texts]
    whole = np.frombuffer(b"".join(coded), dtype=np.uint8).astype(np.uint64)
    starts, row_of = _window_starts(np.array([len(code) for code in coded]), chars)
    packed = np.zeros(len(starts), dtype=np.uint64)
    for place in range(chars):
        packed = packed * np.uint64(257) + whole[starts + place]  # exact up to 7 bytes, a hash beyond
    return mixed(packed + np.uint64(0x9E3779B97F4A7C15)), row_of


def _window_starts(lengths: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the starts of all windows of ``size`` within one of the concatenated parts, and each one's part."""
    counts = np.maximum(lengths - size + 1, 0)
    offsets = np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
    row_of = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(offsets, counts) + within, row_of
