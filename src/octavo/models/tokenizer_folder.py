"""A tokenizer from a Hugging Face style folder: ``tokenizer.json`` and the files beside it."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as HFTokenizer

from octavo.core.errors import LoadError
from octavo.core.ids import TokenId
from octavo.models.tokenizer_bytes import byte_level_bytes, sentencepiece_bytes, token_table
from octavo.models.tokenizer_parts import TokenizerParts, ending_ids

_TOKENIZER: Final = "tokenizer.json"
_SPARE_IDS: Final = 2**20
"""Ids beyond the number of tokens that a vocabulary may skip before it counts as corrupt."""


def parts_from_folder(folder: Path) -> TokenizerParts:
    """Build a tokenizer from ``tokenizer.json``, ``tokenizer_config.json``,
    ``special_tokens_map.json``, ``generation_config.json`` and the chat template files.

    What the files ask to be cleaned up, cut or filled in is not done.

    Raises:
        LoadError: ``tokenizer.json`` is missing, broken, or decodes in a way that Octavo does
            not know.
    """
    text = _read(folder / _TOKENIZER)
    if text is None:
        raise LoadError(f"{folder} has no {_TOKENIZER}, so its texts cannot be tokenized.")
    description = _parse(folder / _TOKENIZER, text)
    try:
        backend = HFTokenizer.from_str(text)
    except Exception as error:  # tokenizers raises plain Exception
        raise LoadError(f"{folder / _TOKENIZER} cannot be used: {error}.") from error
    backend.no_truncation()
    backend.no_padding()
    if hasattr(backend.model, "dropout"):
        backend.model.dropout = None  # would make ids depend on chance
    config = _optional(folder, "tokenizer_config.json")
    return _assemble(folder, text, description, backend, config)


def _assemble(
    folder: Path,
    text: str,
    description: Mapping[str, object],
    backend: HFTokenizer,
    config: Mapping[str, object],
) -> TokenizerParts:
    to_bytes, strips = _decoding(description.get("decoder"))
    texts = _texts_by_id(folder, backend)
    added = backend.get_added_tokens_decoder()
    ids = {token.content: token_id for token_id, token in added.items()}
    named = _named_tokens(folder, config)
    known = {name: backend.token_to_id(token) for name, token in named.items()}
    special = {token_id for token_id, token in added.items() if token.special}
    special |= {token_id for token_id in known.values() if token_id is not None}
    prefix, suffix = _affixes(backend)
    prefix = _with_setting(prefix, known.get("bos_token"), config.get("add_bos_token"), at=0)
    suffix = _with_setting(suffix, known.get("eos_token"), config.get("add_eos_token"), at=None)
    ends = _generation_ends(folder, len(texts)) | ending_ids(ids)
    eos = known.get("eos_token")
    return TokenizerParts(
        backend=backend,
        token_bytes=token_table(
            texts,
            to_bytes,
            literal_ids=frozenset(added) if to_bytes is byte_level_bytes else frozenset(),
        ),
        fingerprint=hashlib.blake2b(
            text.encode() + json.dumps([prefix, suffix]).encode(), digest_size=16
        ).hexdigest(),
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_token_id=known.get("bos_token"),
        end_token_ids=ends if eos is None else ends | {eos},
        special_token_ids=frozenset(special),
        strips_leading_space=strips,
        chat_templates=_chat_templates(folder, config),
        special_tokens=named,
    )


def _read(path: Path) -> str | None:
    """Return a file's text, None if there is no such file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from error


def _parse(path: Path, text: str) -> Mapping[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, Mapping):
        raise LoadError(f"{path} must hold a JSON object.")
    return value


def _optional(folder: Path, name: str) -> Mapping[str, object]:
    text = _read(folder / name)
    return {} if text is None else _parse(folder / name, text)


def _texts_by_id(folder: Path, backend: HFTokenizer) -> list[str]:
    """Return every id's token; ids that the vocabulary skips have an empty one."""
    vocab = backend.get_vocab(with_added_tokens=True)
    if not vocab:
        raise LoadError(f"{folder / _TOKENIZER} has an empty vocabulary.")
    size = max(vocab.values()) + 1
    if size > len(vocab) + _SPARE_IDS:
        raise LoadError(
            f"{folder / _TOKENIZER} has a token with id {size - 1} among {len(vocab)} tokens."
        )
    texts = [""] * size
    for token, token_id in vocab.items():
        texts[token_id] = token
    return texts


def _decoding(decoder: object) -> tuple[Callable[[str], bytes], bool]:
    """Return how tokens spell bytes, and whether a text's first space is not its own."""
    steps = _decoder_steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if kinds == ["Metaspace"]:
        return _without_fallback, steps[0].get("prepend_scheme") != "never"
    if "Replace" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strip = next((step for step in steps if step.get("type") == "Strip"), {})
        fallback = "ByteFallback" in kinds
        return (sentencepiece_bytes if fallback else _without_fallback), bool(strip.get("start"))
    names = " + ".join(map(str, kinds)) or "missing"
    raise LoadError(
        f"The decoder of {_TOKENIZER} is {names:.100}; Octavo knows ByteLevel, Metaspace, and "
        "Replace with ByteFallback, Fuse and Strip."
    )


def _decoder_steps(decoder: object) -> list[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        return []
    inner = decoder.get("decoders")
    if decoder.get("type") == "Sequence" and isinstance(inner, list):
        return [step for item in inner for step in _decoder_steps(item)]
    return [decoder]


def _without_fallback(text: str) -> bytes:
    return sentencepiece_bytes(text, byte_fallback=False)


def _affixes(backend: HFTokenizer) -> tuple[tuple[TokenId, ...], tuple[TokenId, ...]]:
    """Return what the file's post-processor puts before and behind a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    if not plain:  # a vocabulary without letters
        return tuple(whole), ()
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


def _with_setting(
    ids: tuple[TokenId, ...], token_id: TokenId | None, wanted: object, *, at: int | None
) -> tuple[TokenId, ...]:
    """Follow ``add_bos_token`` and ``add_eos_token`` where they differ from ``tokenizer.json``."""
    if token_id is None or not isinstance(wanted, bool) or wanted == (token_id in ids):
        return ids
    if not wanted:
        return tuple(i for i in ids if i != token_id)
    return (token_id, *ids) if at == 0 else (*ids, token_id)


def _named_tokens(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return ``bos_token`` and its like with their texts; ``tokenizer_config.json`` wins."""
    named: dict[str, str] = {}
    for source in (_optional(folder, "special_tokens_map.json"), config):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(content, str):
                named[name] = content
    return named


def _generation_ends(folder: Path, vocab_size: int) -> frozenset[TokenId]:
    """Return the end-of-turn ids that ``generation_config.json`` names: one or a list."""
    value = _optional(folder, "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if type(i) is int and 0 <= i < vocab_size)


def _chat_templates(folder: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Return the templates by name; a file of its own wins over the configuration."""
    templates: dict[str, str] = {}
    for source in (config, _optional(folder, "chat_template.json")):
        given = source.get("chat_template")
        if isinstance(given, str):
            templates["default"] = given
        elif isinstance(given, list):
            templates |= {
                item["name"]: item["template"]
                for item in given
                if isinstance(item, Mapping) and {"name", "template"} <= item.keys()
            }
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = _read(path) or ""
    default = _read(folder / "chat_template.jinja")
    return templates if default is None else {**templates, "default": default}
