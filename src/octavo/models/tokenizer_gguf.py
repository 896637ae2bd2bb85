"""A tokenizer from the metadata of a GGUF file."""

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as HFTokenizer

from octavo.core.errors import LoadError
from octavo.core.ids import TokenId
from octavo.models.tokenizer_bpe import bpe_kind, build_bpe
from octavo.models.tokenizer_bytes import byte_level_bytes, sentencepiece_bytes, token_table
from octavo.models.tokenizer_parts import TokenizerParts, ending_ids
from octavo.models.tokenizer_sentencepiece import build_sentencepiece

_PREFIX: Final = "tokenizer.ggml."
_TEMPLATE: Final = "tokenizer.chat_template"
_NAMED_IDS: Final = ("bos", "eos", "unknown", "padding", "eot", "eom")
_TEMPLATE_NAMES: Final = {"unknown": "unk_token", "padding": "pad_token"}


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Metadata:
    """The ``tokenizer.ggml.*`` keys, checked as they are read."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, str):
            raise LoadError(f"The file's {_PREFIX}{key} is missing or not a string.")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key)
        return default if value is None else bool(value)

    def strings(self, key: str) -> list[str]:
        value = self._metadata.get(_PREFIX + key)
        if isinstance(value, Sequence) and not isinstance(value, str):
            texts = list(value)
            if all(issubclass(kind, str) for kind in set(map(type, texts))):
                return texts
        raise LoadError(f"The file's {_PREFIX}{key} is missing or not a list of strings.")

    def numbers(self, key: str, length: int) -> list[float] | None:
        """Return one number per token, None where the file has none."""
        value = self._metadata.get(_PREFIX + key)
        if value is None:
            return None
        try:
            array = np.asarray(value, np.float64)
        except (TypeError, ValueError) as error:
            raise LoadError(f"The file's {_PREFIX}{key} is not a list of numbers.") from error
        if array.ndim != 1:
            raise LoadError(f"The file's {_PREFIX}{key} is not a list of numbers.")
        numbers: list[float] = array.tolist()
        if len(numbers) != length:
            raise LoadError(
                f"The file's {_PREFIX}{key} has {len(numbers)} values for {length} tokens."
            )
        return numbers

    def token_id(self, name: str, vocab_size: int) -> TokenId | None:
        value = self._metadata.get(f"{_PREFIX}{name}_token_id")
        if value is None:
            return None
        try:
            token_id = operator.index(value)  # type: ignore[arg-type]
        except TypeError as error:
            raise LoadError(f"The file's {_PREFIX}{name}_token_id is not an integer.") from error
        if not 0 <= token_id < vocab_size:
            raise LoadError(
                f"The file's {_PREFIX}{name}_token_id is {token_id}, outside of its "
                f"{vocab_size} tokens."
            )
        return token_id


class _Vocabulary:
    """Tokens and their types, checked to be consistent."""

    def __init__(self, meta: _Metadata) -> None:
        self.texts = meta.strings("tokens")
        if not self.texts:
            raise LoadError(f"The file's {_PREFIX}tokens is empty.")
        if "" in self.texts:
            self.texts = [text or f"[EMPTY_{i}]" for i, text in enumerate(self.texts)]
        self.ids = dict(zip(self.texts, range(len(self.texts)), strict=True))
        if len(self.ids) != len(self.texts):
            twice = next(text for i, text in enumerate(self.texts) if self.ids[text] != i)
            raise LoadError(f"The file's vocabulary has the token {twice!r:.80} twice.")
        types = meta.numbers("token_type", len(self.texts))
        self.types = list(map(int, types)) if types else [int(TokenType.NORMAL)] * len(self)
        self._ids_of_type: dict[int, list[TokenId]] = {}
        for token_id, kind in enumerate(self.types):
            self._ids_of_type.setdefault(kind, []).append(token_id)
        self.named = {name: meta.token_id(name, len(self)) for name in _NAMED_IDS}
        if meta.text("model") == "llama":
            self._name_llama_defaults()

    def __len__(self) -> int:
        return len(self.texts)

    def _name_llama_defaults(self) -> None:
        """Name llama's own special tokens where the file names none."""
        for token_id, name in enumerate(("unknown", "bos", "eos")):
            marked = token_id in self.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
            if self.named[name] is None and marked:
                self.named[name] = token_id

    def of_type(self, *types: TokenType) -> frozenset[TokenId]:
        """Return the ids of tokens of these types."""
        return frozenset().union(*(self._ids_of_type.get(kind, ()) for kind in types))

    def digest(self) -> str:
        """Return a hash of the tokens and their types."""
        return _digest([json.dumps(self.texts), json.dumps(self.types)])

    def special_ids(self) -> frozenset[TokenId]:
        """Return the ids that control the model: marked so, or named as such."""
        named = (self.named[name] for name in ("bos", "eos", "eot", "eom"))
        return self.of_type(TokenType.CONTROL, TokenType.UNKNOWN) | {
            token_id for token_id in named if token_id is not None
        }

    def special_token_texts(self) -> dict[str, str]:
        """Return what chat templates may know: ``bos_token`` and the like."""
        return {
            _TEMPLATE_NAMES.get(name, f"{name}_token"): self.texts[token_id]
            for name, token_id in self.named.items()
            if token_id is not None
        }


