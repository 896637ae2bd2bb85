"""Byte-level BPE from GGUF metadata: the kinds of ``tokenizer.ggml.pre`` and broken files."""

import warnings
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import LoadError
from octavo.models.tokenizer import Tokenizer
from octavo.models.tokenizer_bpe import BPE_KINDS
from octavo.models.tokenizer_bytes import byte_level_bytes, token_table
from support_text import (
    CONTROL,
    NORMAL,
    TEXTS,
    bpe_parts,
    byte_level,
    byte_level_metadata,
    gguf_metadata,
    quick,
    texts,
    tokenizer_of,
    trained_bpe,
)

# The patterns as the models' authors or llama.cpp publish them, contractions written out.
APOSTROPHE = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"(?:{APOSTROPHE})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
LLAMA3 += rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
WORD_A = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
WORD_B = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
TEKKEN = rf"{WORD_A}|{WORD_B}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
O200K = rf"{WORD_A}(?:{APOSTROPHE})?|{WORD_B}(?:{APOSTROPHE})?|\p{{N}}{{1,3}}"
O200K += rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
DEEPSEEK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
DEEPSEEK += r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + TAIL
CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
WORDS: dict[str, Sequence[str]] = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "llama-bpe": [LLAMA3],
    "smaug-bpe": [LLAMA3],
    "qwen2": [QWEN2],
    "tekken": [TEKKEN],
    "gpt-4o": [O200K],
    "deepseek-v3": [r"\p{N}{1,3}", CJK, DEEPSEEK],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
}


@cache
def tokenizer_with(pre: str) -> Tokenizer:
    """Return the trained tokenizer, with words cut as ``pre`` says."""
    return tokenizer_of(byte_level_metadata(pre))


def oracle(pre: str, text: str) -> list[int]:
    """Tokenize the slow and plain way: ``regex`` for the words, textbook merging."""
    import unicodedata

    import regex

    words = [unicodedata.normalize("NFC", text) if pre == "qwen2" else text]
    for pattern in WORDS[pre]:
        words = [piece for word in words for piece in _isolate(regex, pattern, word)]
    vocab, merges = bpe_parts(trained_bpe())
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    keep = BPE_KINDS[pre].ignore_merges
    return [i for word in words for i in _merge(_spell(word), vocab, ranks, keep)]


def _isolate(regex, pattern: str, text: str) -> list[str]:
    pieces, end = [], 0
    for match in regex.finditer(pattern, text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in [*pieces, text[end:]] if piece]


def _spell(word: str) -> str:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = bytes_to_unicode()
    return "".join(table[byte] for byte in word.encode())


def _merge(word: str, vocab, ranks, keep: bool) -> list[int]:
    if keep and word in vocab:
        return [vocab[word]]
    parts = list(word)
    while True:
        pairs = list(pairwise(parts))
        best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)), default=None)
        if best not in ranks:
            return [vocab[part] for part in parts]
        at = pairs.index(best)
        parts[at : at + 2] = ["".join(best)]


@pytest.mark.reference
@pytest.mark.parametrize("pre", WORDS)
def test_kind_equals_an_independent_tokenizer(pre: str) -> None:
    """Red when a pattern is mistyped, or a kind loses its normalization or its whole words."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in TEXTS:
            assert tokenizer_with(pre).encode(text, add_special_tokens=False) == oracle(pre, text)


@pytest.mark.reference
@pytest.mark.parametrize("pre", WORDS)
@quick
@given(text=texts)
def test_kind_equals_an_independent_tokenizer_on_any_text(pre: str, text: str) -> None:
    """Red where only a rare text (capital contractions, digits, blank lines) shows a slip."""
    ours = tokenizer_with(pre).encode(text, add_special_tokens=False, parse_special=False)
    assert ours == oracle(pre, text)


@pytest.mark.reference
@pytest.mark.parametrize(("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")])
@quick
@given(text=texts)
def test_kind_equals_transformers(pre: str, name: str, text: str) -> None:
    """Red when a rebuilt tokenizer and the model's own class disagree."""
    reference = transformers_tokenizer(name)
    assert tokenizer_with(pre).encode(text, add_special_tokens=False, parse_special=False) == (
        reference.encode(text, add_special_tokens=False).ids
    )


