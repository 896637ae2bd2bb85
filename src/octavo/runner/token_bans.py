"""Which tokens a request itself forbids: all but some, and those that would complete a word."""

from collections.abc import Sequence

import numpy as np

from octavo.core.ids import TokenId
from octavo.core.plan import NewSequence
from octavo.kernels.sampling.interface import Mask


class TokenBans:
    """The bans of one sequence, which depend on its output."""

    def __init__(self, sequence: NewSequence, vocab_size: int) -> None:
        """Begin with a sequence that has ``allowed_token_ids`` or bad words."""
        params = sequence.sampling
        self._min_tokens = params.min_tokens
        self._ending_ids = [i for i in sequence.ending_token_ids if 0 <= i < vocab_size]
        words = [w for w in params.bad_words_token_ids if max(w) < vocab_size]
        allowed = np.ones(vocab_size, dtype=np.bool_)
        if params.allowed_token_ids is not None:
            allowed[:] = False
            allowed[[i for i in params.allowed_token_ids if i < vocab_size]] = True
        allowed[[word[0] for word in words if len(word) == 1]] = False
        self._allowed = np.packbits(allowed, bitorder="little")
        self._words = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self._num_kept = max((len(begin) for begin, _ in self._words), default=0)
        self._output: tuple[TokenId, ...] = ()
        self.note_output(sequence.output_token_ids)

    def note_output(self, token_ids: Sequence[TokenId]) -> None:
        """Count tokens that became part of the output."""
        if self._num_kept:
            self._output = (*self._output, *token_ids)[-self._num_kept :]

    def mask(self, num_output_tokens: int, grammar: Mask | None) -> Mask:
        """Return which tokens may be output token k, given what a grammar allows, if there is one.

        A grammar's mask settles ``min_tokens``; without one, this mask does.
        """
        banned = [last for begin, last in self._words if self._output[-len(begin) :] == begin]
        if grammar is None and num_output_tokens < self._min_tokens:
            banned += self._ending_ids
        allowed = self._allowed.copy() if grammar is None else self._allowed & grammar
        for token_id in banned:
            allowed[token_id >> 3] &= ~np.uint8(1 << (token_id & 7))
        return allowed
