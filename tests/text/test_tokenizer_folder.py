"""Tokenizers from Hugging Face style folders, as transformers would use them."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as HFTokenizer

from octavo.core.errors import InvalidRequestError, LoadError
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.models.tokenizer_sentencepiece import merges_from_scores
from octavo.models.tokenizer_source import FolderTokenizerSource
from support_text import TEXTS, bpe_parts, quick, sentencepiece_metadata, texts, trained_bpe

EOT = 600


def byte_level() -> HFTokenizer:
    """Return a Llama 3 like tokenizer whose post-processor puts a BOS."""
    vocab, merges = bpe_parts(trained_bpe())
    tokenizer = HFTokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|python_tag|>"]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", EOT + 1)]
    )
    return tokenizer


def sentencepiece() -> HFTokenizer:
    """Return a Llama 2 like tokenizer."""
    metadata: dict[str, Any] = sentencepiece_metadata()
    vocab = {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = merges_from_scores(vocab, metadata["tokenizer.ggml.scores"], frozenset(range(259)))
    tokenizer = HFTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>"]
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return tokenizer


BACKENDS = {"byte_level": byte_level, "sentencepiece": sentencepiece}
END = {"content": "<|end_of_text|>", "__type": "AddedToken"}
CONFIG = {
    "byte_level": {"bos_token": "<|begin_of_text|>", "eos_token": END},
    "sentencepiece": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
}


def write(folder: Path, backend: HFTokenizer | str, **files: Any) -> Path:
    """Write a folder; keywords are file names without ``.json``."""
    text = backend if isinstance(backend, str) else backend.to_str()
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(FolderTokenizerSource(folder))


@pytest.fixture(scope="module", params=BACKENDS)
def pair(request, tmp_path_factory) -> tuple[HFTokenizer, Tokenizer]:
    """The library's tokenizer and ours, from the same folder."""
    backend = BACKENDS[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    return backend, load(write(folder, backend, tokenizer_config=CONFIG[request.param]))


@quick
@given(text=texts)
def test_ids_and_texts_equal_the_library(pair, text: str) -> None:
    """Red when a folder's texts get other ids, or other texts come back."""
    backend, ours = pair
    ids = backend.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special_tokens=False) == ids
    assert ours.decode(ids, skip_special_tokens=True) == backend.decode(ids)


@quick
@given(data=st.data())
def test_streaming_equals_decoding(pair, data: st.DataObject) -> None:
    """ST-09: red when streamed text of a folder's tokenizer is not its decoded text."""
    _, ours = pair
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    detokenizer = IncrementalDetokenizer(ours, skip_special_tokens=True, continuation=False)
    streamed = "".join([*(detokenizer.push([i]) for i in ids), detokenizer.finish()])
    assert streamed == ours.decode(ids, skip_special_tokens=True)