@cache
def transformers_tokenizer(name: str):
    import transformers

    vocab, merges = bpe_parts(trained_bpe())
    return getattr(transformers, name)(vocab=dict(vocab), merges=list(merges))._tokenizer


def test_unknown_kind_is_named() -> None:
    """Red when a file of an unknown kind is tokenized wrongly instead of refused."""
    with pytest.raises(LoadError, match=r"'mystery'.*smollm") as caught:
        tokenizer_of(byte_level_metadata("mystery"))
    assert "qwen2" in caught.value.message


def test_missing_kind_means_default() -> None:
    """Red when old files without ``tokenizer.ggml.pre`` stop loading."""
    text = "cost: $12345!"
    assert tokenizer_of(byte_level_metadata(None)).encode(text) == (
        tokenizer_with("default").encode(text)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "'ab' is not two tokens"),
        ({"merges": ["", "a b"]}, "'' is not two tokens"),
        ({"merges": ["q zzzz"]}, "merges do not fit"),
        ({"merges": "a b"}, "not a list of strings"),
        ({"token_type": [1, 2]}, "token_type has 2 values for"),
        ({"token_type": "abc"}, "token_type is not a list of numbers"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": ["a", 3]}, "not a list of strings"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, outside"),
        ({"eos_token_id": -1}, "eos_token_id is -1, outside"),
        ({"eos_token_id": "</s>"}, "eos_token_id is not an integer"),
        ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token is true"),
        ({"model": "bert"}, "'bert'; Octavo knows 'gpt2'"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
    ],
)
def test_broken_metadata_is_one_sentence(change: dict[str, object], message: str) -> None:
    """Red when inconsistent metadata ends in a traceback or in a wrong tokenizer."""
    metadata = byte_level_metadata()
    for key, value in change.items():
        metadata[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(LoadError, match=message) as caught:
        tokenizer_of(metadata)
    assert "\n" not in caught.value.message


def test_token_twice_is_refused() -> None:
    """Red when one of two equal tokens silently loses its id."""
    metadata = gguf_metadata(
        [("a", NORMAL), ("b", NORMAL), ("a", NORMAL)], model="gpt2", pre="gpt-2", merges=[]
    )
    with pytest.raises(LoadError, match="the token 'a' twice"):
        tokenizer_of(metadata)


def test_empty_tokens_keep_their_ids() -> None:
    """Red when an empty token (padding of some files) shifts ids or stops the load."""
    metadata = gguf_metadata(
        [("a", NORMAL), ("", NORMAL), ("b", NORMAL), ("<x>", CONTROL)],
        model="gpt2",
        pre="gpt-2",
        merges=[],
    )
    assert tokenizer_of(metadata).encode("ab<x>") == [0, 2, 3]


def test_merges_follow_the_order_of_the_file() -> None:
    """Red when ids stop depending on the rank of merges."""
    tokens = [(text, NORMAL) for text in ("a", "b", "c", "ab", "bc")]
    common = {"model": "gpt2", "pre": "gpt-2"}
    first = gguf_metadata(tokens, merges=["a b", "b c"], **common)
    second = gguf_metadata(tokens, merges=["b c", "a b"], **common)
    assert tokenizer_of(first).encode("abc") == [3, 2]
    assert tokenizer_of(second).encode("abc") == [0, 4]
    assert tokenizer_of(first).fingerprint != tokenizer_of(second).fingerprint


@quick
@given(text=texts)
def test_every_text_survives(text: str) -> None:
    """Red when bytes are lost on the way to ids and back."""
    tokenizer = byte_level()
    assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


ALPHABET_AND_MORE = st.text(
    st.one_of(st.characters(max_codepoint=0x180), st.characters(exclude_categories=["Cs"]))
)


@quick
@given(st.lists(ALPHABET_AND_MORE, max_size=12), st.sets(st.integers(0, 11)))
def test_a_whole_vocabulary_is_spelt_like_its_tokens(texts: list[str], literal: set[int]) -> None:
    """Turns red if reading all characters at once moves a token's border, or misses one outside of
    the alphabet, or one that is literal."""
    ids = frozenset(i for i in literal if i < len(texts))
    wanted = [t.encode() if i in ids else byte_level_bytes(t) for i, t in enumerate(texts)]
    assert list(token_table(texts, byte_level_bytes, ids)) == wanted