def parts_from_gguf(metadata: Mapping[str, object]) -> TokenizerParts:
    """Build a tokenizer from a GGUF file's ``tokenizer.*`` keys.

    Supports byte-level BPE (``tokenizer.ggml.model`` = ``gpt2``) and SentencePiece BPE
    (``llama``). Added tokens are taken out of a text before anything else.

    Raises:
        LoadError: the metadata is incomplete, inconsistent or of another kind.
    """
    meta = _Metadata(metadata)
    model = meta.text("model")
    if model not in ("gpt2", "llama"):
        raise LoadError(
            f"The file's {_PREFIX}model is {model!r:.80}; Octavo knows 'gpt2' (byte-level BPE) "
            "and 'llama' (SentencePiece)."
        )
    vocabulary = _Vocabulary(meta)
    family = _byte_level(meta, vocabulary) if model == "gpt2" else _sentencepiece(meta, vocabulary)
    return _assemble(metadata, meta, vocabulary, family)


@dataclass(frozen=True)
class _Family:
    """What byte-level BPE and SentencePiece do in their own ways."""

    backend: HFTokenizer
    digest: str
    adds_bos: bool
    """Whether texts start with the BOS where the file does not say."""
    adds_space: bool
    """Whether a space is put before a text."""
    byte_level: bool


def _byte_level(meta: _Metadata, vocabulary: _Vocabulary) -> _Family:
    pre = meta.text("pre", "default")
    kind = bpe_kind(pre)
    merges = meta.strings("merges")
    return _Family(
        backend=build_bpe(vocabulary.ids, merges, kind),
        digest=_digest(["gpt2", pre, json.dumps(merges)]),
        adds_bos=kind.adds_bos,
        adds_space=False,
        byte_level=True,
    )


def _sentencepiece(meta: _Metadata, vocabulary: _Vocabulary) -> _Family:
    scores = meta.numbers("scores", len(vocabulary))
    if scores is None or not all(math.isfinite(score) for score in scores):
        raise LoadError(f"The file's {_PREFIX}scores is missing or not all finite numbers.")
    unknown = vocabulary.named["unknown"]
    adds_space = meta.flag("add_space_prefix", True)
    backend = build_sentencepiece(
        vocabulary.ids,
        scores,
        vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE),
        unknown=None if unknown is None else vocabulary.texts[unknown],
        add_space_prefix=adds_space,
    )
    return _Family(
        backend=backend,
        digest=_digest(["llama", json.dumps([adds_space, unknown, scores])]),
        adds_bos=True,
        adds_space=adds_space,
        byte_level=False,
    )


def _assemble(
    metadata: Mapping[str, object], meta: _Metadata, vocabulary: _Vocabulary, family: _Family
) -> TokenizerParts:
    """Add what both families share: added tokens, special ids, templates, the fingerprint."""
    special = vocabulary.special_ids()
    user_defined = vocabulary.of_type(TokenType.USER_DEFINED) - special
    added = {vocabulary.texts[i]: i for i in sorted(special | user_defined)}
    # SentencePiece finds a user's own tokens (Gemma's runs of spaces) after spaces became marks.
    # With a space put first that cannot be had: it would be put before the token's text too.
    after_marks = not family.byte_level and not family.adds_space
    family.backend.add_tokens(
        [
            AddedToken(text, special=i in special, normalized=after_marks and i not in special)
            for text, i in added.items()
        ]
    )
    prefix = _affix(meta, vocabulary, "bos", default=family.adds_bos)
    suffix = _affix(meta, vocabulary, "eos", default=False)
    ends = (vocabulary.named[name] for name in ("eos", "eot", "eom"))
    return TokenizerParts(
        backend=family.backend,
        token_bytes=token_table(
            vocabulary.texts,
            byte_level_bytes if family.byte_level else sentencepiece_bytes,
            literal_ids=frozenset(added.values()) if family.byte_level else frozenset(),
        ),
        fingerprint=_digest(
            [family.digest, vocabulary.digest(), json.dumps([sorted(special), prefix, suffix])]
        ),
        prefix_ids=prefix,
        suffix_ids=suffix,
        bos_token_id=vocabulary.named["bos"],
        end_token_ids=ending_ids(added) | {i for i in ends if i is not None},
        special_token_ids=special,
        strips_leading_space=family.adds_space,
        chat_templates=_chat_templates(metadata),
        special_tokens=vocabulary.special_token_texts(),
    )


def _affix(
    meta: _Metadata, vocabulary: _Vocabulary, name: str, *, default: bool
) -> tuple[TokenId, ...]:
    """Return the one id, or none, that encloses texts on this side."""
    token_id = vocabulary.named[name]
    if token_id is None:
        if meta.flag(f"add_{name}_token", False):
            raise LoadError(
                f"The file's {_PREFIX}add_{name}_token is true, but it has no "
                f"{_PREFIX}{name}_token_id."
            )
        return ()
    return (token_id,) if meta.flag(f"add_{name}_token", default) else ()


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Return the file's chat templates: the default one and any named ones."""
    templates = {
        key.removeprefix(_TEMPLATE + "."): value
        for key, value in metadata.items()
        if key.startswith(_TEMPLATE + ".") and isinstance(value, str)
    }
    default = metadata.get(_TEMPLATE)
    return {"default": default, **templates} if isinstance(default, str) else templates


def _digest(parts: Sequence[str]) -> str:
    """Hash texts so that neither their borders nor their order can be confused."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
