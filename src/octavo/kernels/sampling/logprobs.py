"""Log probabilities of tokens, as the model gave them.

They describe the raw distribution, before penalties, bias, temperature and truncation (vLLM's
default, ``raw_logprobs``), so what is reported does not depend on how a token was chosen.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.ids import TokenId
from octavo.core.request import TokenLogprobs
from octavo.kernels.sampling.distribution import top_k_indices
from octavo.kernels.sampling.failures import check_finite
from octavo.kernels.sampling.weights import log_total, token_masses, token_weights

LOWEST_LOGPROB: Final = -9999.0
"""Stands for every logprob below it, minus infinity included: JSON has no infinity (OpenAI)."""


def score_token(logits: NDArray[np.float32], token_id: TokenId, num_top: int) -> TokenLogprobs:
    """Return how likely ``token_id`` is under ``logits [V]``, and the ``num_top`` likeliest tokens.

    A token's rank counts the likelier ones and, among equals, those of lower id.

    Raises:
        GenerationError: the logits contain NaN or plus infinity, or are all minus infinity.
    """
    best = float(logits.max())
    check_finite(best)
    masses = token_masses(token_weights(logits, np.float32(best)))
    total = log_total(best, int(masses.sum()))
    value = logits[token_id]
    rank = 1 + int(np.count_nonzero(logits > value))
    rank += int(np.count_nonzero(logits[:token_id] == value))
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob_of(float(value), total),
        rank=rank,
        top=_top(logits, num_top, total),
    )


def _top(
    logits: NDArray[np.float32], num_top: int, total: float
) -> tuple[tuple[TokenId, float], ...]:
    if num_top == 0:
        return ()
    ids = top_k_indices(logits, min(num_top, len(logits)))
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    return tuple((int(i), logprob_of(float(logits[i]), total)) for i in ids)


def logprob_of(logit: float, total: float) -> float:
    """Return the logprob of a logit in a row whose ``log_total`` is ``total``."""
    return max(LOWEST_LOGPROB, min(0.0, logit - total))
