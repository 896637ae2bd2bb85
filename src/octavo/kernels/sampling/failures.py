"""Why a row has no token: the sentences, the same from every sampler."""

import math

from octavo.core.errors import GenerationError, InvalidRequestError


def not_finite(best: float) -> GenerationError:
    """Return the error of a row of logits whose largest value, NaN if any is, is not finite."""
    if math.isnan(best):
        return GenerationError("The model's logits for this request contain NaN.")
    if best > 0:
        return GenerationError("The model's logits for this request contain infinity.")
    return GenerationError("No token is left to choose: every token of the vocabulary is banned.")


def check_finite(best: float) -> None:
    """Refuse a row of logits by its largest value, which is NaN if any value is.

    Raises:
        GenerationError: the row has a NaN or plus infinity, or nothing but minus infinity.
    """
    if not math.isfinite(best):
        raise not_finite(best)


def outside_vocab(token_id: int, vocab_size: int) -> GenerationError:
    """Return the error of a ``logit_bias`` that names no token."""
    return GenerationError(
        f"logit_bias names token {token_id}, but the vocabulary has {vocab_size}."
    )


def all_banned() -> InvalidRequestError:
    """Return the error of a request that bans all tokens it may have next."""
    return InvalidRequestError(
        "Every token that this request may have next is banned by it.", param="logit_bias"
    )
