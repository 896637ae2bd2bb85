"""The default model's tokenizer gives the ids that llama.cpp gives."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given

from octavo.models.gguf import read_gguf
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.models.tokenizer_source import GGUFTokenizerSource
from support_text import quick, texts

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def smollm2(model_path: Path) -> Tokenizer:
    """The default model's tokenizer, rebuilt from its GGUF file."""
    return load_tokenizer(GGUFTokenizerSource(read_gguf(model_path).metadata))


@pytest.mark.shared
def test_golden_texts_tokenize_alike(smollm2: Tokenizer, shared: Path) -> None:
    """Red when the smollm words, the merges or the order of digits and words change."""
    cases = json.loads((shared / "golden" / "smollm2_tokenizer.json").read_text())["cases"]
    assert len(cases) == 102
    for case in cases:
        ids = smollm2.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
        assert smollm2.decode(ids) == case["text"]


def test_facts_of_the_default_model(smollm2: Tokenizer) -> None:
    """Red when an end of turn is missed, or a BOS is added that the file does not ask for."""
    assert smollm2.vocab_size == 49152
    assert smollm2.end_token_ids == {0, 2}
    assert smollm2.special_token_ids == set(range(17))
    assert not smollm2.add_bos
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.decode([2], skip_special_tokens=True) == ""
    prompt = smollm2.render_chat([{"role": "user", "content": "Hi"}])
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.encode(prompt).count(2) == 2


@quick
@given(text=texts)
def test_round_trip(smollm2: Tokenizer, text: str) -> None:
    """Red when decoding changes a text made of bytes that the vocabulary has (it lacks some)."""
    spellable = {smollm2.token_bytes(i) for i in range(17, smollm2.vocab_size)}
    assume(all(bytes([byte]) in spellable for byte in text.encode()))
    ids = smollm2.encode(text, parse_special=False)
    assert smollm2.decode(ids) == text
    assert b"".join(smollm2.token_bytes(i) for i in ids) == text.encode()
