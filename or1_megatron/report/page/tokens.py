"""The text of each token of a response, from the run's own tokenizer."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Cuts a response into the texts of its tokens. A special token's text is its name."""

    def __init__(self, folder: Path) -> None:
        """``folder``: an HF folder. Raises FileNotFoundError, or ValueError naming the file."""
        path = folder / TOKENIZER
        if not path.is_file():
            raise FileNotFoundError(f"no {TOKENIZER} in {folder}")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
            decoder = json.dumps(json.loads(path.read_text(encoding="utf-8")).get("decoder"))
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"{path}: not a tokenizer: {error}") from error
        self._byte_level = '"ByteLevel"' in decoder
        self._spaces = "▁" if "▁" in decoder or "\\u2581" in decoder else None
        self._special = {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}

    def cut(self, token_ids: Sequence[int]) -> tuple[str, NDArray[np.uint16]]:
        """Return (text, [n] the UTF-16 units of each token's text, as a browser counts them).

        A character whose bytes several tokens share belongs to the last of them; the others have 0. Bytes that are not
        UTF-8 become U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts = [decoder.decode(self._bytes(int(index))) for index in token_ids]
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        lengths = np.array([len(text.encode("utf-16-le")) // 2 for text in texts], dtype=np.uint16)
        return "".join(texts), lengths

    def _bytes(self, index: int) -> bytes:
        if index not in self._known:
            self._known[index] = self._find(index)
        return self._known[index]

    def _find(self, index: int) -> bytes:
        if index in self._special:
            return self._special[index].encode()
        token = self._tokenizer.id_to_token(index)
        if token is None:
            return f"<{index}?>".encode()  # not in the vocabulary: sampled from a padded row of the head
        if self._byte_level:
            return b"".join(_BYTE_OF.get(char, char.encode()) for char in token)
        if byte := _BYTE.fullmatch(token):
            return bytes([int(byte[1], 16)])
        if self._spaces is not None:
            return token.replace(self._spaces, " ").encode()
        return self._tokenizer.decode([index], skip_special_tokens=False).encode()


def _bytes_of_characters() -> dict[str, bytes]:
    """Return the byte of each character of byte-level BPE, which writes printable bytes as themselves and the others
    from U+0100 on (GPT-2, Radford et al. 2019)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): bytes([byte]) for byte in plain} | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()


def find_token_texts(candidates: Sequence[Path]) -> tuple[TokenTexts | None, str]:
    """Return (the token texts of the first folder with a tokenizer, or None, and why no folder could be used)."""
    said = []
    for folder in candidates:
        try:
            return TokenTexts(folder), ""
        except (FileNotFoundError, ValueError) as error:
            said.append(str(error))
    return None, "; ".join(said) or "no folder is known"
