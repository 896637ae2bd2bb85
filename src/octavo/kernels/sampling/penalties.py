"""Which tokens a sequence has seen, and the penalties on seeing them again."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams

Float32 = NDArray[np.float32]


class TokenCounts:
    """How often each token is in a sequence's output; prompt tokens are listed with count 0.

    Sparse: cost grows with the distinct tokens seen, not with the vocabulary. Ids outside the
    vocabulary are ignored, because no logit belongs to them.
    """

    def __init__(self, vocab_size: int, prompt_token_ids: Iterable[TokenId]) -> None:
        self._vocab_size = vocab_size
        self._index: dict[TokenId, int] = {}
        self._ids = np.empty(64, dtype=np.intp)
        self._counts = np.zeros(64, dtype=np.float32)
        for token_id in prompt_token_ids:
            self._slot(token_id)

    @property
    def token_ids(self) -> NDArray[np.intp]:
        """``[U]``: the distinct tokens seen."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> Float32:
        """``[U]``: how often each of ``token_ids`` is in the output."""
        return self._counts[: len(self._index)]

    def add_output(self, token_ids: Iterable[TokenId]) -> None:
        """Count tokens that were generated."""
        for token_id in token_ids:
            if (slot := self._slot(token_id)) is not None:
                self._counts[slot] += 1

    def _slot(self, token_id: TokenId) -> int | None:
        """Return where a token is counted, making room for a new one."""
        slot = self._index.get(token_id)
        if slot is not None or not 0 <= token_id < self._vocab_size:
            return slot
        slot = len(self._index)
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._index[token_id] = slot
        self._ids[slot] = token_id
        return slot


def has_penalties(params: SamplingParams) -> bool:
    """Return whether what was seen before changes the logits."""
    return (
        params.repetition_penalty != 1.0
        or params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
    )


def make_counts(
    params: SamplingParams, vocab_size: int, prompt_token_ids: Iterable[TokenId]
) -> TokenCounts | None:
    """Return the counts that the penalties of ``params`` need, None without penalties.

    The repetition penalty includes the prompt; presence and frequency count the output alone.
    """
    if not has_penalties(params):
        return None
    return TokenCounts(vocab_size, prompt_token_ids if params.repetition_penalty != 1.0 else ())


def apply_penalties(logits: Float32, params: SamplingParams, counts: TokenCounts) -> None:
    """Change ``logits [V]`` in place: repetition (CTRL, arXiv 1909.05858), frequency, presence."""
    ids, output_counts = counts.token_ids, counts.output_counts
    seen = logits[ids]
    repetition = np.float32(params.repetition_penalty)
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    seen -= np.float32(params.frequency_penalty) * output_counts
    seen -= np.float32(params.presence_penalty) * (output_counts > 0)
    logits[ids] = seen