@pytest.mark.reference
@pytest.mark.parametrize("name", BACKENDS)
def test_ids_equal_transformers(name: str, tmp_path: Path) -> None:
    """Red when BOS, special tokens or decoding differ from PreTrainedTokenizerFast."""
    write(tmp_path, BACKENDS[name](), tokenizer_config=CONFIG[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import PreTrainedTokenizerFast

        reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.bos_token_id == reference.bos_token_id
    for text in TEXTS:
        ids = reference.encode(text)
        start = [] if ours.add_bos and ids[:1] == [ours.bos_token_id] else [ours.bos_token_id]
        assert ours.encode(text) == [*start, *ids]
        expected = reference.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        assert ours.decode(ids, skip_special_tokens=True) == expected


def test_facts_of_a_folder(tmp_path: Path) -> None:
    """Red when an end of turn, a special token or the post-processor's BOS is missed."""
    write(
        tmp_path,
        byte_level(),
        tokenizer_config=CONFIG["byte_level"],
        generation_config={"eos_token_id": [EOT + 2, EOT + 3]},
    )
    ours = load(tmp_path)
    assert (ours.bos_token_id, ours.add_bos) == (EOT + 1, True)
    assert ours.end_token_ids == {EOT, EOT + 2, EOT + 3}
    assert ours.special_token_ids == {EOT, EOT + 1, EOT + 2, EOT + 3}
    assert ours.encode("<|begin_of_text|>hi") == ours.encode("hi")
    plain = ours.encode("<|eot_id|><tool_call>", parse_special=False)
    assert EOT not in plain
    assert plain[-1] == EOT + 4
    assert ours.encode("<|eot_id|>")[-1] == EOT


@pytest.mark.parametrize(
    ("setting", "expected"), [(True, True), (False, False), (None, True), ("yes", True)]
)
def test_add_bos_token_wins_over_the_post_processor(
    tmp_path: Path, setting: object, expected: bool
) -> None:
    """Red when ``add_bos_token`` of the configuration is ignored, or guessed from odd values."""
    config = {**CONFIG["byte_level"], "add_bos_token": setting}
    assert load(write(tmp_path, byte_level(), tokenizer_config=config)).add_bos is expected


def test_a_vocabulary_without_letters_keeps_its_bos(tmp_path: Path) -> None:
    """Red when what a post-processor puts in front is taken for what it puts behind."""
    backend = HFTokenizer(models.BPE({"1": 0, "2": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    assert load(write(tmp_path, backend)).encode("12") == [2, 0, 1]


def test_settings_that_change_texts_are_off(tmp_path: Path) -> None:
    """ST-09: red when truncation, padding, dropout or clean-up of the files takes effect."""
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=64, pad_id=0)
    description = json.loads(backend.to_str())
    description["model"]["dropout"] = 0.9
    config = {"clean_up_tokenization_spaces": True}
    ours = load(write(tmp_path, json.dumps(description), tokenizer_config=config))
    text = "do n't say hello world . ok ?"
    first = ours.encode(text, add_special_tokens=False)
    assert len(first) > 3
    assert all(ours.encode(text, add_special_tokens=False) == first for _ in range(20))
    assert ours.decode(first) == text


@pytest.mark.parametrize(
    ("decoder", "strips"),
    [
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}, False),
        ({"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "Fuse"}]}, False),
    ],
)
def test_decoders_with_space_marks(tmp_path: Path, decoder: dict, strips: bool) -> None:
    """Red when a first space is taken that the encoder never put, or left that it did."""
    if decoder["type"] == "Sequence":
        decoder["decoders"][0] |= {"pattern": {"String": "▁"}, "content": " "}
    description = {**json.loads(sentencepiece().to_str()), "decoder": decoder}
    ours = load(write(tmp_path, json.dumps(description)))
    hello = ours.encode("hello", add_special_tokens=False)
    assert ours.decode(hello) == ("hello" if strips else " hello")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder": None}, "decoder of tokenizer.json is missing"),
        ({"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "is WordPiece"),
        ({"model": {"type": "Magic"}}, "cannot be used"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}, "an empty voc"),
        ({"version": "9"}, "cannot be used"),
    ],
)
def test_unknown_tokenizers_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    """Red when a tokenizer of an unknown make produces garbage instead of a refusal."""
    description = json.loads(byte_level().to_str())
    write(tmp_path, json.dumps({**description, "post_processor": None, **change}))
    with pytest.raises(LoadError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00", "[" * 100000, "null"])
def test_broken_json_is_one_sentence(tmp_path: Path, text: str) -> None:
    """Red when a broken file ends in a traceback."""
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        load(write(tmp_path, text))
    write(tmp_path, byte_level())
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(LoadError, match=r"tokenizer_config\.json"):
        load(tmp_path)


def test_missing_or_unreadable_files(tmp_path: Path) -> None:
    """Red when a folder without a tokenizer, or with binary in its place, ends in a traceback."""
    with pytest.raises(LoadError, match=r"has no tokenizer\.json"):
        load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match="cannot be read"):
        load(tmp_path)


def test_huge_ids_cost_no_memory(tmp_path: Path) -> None:
    """Red when one token with a huge id makes a table of four billion tokens."""
    description = json.loads(byte_level().to_str())
    description["model"]["vocab"]["zzz"] = 4_000_000_000
    with pytest.raises(LoadError, match="id 4000000000 among"):
        load(write(tmp_path, json.dumps(description)))


def test_skipped_ids_add_no_text(tmp_path: Path) -> None:
    """Red when ids that a vocabulary leaves out shift others, or fail to decode."""
    description = json.loads(byte_level().to_str())
    description["model"]["vocab"]["zzz"] = 700
    ours = load(write(tmp_path, json.dumps(description)))
    assert ours.vocab_size == 701
    assert ours.decode([650, 700]) == "zzz"
    with pytest.raises(InvalidRequestError):
        ours.decode([701])


def test_fingerprints_of_folders(tmp_path: Path) -> None:
    """Red when the fingerprint misses a changed file, or follows one that changes no ids."""
    prints = []
    configs = [CONFIG["byte_level"], {**CONFIG["byte_level"], "chat_template": "x"}]
    configs.append({**CONFIG["byte_level"], "add_bos_token": False})
    for config in configs:
        prints.append(load(write(tmp_path, byte_level(), tokenizer_config=config)).fingerprint)
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    prints.append(load(write(tmp_path, backend, tokenizer_config=configs[0])).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": '{"chat_template": "config"}'}, "config"),
        (
            {"tokenizer_config.json": '{"chat_template": "c"}', "chat_template.jinja": "file"},
            "file",
        ),
        ({"chat_template.json": '{"chat_template": "json"}'}, "json"),
        ({"additional_chat_templates/rag.jinja": "rag"}, "rag"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "tools"},
                            {"name": "default", "template": "{{ bos_token }}"},
                        ],
                        "bos_token": {"content": "<s>"},
                    }
                )
            },
            "<s>",
        ),
    ],
)
def test_places_of_chat_templates(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    """Red when a template is not found where Hugging Face puts it, or the wrong one wins."""
    write(tmp_path, byte_level())
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert load(tmp_path).render_chat(MESSAGES) == expected


def test_no_template_in_a_folder(tmp_path: Path) -> None:
    """Red when a base model's folder pretends to have a chat template."""
    assert load(write(tmp_path, byte_level())).chat_template is None
