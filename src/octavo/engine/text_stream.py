"""The text of one completion: tokens in, text out, cut at stop strings."""

from collections.abc import Sequence
from typing import NamedTuple

from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams
from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.stop_strings import StopStringMatcher
from octavo.models.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What some tokens added to the text."""

    text: str
    num_tokens: int
    """How many of the tokens count: up to the one that completed a stop string."""
    stop: str | None
    """The stop string that ended the text, if one did."""


class TextStream:
    """Detokenizes one completion and looks for its stop strings.

    Text before the first ``min_tokens`` tokens is never searched, as in vLLM.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens
        )
        self._has_stops = bool(sampling.stop)
        self._matcher = StopStringMatcher(
            sampling.stop, include=sampling.include_stop_str_in_output
        )
        self._min_tokens = sampling.min_tokens
        self._keep_stop_token = sampling.include_stop_str_in_output
        self._num_tokens = 0

    def push(
        self, token_ids: Sequence[TokenId], *, last: bool, stop_token: bool = False
    ) -> TextDelta:
        """Take in tokens; ``last`` says that none will follow.

        ``stop_token`` says that the last of them ended the output; it leaves no text.
        """
        if not self._has_stops:  # then nothing depends on which token brought which text
            skips_last = stop_token and not self._keep_stop_token
            text = self._detokenizer.push(token_ids[:-1] if skips_last else token_ids)
            text += self._detokenizer.finish() if last else ""
            return TextDelta(text, len(token_ids), None)
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            self._num_tokens += 1
            if stop_token and count == len(token_ids) and not self._keep_stop_token:
                break
            text, stop = self._search(self._detokenizer.push((token_id,)))
            texts.append(text)
            if stop is not None:
                return TextDelta("".join(texts), count, stop)
        if not last:
            return TextDelta("".join(texts), len(token_ids), None)
        text, stop = self._search(self._detokenizer.finish())
        texts.append(text)
        if stop is None:
            texts.append(self._matcher.finish())
        return TextDelta("".join(texts), len(token_ids), stop)

    def _search(self, text: str) -> tuple[str, str | None]:
        if self._num_tokens < self._min_tokens:
            return text, None
        return self._matcher.push(text)
