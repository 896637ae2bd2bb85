"""What every tokenizer promises: special tokens, BOS, ends of turn, fingerprints, decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequestError
from octavo.models.tokenizer import LONG_TEXT, load_tokenizer
from octavo.models.tokenizer_source import GGUFTokenizerSource
from support_text import (
    CONTROL,
    NORMAL,
    TEXTS,
    TOKENIZERS,
    USER_DEFINED,
    byte_level,
    byte_level_metadata,
    quick,
    sentencepiece,
    sentencepiece_metadata,
    tokenizer_of,
)

BOS, IM_END, TOOL_CALL = 600, 602, 603  # ids in the byte-level tokenizer of support_text


def test_control_tokens_are_parsed_only_if_asked() -> None:
    """Red when a control token in a rendered chat is spelt out, or a forbidden one gets through."""
    tokenizer = byte_level()
    assert tokenizer.encode("<|im_end|>") == [IM_END]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert IM_END not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.decode(tokenizer.encode("a<|im_end|>b"), skip_special_tokens=True) == "ab"
    assert tokenizer.encode("<|im_end|>") == [IM_END]


def test_own_tokens_are_text() -> None:
    """Red when a user-defined token is hidden with control tokens, or is not found in text."""
    tokenizer = byte_level()
    for parse in (True, False):
        assert tokenizer.encode("<tool_call>", parse_special=parse) == [TOOL_CALL]
    assert tokenizer.decode([TOOL_CALL], skip_special_tokens=True) == "<tool_call>"
    assert TOOL_CALL not in tokenizer.special_token_ids


def test_bos_is_added_once() -> None:
    """Red when a template's own BOS is doubled, or a text without one gets none."""
    tokenizer = tokenizer_of(byte_level_metadata(add_bos_token=True))
    assert tokenizer.add_bos
    assert tokenizer.encode("") == [BOS]
    plain = tokenizer.encode("hi", add_special_tokens=False)
    assert tokenizer.encode("hi") == [BOS, *plain]
    assert tokenizer.encode("<|endoftext|>hi") == [BOS, *plain]
    assert tokenizer.encode("<|endoftext|>hi", add_special_tokens=False) == [BOS, *plain]


@pytest.mark.parametrize(
    ("pre", "flag", "expected"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smaug-bpe", None, False),
        ("qwen2", None, False),
        ("qwen2", True, True),
    ],
)
def test_bos_follows_the_file_then_the_kind(pre: str, flag: bool | None, expected: bool) -> None:
    """Red when Llama 3 loses its BOS or Qwen gets one."""
    tokenizer = tokenizer_of(byte_level_metadata(pre, add_bos_token=flag))
    assert tokenizer.add_bos is expected
    assert (tokenizer.encode("hi")[0] == BOS) is expected


def test_eos_is_added_only_if_the_file_says_so() -> None:
    """Red when prompts end with an end of text that nobody asked for."""
    tokenizer = tokenizer_of(byte_level_metadata(add_eos_token=True))
    assert tokenizer.encode("hi")[-1] == IM_END
    assert tokenizer.encode("hi<|im_end|>").count(IM_END) == 1
    assert byte_level().encode("hi")[-1] != IM_END


def test_every_end_of_turn_counts() -> None:
    """Red when a model talks on because only one of its ends of turn is known."""
    ends = ["</s>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>"]
    extra = [(text, CONTROL) for text in ends if text != "</s>"]
    metadata = sentencepiece_metadata(extra=[*extra, ("<halt>", CONTROL), ("<stop>", CONTROL)])
    tokens = metadata["tokenizer.ggml.tokens"]
    metadata["tokenizer.ggml.eot_token_id"] = tokens.index("<halt>")
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.end_token_ids == {tokens.index(text) for text in [*ends, "<halt>"]}


def test_an_end_of_turn_must_be_an_added_token() -> None:
    """Red when ordinary text that reads like an end of turn (HTML's ``</s>``) stops a model."""
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["</s>", "<end_of_turn>"]
    metadata["tokenizer.ggml.token_type"] += [NORMAL, USER_DEFINED]
    assert tokenizer_of(metadata).end_token_ids == {BOS, IM_END, 605}


@pytest.mark.parametrize(
    "change",
    [
        {"pre": "qwen2"},
        {"add_bos_token": True},
        {"bos_token_id": 601, "add_bos_token": True},
        {"eos_token_id": 5},
    ],
)
def test_fingerprint_changes_with_whatever_changes_ids(change: dict[str, object]) -> None:
    """Red when KV of another tokenizer could be reused."""
    other = tokenizer_of({**byte_level_metadata(), **_named(change)})
    assert other.fingerprint != byte_level().fingerprint


