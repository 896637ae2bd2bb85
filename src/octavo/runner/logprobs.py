"""Log probabilities of tokens, as the model gave them.

They describe the raw distribution, before penalties, bias, temperature and truncation (vLLM's
default, ``raw_logprobs``), so what is reported does not depend on how a token was chosen.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import GenerationError
from octavo.core.ids import TokenId
from octavo.core.request import TokenLogprobs
from octavo.runner.distribution import top_k_indices

LOWEST_LOGPROB: Final = -9999.0
"""Stands for every logprob below it, minus infinity included: JSON has no infinity (OpenAI)."""


def check_finite(best: float) -> None:
    """Refuse a row of logits by its largest value, which is NaN if any value is.

    Raises:
        GenerationError: the row has a NaN or plus infinity, or nothing but minus infinity.
    """
    if math.isnan(best):
        raise GenerationError("The model's logits for this request contain NaN.")
    if best == math.inf:
        raise GenerationError("The model's logits for this request contain infinity.")
    if best == -math.inf:
        raise GenerationError(
            "No token is left to choose: every token of the vocabulary is banned."
        )


def score_token(logits: NDArray[np.float32], token_id: TokenId, num_top: int) -> TokenLogprobs:
    """Return how likely ``token_id`` is under ``logits [V]``, and the ``num_top`` likeliest tokens.

    A token's rank counts the likelier ones and, among equals, those of lower id.

    Raises:
        GenerationError: the logits contain NaN or plus infinity, or are all minus infinity.
    """
    best = float(logits.max())
    check_finite(best)
    with np.errstate(over="ignore"):
        weights = np.exp(logits - np.float32(best))
    log_total = best + math.log(float(weights.sum(dtype=np.float64)))
    value = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > value))
    rank += int(np.count_nonzero(logits[:token_id] == value))
    return TokenLogprobs(
        token_id=token_id,
        logprob=_logprob(float(value), log_total),
        rank=rank,
        top=_top(logits, num_top, log_total),
    )


def score_tokens(
    logits: NDArray[np.float32], token_ids: Sequence[TokenId], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Score token i under row i of ``logits [len(token_ids), V]``; see ``score_token``."""
    return tuple(
        score_token(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True)
    )


def _top(
    logits: NDArray[np.float32], num_top: int, log_total: float
) -> tuple[tuple[TokenId, float], ...]:
    if num_top == 0:
        return ()
    ids = top_k_indices(logits, min(num_top, len(logits)))
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return tuple((int(i), _logprob(float(logits[i]), log_total)) for i in ids)


def _logprob(logit: float, log_total: float) -> float:
    return max(LOWEST_LOGPROB, min(0.0, logit - log_total))
