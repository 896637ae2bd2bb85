"""Incremental detokenization equals decoding everything at once, however it is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequestError
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.models.tokenizer import Tokenizer
from support_text import (
    CHINESE,
    FAMILY,
    HEBREW,
    SKIN_TONE,
    TOKENIZERS,
    byte_level,
    chunked,
    quick,
    sentencepiece,
)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return one token a byte."""
    table = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [table[bytes([byte])] for byte in data]


def stream(
    tokenizer: Tokenizer, pieces, *, skip: bool = False, continuation: bool = True
) -> list[str]:
    """Return the deltas of pushing ``pieces``, the final one last."""
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip, continuation=continuation
    )
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


def random_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, many of them bytes or pieces of characters."""
    characters = st.text(st.sampled_from(CHINESE + HEBREW + FAMILY + SKIN_TONE + "é "), max_size=4)
    parts = st.one_of(
        st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3),
        st.binary(max_size=4).map(lambda data: byte_ids(tokenizer, data)),
        characters.map(lambda text: byte_ids(tokenizer, text.encode())),
    )
    return st.lists(parts, max_size=6).map(lambda lists: [i for part in lists for i in part])


IDS = {name: random_ids(make()) for name, make in TOKENIZERS.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@quick
@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_any_ids_in_any_pieces_equal_decoding_at_once(
    name: str, data: st.DataObject, skip: bool, continuation: bool
) -> None:
    """ST-02, ST-09, ST-16: red when any cut of any ids changes the text."""
    tokenizer = TOKENIZERS[name]()
    pieces = data.draw(chunked(IDS[name]))
    deltas = stream(tokenizer, pieces, skip=skip, continuation=continuation)
    ids = [token_id for piece in pieces for token_id in piece]
    assert "".join(deltas) == tokenizer.decode(
        ids, skip_special_tokens=skip, continuation=continuation
    )


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", [SKIN_TONE + FAMILY, CHINESE, HEBREW, "naïve café"])
@pytest.mark.parametrize("size", [1, 2, 4, 1000])
def test_split_characters_are_never_shown(name: str, text: str, size: int) -> None:
    """ST-02: red when a delta has half an emoji, CJK or Hebrew character as U+FFFD."""
    tokenizer = TOKENIZERS[name]()
    ids = byte_ids(tokenizer, text.encode())
    deltas = stream(tokenizer, [ids[i : i + size] for i in range(0, len(ids), size)])
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[-1] == ""


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_character_cut_by_the_token_limit_becomes_one_mark(name: str, kept: int) -> None:
    """ST-01: red when an output that ends inside a character is not valid Unicode."""
    tokenizer = TOKENIZERS[name]()
    ids = byte_ids(tokenizer, "ok😀".encode()[: 2 + kept])
    deltas = stream(tokenizer, [[i] for i in ids])
    assert deltas == ["o", "k", *[""] * kept, "\ufffd"]
    "".join(deltas).encode()


@pytest.mark.parametrize("name", TOKENIZERS)
@quick
@given(data=st.lists(st.sampled_from([0x80, 0xBF, 0xC3, 0xE4, 0xF0, 0xFF, 0x41]), max_size=30))
def test_bytes_of_no_character_are_not_held(name: str, data: list[int]) -> None:
    """ST-02: red when invalid bytes pile up: three are the most that may wait."""
    tokenizer = TOKENIZERS[name]()
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    given_out = ""
    for count, token_id in enumerate(byte_ids(tokenizer, bytes(data)), start=1):
        given_out += detokenizer.push([token_id])
        certain = bytes(data[: max(0, count - 3)]).decode("utf-8", errors="ignore")
        assert given_out.replace("\ufffd", "").startswith(certain.replace("\ufffd", ""))
        assert given_out or count <= 3
    assert given_out + detokenizer.finish() == bytes(data).decode("utf-8", errors="replace")


def test_control_tokens_inside_a_character() -> None:
    """Red when a skipped token breaks a character, or a shown one is swallowed by it."""
    tokenizer = byte_level()
    first, *rest = byte_ids(tokenizer, "中".encode())
    assert "".join(stream(tokenizer, [[first], [602], rest], skip=True)) == "中"
    assert "".join(stream(tokenizer, [[first], [602], rest])) == "\ufffd<|im_end|>\ufffd\ufffd"


def test_a_leading_space_stays_after_a_prompt() -> None:
    """Red when the first word of a completion sticks to its prompt."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode("world hello", add_special_tokens=False)
    assert "".join(stream(tokenizer, [ids])) == " world hello"
    assert "".join(stream(tokenizer, [ids], continuation=False)) == "world hello"
    assert stream(tokenizer, [[], ids[:1], ids[1:]], continuation=False)[1] == "world"


def test_a_refused_push_changes_nothing() -> None:
    """Red when a wrong id leaves half of its push behind."""
    tokenizer = byte_level()
    ids = byte_ids(tokenizer, b"ab")
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    with pytest.raises(InvalidRequestError):
        detokenizer.push([ids[0], 10**6])
    assert detokenizer.push(ids) == "ab"


class CountingTokenizer(Tokenizer):
    """Counts how often a token is looked at."""

    looked_at = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.looked_at += 1
        return super().token_bytes(token_id)


@pytest.mark.parametrize("piece", [1, 7])
def test_each_token_is_looked_at_once(piece: int) -> None:
    """Red when the work of a push grows with what came before."""
    tokenizer = CountingTokenizer(byte_level()._parts, None)
    ids = byte_ids(byte_level(), (CHINESE * 50).encode())
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    for start in range(0, len(ids), piece):
        before = tokenizer.looked_at
        detokenizer.push(ids[start : start + piece])
        assert tokenizer.looked_at - before <= piece
    detokenizer.finish()
    assert tokenizer.looked_at == len(ids)