def test_fingerprint_is_that_of_the_content() -> None:
    """Red when equal tokenizers no longer share KV: another template, another load."""
    again = tokenizer_of({**byte_level_metadata(), "tokenizer.chat_template": "{{ messages }}"})
    assert again.fingerprint == byte_level().fingerprint


def test_fingerprint_sees_tokens_and_types() -> None:
    """Red when a swapped token or a changed type keeps the fingerprint."""
    prints = {byte_level().fingerprint}
    for key, at, value in [("tokens", 603, "<tool_cell>"), ("token_type", 603, CONTROL)]:
        metadata = byte_level_metadata()
        metadata[f"tokenizer.ggml.{key}"][at] = value
        prints.add(tokenizer_of(metadata).fingerprint)
    assert len(prints) == 3


def _named(change: dict[str, object]) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in change.items()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("token_id", [-1, 10**6, 2**63])
def test_ids_outside_of_the_vocabulary_are_refused(name: str, token_id: int) -> None:
    """Red when a wrong id wraps around, or ends in an IndexError."""
    tokenizer = TOKENIZERS[name]()
    for call in (lambda: tokenizer.decode([token_id]), lambda: tokenizer.token_text(token_id)):
        with pytest.raises(InvalidRequestError, match=r"Token id .* is outside of the vocabulary"):
            call()


def test_ids_without_a_token_add_no_text() -> None:
    """Red when an id that only the model's padded logits have ends a request."""
    source = GGUFTokenizerSource(byte_level_metadata())
    tokenizer = load_tokenizer(source, model_vocab_size=640)
    assert tokenizer.vocab_size == 640
    assert tokenizer.decode([*tokenizer.encode("hi"), 639]) == "hi"
    assert load_tokenizer(source, model_vocab_size=10).vocab_size == byte_level().vocab_size


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\ud83d \ude00"])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_unpaired_surrogates_are_refused(name: str, text: str) -> None:
    """Red when JSON's ``\\ud800`` ends in a traceback."""
    with pytest.raises(InvalidRequestError, match="unpaired surrogate at position"):
        TOKENIZERS[name]().encode(text)


def test_decoding_cleans_nothing_up() -> None:
    """ST-09: red when spaces before points or contractions are rewritten after the fact."""
    for tokenizer in (byte_level(), sentencepiece()):
        for text in ("     .", "do n't", " ' s", "a , b ! c ?", "I 'm", " ."):
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@quick
@given(ids=st.lists(st.integers(0, 603), max_size=20))
def test_decoding_is_joining_bytes(ids: list[int]) -> None:
    """Red when decoding stops being a function of the tokens' bytes, on which streaming rests."""
    tokenizer = byte_level()
    data = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")


@pytest.mark.reference
@quick
@given(ids=st.lists(st.integers(0, 603), max_size=20), skip=st.booleans())
def test_decoding_equals_the_library(ids: list[int], skip: bool) -> None:
    """Red when byte-level decoding differs from the Hugging Face decoder."""
    from tokenizers import decoders

    tokenizer = byte_level()
    backend = tokenizer._parts.backend
    tokens = [backend.id_to_token(i) for i in ids]
    kept = [t for t, i in zip(tokens, ids, strict=True) if not skip or i < 600 or i == TOOL_CALL]
    assert tokenizer.decode(ids, skip_special_tokens=skip) == decoders.ByteLevel().decode(kept)


def test_token_texts_for_people() -> None:
    """Red when logprobs show the byte-level alphabet or fail on half a character."""
    tokenizer = byte_level()
    assert [tokenizer.token_text(i) for i in tokenizer.encode(" é")][-1] in ("é", " é", "\ufffd")
    assert "".join(tokenizer.token_text(i) for i in tokenizer.encode(TEXTS[9])) == TEXTS[9]
    assert tokenizer.token_text(IM_END) == "<|im_end|>"
    assert sentencepiece().token_text(3 + 0x80) == "\ufffd"


def test_no_chat_template_says_what_to_do() -> None:
    """Red when a base model's chat ends in anything but a clear refusal."""
    with pytest.raises(InvalidRequestError, match="/v1/completions"):
        byte_level().render_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("special", [True, False])
def test_long_texts_are_encoded_as_short_ones(special: bool) -> None:
    """Turns red when the way that lets other threads go on gives other ids than the usual one."""
    tokenizer = byte_level()
    text = "Hello, <|im_end|> wörld! 日本\n" * (LONG_TEXT // 20)
    assert len(text) > LONG_TEXT
    usual = tokenizer._parts.backend if special else tokenizer._plain_backend
    expected = usual.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, add_special_tokens=False, parse_special=special) == expected
