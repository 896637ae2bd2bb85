"""The prefixes that an operator wants to keep in the KV cache, read from a file at start-up."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.core.errors import RequestError, SettingError
from octavo.core.ids import TokenId
from octavo.core.request import CacheIdentity
from octavo.models.tokenizer import Tokenizer

_FORMS = ("text", "messages", "token_ids")


def read_pins(
    path: Path, tokenizer: Tokenizer, identity: CacheIdentity, block_size: int
) -> Iterator[tuple[CacheIdentity, list[TokenId]]]:
    """Yield the prefixes of a file: one JSON object a line, empty lines aside.

    Each has one of ``text`` (as ``/v1/completions`` reads a prompt), ``messages`` (the beginning
    of a conversation, as ``/v1/chat/completions`` does) and ``token_ids``, and may have a
    ``cache_salt``: pinned for requests with that salt.

    Raises:
        SettingError: the file cannot be read, a line says something else, or its prefix is shorter
            than a block of ``block_size`` tokens: only whole blocks can be pinned.
    """
    try:
        # Not splitlines: JSON strings may hold U+2028 and other characters that it splits at.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            f"--pin-file {path} cannot be read: {error}.", name="--pin-file"
        ) from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                entry = _entry(line)
                tokens = _tokens(entry, tokenizer)
                if len(tokens) < block_size:
                    raise ValueError(
                        f"it has {len(tokens)} tokens, and only whole blocks of {block_size} can "
                        "be pinned."
                    )
                yield replace(identity, salt=entry.get("cache_salt", "")), tokens
            except (ValueError, RecursionError, RequestError) as error:
                raise SettingError(
                    f"--pin-file {path}, line {number}: {error}", name="--pin-file"
                ) from error


def _entry(line: str) -> dict[str, Any]:
    entry = json.loads(line)
    if not isinstance(entry, dict) or sum(form in entry for form in _FORMS) != 1:
        raise ValueError(f"it must be a JSON object with one of {', '.join(_FORMS)}.")
    if unknown := entry.keys() - {*_FORMS, "cache_salt"}:
        raise ValueError(f"{min(unknown)!r} is not known.")
    salt = entry.get("cache_salt", "")
    if not isinstance(salt, str):
        raise ValueError("cache_salt must be a string.")
    return entry


def _tokens(entry: Mapping[str, Any], tokenizer: Tokenizer) -> list[TokenId]:
    match entry:
        case {"text": str(text)}:
            return tokenizer.encode(text)
        case {"messages": [*messages]} if messages and all(isinstance(m, dict) for m in messages):
            text = tokenizer.render_chat(messages, add_generation_prompt=False)
            return tokenizer.encode(text, add_special_tokens=False)
        case {"token_ids": [*ids]} if all(
            type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids
        ):
            return list(ids)
    raise ValueError(
        "text must be a string, messages a list of objects, token_ids a list of ids from 0 to "
        f"{tokenizer.vocab_size - 1}."
    )
