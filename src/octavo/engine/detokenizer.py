"""Turns a growing sequence of token ids into a growing text."""

import codecs
from collections.abc import Sequence

from octavo.core.ids import TokenId
from octavo.models.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Gives out text as soon as it is certain; looks at each token once.

    Tokens are bytes, and those of an unfinished character are held back: three at most, so bytes
    that will never make a character are not held for long either. All that was given out equals
    ``tokenizer.decode`` of all ids, however they were cut into pushes.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool, continuation: bool = True
    ) -> None:
        """Start a text.

        Args:
            tokenizer: whose ids they are.
            skip_special_tokens: whether control tokens leave no text.
            continuation: as in ``Tokenizer.decode``. The default is for generated tokens, which
                continue a prompt: a space at their start separates them from it and stays.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._strips_space = tokenizer.strips_leading_space and not continuation
        self._held = b""
        """The start of a character that is not complete."""

    def push(self, token_ids: Sequence[TokenId]) -> str:
        """Add tokens; return the text that is certain now and was not before.

        Raises:
            InvalidRequestError: an id is outside of the vocabulary. Nothing was added then.
        """
        token_bytes = self._tokenizer.token_bytes
        data = b"".join([token_bytes(i) for i in token_ids if i not in self._skipped])
        if self._strips_space and data:
            self._strips_space = False
            data = data.removeprefix(b" ")
        return self._decode(data, final=False)

    def finish(self) -> str:
        """End the text; return the rest: U+FFFD if it ends in the middle of a character."""
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        data = self._held + data
        text, num_bytes = codecs.utf_8_decode(data, "replace", final)
        self._held = data[num_bytes:]
        return text
