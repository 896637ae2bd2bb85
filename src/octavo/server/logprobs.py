"""Logprobs in OpenAI's two formats and in vLLM's format for prompts."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from octavo.core.ids import TokenId
from octavo.core.request import TokenLogprobs
from octavo.server.ports import Tokenizer

VERY_UNLIKELY: Final = -9999.0
"""What the specification writes for a token of (nearly) no probability; JSON has no -Infinity."""


def finite(logprob: float) -> float:
    """Return a logprob that JSON can hold."""
    return logprob if math.isfinite(logprob) else VERY_UNLIKELY


def token_label(tokenizer: Tokenizer, token_id: TokenId) -> str:
    r"""Return a token's text; where that is half a character, its bytes (``bytes:\xe2\x82``)."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, items: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat choice, or of a chunk of one."""
    return {"content": entries(tokenizer, items), "refusal": None}


def entries(tokenizer: Tokenizer, items: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return one entry a token, as chat and responses have them."""
    return [
        {
            **_chat_entry(tokenizer, item.token_id, item.logprob),
            "top_logprobs": [
                _chat_entry(tokenizer, token_id, logprob) for token_id, logprob in item.top
            ],
        }
        for item in items
    ]


def _chat_entry(tokenizer: Tokenizer, token_id: TokenId, logprob: float) -> dict[str, Any]:
    return {
        "token": token_label(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, items: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: token id to logprob, rank and text; null comes first."""
    return [None if item is None else _ranked(tokenizer, item, num_top) for item in items]


def _ranked(tokenizer: Tokenizer, item: TokenLogprobs, num_top: int) -> dict[str, Any]:
    likeliest = enumerate(item.top[:num_top], start=1)
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in likeliest}
    ranked[item.token_id] = (item.logprob, item.rank)
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": rank,
            "decoded_token": token_label(tokenizer, token_id),
        }
        for token_id, (logprob, rank) in ranked.items()
    }


class CompletionLogprobs:
    """The ``logprobs`` of one completion, in pieces as its tokens come.

    ``text_offset`` counts characters from the start of the choice's text; a token within a
    character points after that character's start.
    """

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._silent = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._num_chars = 0

    def skip(self, num_chars: int) -> None:
        """Move on by text that has no logprobs."""
        self._num_chars += num_chars

    def piece(
        self, token_ids: Sequence[TokenId], items: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Return the entries of ``token_ids``, each scored by an item (None: the first token)."""
        return {
            "text_offset": [self._advance(token_id) for token_id in token_ids],
            "token_logprobs": [None if item is None else finite(item.logprob) for item in items],
            "tokens": [token_label(self._tokenizer, token_id) for token_id in token_ids],
            "top_logprobs": [None if item is None else self._top(item) for item in items],
        }

    def _advance(self, token_id: TokenId) -> int:
        """Return where a token starts, and count the characters that start in it."""
        start = self._num_chars
        if token_id not in self._silent:
            data = self._tokenizer.token_bytes(token_id)
            self._num_chars += sum(byte & 0xC0 != 0x80 for byte in data)
        return start

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        entries = dict(item.top[: self._num_top])
        entries.setdefault(item.token_id, item.logprob)
        return {token_label(self._tokenizer, key): finite(value) for key, value in entries.items()}
