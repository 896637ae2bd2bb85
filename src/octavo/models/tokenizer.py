"""Text to token ids and back."""

import copy
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Final

from tokenizers import Tokenizer as HFTokenizer

from octavo.core.errors import InvalidRequestError
from octavo.core.ids import TokenId
from octavo.models.chat_template import ChatTemplate
from octavo.models.tokenizer_folder import parts_from_folder
from octavo.models.tokenizer_gguf import parts_from_gguf
from octavo.models.tokenizer_parts import TokenizerParts
from octavo.models.tokenizer_source import GGUFTokenizerSource, TokenizerSource

LONG_TEXT: Final = 4096
"""Longer texts are encoded so that other threads go on meanwhile."""


class Tokenizer:
    """A model's vocabulary. Immutable, safe to use from several threads.

    Decoding joins the bytes of the tokens and reads them as UTF-8; each ill-formed sequence of
    bytes becomes one U+FFFD (Unicode's recommended practice). Nothing else is cleaned up, so the
    text of a sequence of ids is a function of their bytes alone, and can be streamed.
    """

    def __init__(self, parts: TokenizerParts, chat_template: ChatTemplate | None) -> None:
        self._parts = parts
        self.vocab_size = len(parts.token_bytes)
        self.bos_token_id = parts.bos_token_id
        self.add_bos = parts.bos_token_id is not None and parts.bos_token_id in parts.prefix_ids
        self.end_token_ids = parts.end_token_ids
        self.special_token_ids = parts.special_token_ids
        self.strips_leading_space = parts.strips_leading_space
        self.fingerprint = parts.fingerprint
        self.chat_template = chat_template

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[TokenId]:
        """Return the ids of ``text``.

        Args:
            text: any Unicode text.
            add_special_tokens: whether to enclose the text as the model expects, with a BOS for
                example; one that the text itself starts with is not doubled.
            parse_special: whether control tokens written in the text (``<|im_end|>``) become
                their ids. A rendered chat needs that, and therefore so do control tokens that a
                user typed into a message, as in vLLM and transformers.

        Raises:
            InvalidRequestError: the text has unpaired surrogates, which no UTF-8 can spell.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"The text is not valid Unicode: it has an unpaired surrogate at position "
                f"{error.start}."
            ) from error
        backend = self._parts.backend if parse_special else self._plain_backend
        if len(text) > LONG_TEXT:  # the only way to encode without the interpreter's lock
            [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
        else:
            encoding = backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        if not add_special_tokens:
            return list(ids)
        prefix, suffix = list(self._parts.prefix_ids), list(self._parts.suffix_ids)
        has_prefix = ids[: len(prefix)] == prefix
        has_suffix = ids[len(ids) - len(suffix) :] == suffix
        return [*([] if has_prefix else prefix), *ids, *([] if has_suffix else suffix)]

    def decode(
        self,
        token_ids: Sequence[TokenId],
        *,
        skip_special_tokens: bool = False,
        continuation: bool = False,
    ) -> str:
        """Return the text of ``token_ids``.

        Args:
            token_ids: ids below ``vocab_size``.
            skip_special_tokens: whether control tokens leave no text.
            continuation: whether the tokens continue a text rather than start one. Where the
                encoder puts a space before a text (SentencePiece), the decoder takes it from a
                text's start; after a prompt it separates words and stays.

        Raises:
            InvalidRequestError: an id is outside of the vocabulary.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        data = b"".join([self.token_bytes(i) for i in token_ids if i not in skipped])
        if self.strips_leading_space and not continuation:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: TokenId) -> bytes:
        """Return the bytes that a token adds to a text; InvalidRequestError if out of range."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequestError(
                f"Token id {token_id} is outside of the vocabulary (0 to {self.vocab_size - 1})."
            )
        return self._parts.token_bytes[token_id]

    def token_text(self, token_id: TokenId) -> str:
        """Return a token's text alone, for people to read; half a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Render a conversation with the model's chat template (see ``ChatTemplate.render``).

        The text has its own BOS where the template writes one, so it is encoded with
        ``add_special_tokens=False``, as vLLM and transformers do.

        Raises:
            InvalidRequestError: the model has no template, or the messages do not suit it.
        """
        if self.chat_template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions, or start the server with "
                "a chat template."
            )
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    @cached_property
    def _plain_backend(self) -> HFTokenizer:
        """The same tokenizer, blind to control tokens in text."""
        backend: HFTokenizer = copy.deepcopy(self._parts.backend)
        backend.encode_special_tokens = True
        return backend


def load_tokenizer(
    source: TokenizerSource,
    *,
    model_vocab_size: int | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> Tokenizer:
    """Load a model's tokenizer and chat template.

    Args:
        source: where they are.
        model_vocab_size: number of logits, if known. Models round it up, so it may exceed the
            tokens there are; ids in between can be sampled in theory, and add no text.
        now: tells chat templates the date.

    Raises:
        LoadError: the source is incomplete, inconsistent or of a kind that Octavo does not know.
    """
    if isinstance(source, GGUFTokenizerSource):
        parts = parts_from_gguf(source.metadata)
    else:
        parts = parts_from_folder(source.folder)
    if model_vocab_size is not None:
        parts = parts.padded(model_vocab_size)
    template = (
        ChatTemplate(parts.chat_templates, parts.special_tokens, now)
        if parts.chat_templates
        else None
    )
    return Tokenizer(parts, template)
