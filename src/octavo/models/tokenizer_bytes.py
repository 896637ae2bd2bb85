"""Which bytes a token stands for, under the two ways in which vocabularies write bytes.

Both ways turn decoding into joining bytes and reading them as UTF-8, so a text can be decoded
token by token and still equal decoding it whole.
"""

import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "▁"  # U+2581, how SentencePiece writes a space


def _byte_characters() -> dict[int, int]:
    """Map each character of the byte-level alphabet to its byte (GPT-2, Radford et al. 2019).

    Printable Latin-1 characters stand for themselves, the other 68 bytes for U+0100 onwards.
    Latin-1 characters outside the alphabet map beyond Latin-1, so that encoding them fails.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: byte for byte in printable}
    table |= {byte: 0x1000 + byte for byte in others}
    table |= {0x100 + index: byte for index, byte in enumerate(others)}
    return table


_BYTE_OF_CHARACTER: Final = _byte_characters()


_NO_BYTE: Final = 256


def _by_character() -> NDArray[np.uint16]:
    """Return the alphabet by code point; the last entry is that of all code points beyond it."""
    table = np.full(max(_BYTE_OF_CHARACTER) + 2, _NO_BYTE, np.uint16)
    for character, byte in _BYTE_OF_CHARACTER.items():
        table[character] = min(byte, _NO_BYTE)
    return table


_BYTE_BY_CHARACTER: Final = _by_character()


def byte_level_bytes(text: str) -> bytes:
    """Return the bytes of a byte-level BPE token; text outside the alphabet is itself."""
    try:
        return text.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return text.encode()


def sentencepiece_bytes(text: str, *, byte_fallback: bool = True) -> bytes:
    """Return the bytes of a SentencePiece token: ``<0x0A>`` is a byte, ``▁`` is a space."""
    if byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
        return bytes([int(match[1], 16)])
    return text.replace(_SPACE_MARK, " ").encode()


def token_table(
    texts: Sequence[str], to_bytes: Callable[[str], bytes], literal_ids: frozenset[int]
) -> tuple[bytes, ...]:
    """Return the bytes of every token; ``literal_ids`` are spelt as they read."""
    if to_bytes is byte_level_bytes:
        return _byte_level_table(texts, literal_ids)
    return tuple(
        text.encode() if token_id in literal_ids else to_bytes(text)
        for token_id, text in enumerate(texts)
    )


def _byte_level_table(texts: Sequence[str], literal_ids: frozenset[int]) -> tuple[bytes, ...]:
    """Do what ``byte_level_bytes`` does to all characters at once: a start waits for it."""
    characters = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    values = _BYTE_BY_CHARACTER[np.minimum(characters, len(_BYTE_BY_CHARACTER) - 1)]
    spelt = values.astype(np.uint8).tobytes()
    ends = list(accumulate(map(len, texts)))
    table = [spelt[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    outside = np.searchsorted(ends, np.flatnonzero(values == _NO_BYTE), side="right")
    for token_id in {*outside.tolist(), *literal_ids}:
        table[token_id] = texts[token_id].encode()
    return tuple(table)
