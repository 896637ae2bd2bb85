"""SentencePiece BPE from GGUF metadata, compared with the sentencepiece library itself."""

import io
from functools import cache

import pytest
from hypothesis import given

from octavo.core.errors import LoadError
from octavo.models.tokenizer import Tokenizer
from support_text import (
    BYTE,
    CONTROL,
    CORPUS,
    NORMAL,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    gguf_metadata,
    quick,
    sentencepiece,
    sentencepiece_metadata,
    texts,
    tokenizer_of,
)

LLAMA, GEMMA = ("llama", True, ()), ("gemma", False, ("▁▁", "▁▁▁", "<tag>", "\n\n"))
VARIANTS = {"llama": LLAMA, "gemma": GEMMA}


@cache
def trained(variant: str):
    """Train a model with the library; return its processor and our tokenizer."""
    import sentencepiece as library

    _, space, own = VARIANTS[variant]
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS * 20 for line in text.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=space,
        user_defined_symbols=list(own),
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    processor = library.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    metadata = gguf_metadata(
        [(processor.id_to_piece(i), _type(processor, i, own)) for i in ids],
        model="llama",
        scores=[processor.get_score(i) for i in ids],
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
        add_space_prefix=space,
    )
    return processor, tokenizer_of(metadata)


def _type(processor, token_id: int, own: tuple[str, ...]) -> int:
    if processor.is_unknown(token_id):
        return UNKNOWN
    if processor.is_control(token_id):
        return CONTROL
    if processor.is_byte(token_id):
        return BYTE
    return USER_DEFINED if processor.id_to_piece(token_id) in own else NORMAL


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=False)


@pytest.mark.reference
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_library(variant: str) -> None:
    """Red when merging by score, byte fallback, spaces or a user's own tokens go astray."""
    processor, ours = trained(variant)
    for text in [*TEXTS, *(f"{text}  x   y    z" for text in TEXTS)]:
        assert ids_of(ours, text) == processor.encode(text), text
        assert ours.decode(processor.encode(text)) == processor.decode(processor.encode(text))


@pytest.mark.reference
@pytest.mark.parametrize("variant", VARIANTS)
@quick
@given(text=texts)
def test_equals_the_library_on_any_text(variant: str, text: str) -> None:
    """Red where only a rare text shows a difference."""
    processor, ours = trained(variant)
    assert ids_of(ours, text) == processor.encode(text)
    assert ours.decode(processor.encode(text)) == processor.decode(processor.encode(text))


@pytest.mark.reference
def test_equals_the_library_with_own_tokens_in_gemma() -> None:
    """Red when runs of spaces are no longer found longest first."""
    processor, ours = trained("gemma")
    for text in ["a    b", "\n\n\n\n", "<tag>x<tag>", "  <tag>   ", "     ", "x   <tag"]:
        assert ids_of(ours, text) == processor.encode(text), text


def test_a_space_is_put_before_a_text_and_after_control_tokens() -> None:
    """Red when words after a BOS lose their space (llama.cpp and transformers put one)."""
    tokenizer = sentencepiece()
    hello, world = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("hello", " world")
    )
    assert tokenizer.token_text(hello[0]) == " hello"
    assert tokenizer.encode("<s>hello", add_special_tokens=False) == [1, *hello]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [hello[0], world[-1]]
    assert tokenizer.encode("") == [1]


def test_no_space_is_put_where_the_file_says_so() -> None:
    """Red when Gemma's texts start with a space that nobody wrote."""
    tokenizer = tokenizer_of(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.token_text(ids[0]) == "he"
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(tokenizer.encode(" hello", add_special_tokens=False)) == " hello"


def test_first_space_is_taken_once() -> None:
    """Red when decoding takes spaces inside a text, or more than the one that was put."""
    tokenizer = sentencepiece()
    for text in ("hello world", "  hello", " ", "\nhello"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
    world = tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.decode(world) == "world"
    assert tokenizer.decode(world, continuation=True) == " world"


def test_unspellable_characters_become_bytes() -> None:
    """Red when a character outside of the pieces becomes unknown instead of its bytes."""
    tokenizer = sentencepiece()
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert [tokenizer.token_bytes(i) for i in ids[1:]] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]
    assert tokenizer.decode(ids) == "😀"
    assert tokenizer.decode(ids[:3]) == "\ufffd"


def test_byte_and_control_pieces_are_not_typed_by_hand() -> None:
    """Red when a user who types ``<0x41>`` or ``</s>`` gets the byte or the end of the text."""
    tokenizer = sentencepiece()
    assert tokenizer.encode("x", add_special_tokens=False)[-1] == 3 + ord("x")
    for typed in ("<0x41>", "</s>", "<unk>"):
        ids = ids_of(tokenizer, typed)
        assert len(ids) > 2
        assert tokenizer.decode(ids) == typed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": None}, "scores is missing"),
        ({"scores": [0.0, 1.0]}, "scores has 2 values"),
        ({"scores": [float("nan")] * 500}, "scores has 500 values|not all finite"),
    ],
)
def test_broken_scores_are_one_sentence(change: dict[str, object], message: str) -> None:
    """Red when pieces without usable scores are merged in some order or other."""
    with pytest.raises(LoadError, match=message):
        tokenizer_of(sentencepiece_metadata(**change))


def test_scores_that_are_no_numbers_are_refused() -> None:
    """Red when NaN scores sort the merges by chance."""
    metadata = sentencepiece_metadata()
    metadata["tokenizer.ggml.scores"] = [float("nan")] * len(metadata["tokenizer.ggml.tokens"])
    with pytest.raises(LoadError, match="not all finite"):
        tokenizer_of(metadata)


def test_scores_decide_the_merges() -> None:
    """Red when merging follows the order of ids instead of scores; the fingerprint follows."""
    extra = [("wo", NORMAL)]
    metadata = sentencepiece_metadata(extra=extra)
    low = tokenizer_of(metadata)
    scores = list(metadata["tokenizer.ggml.scores"])
    high = tokenizer_of({**metadata, "tokenizer.ggml.scores": [*scores[:-1], 1.0]})
    assert low.encode("awor") != high.encode("awor")
    assert low.fingerprint != high.fingerprint
