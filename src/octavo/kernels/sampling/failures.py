"""Why a row has no token: the sentences, the same from every sampler."""

import math

from octavo.core.errors import GenerationError, InvalidRequestError
from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.interface import BAN_BIAS


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


def all_banned(params: SamplingParams) -> InvalidRequestError:
    """Return the error of a request that bans all tokens it may have next; it names what bans."""
    shape = params.structured_output
    bans = {
        "logit_bias": any(bias <= BAN_BIAS for bias in params.logit_bias.values()),
        "bad_words": bool(params.bad_words_token_ids),
        "allowed_token_ids": params.allowed_token_ids is not None,
        "structured_outputs" if shape is None else shape.param: shape is not None,
    }
    names = [name for name, is_set in bans.items() if is_set] or ["min_tokens"]
    return InvalidRequestError(
        f"Every token that this request may have next is banned by its {' and '.join(names)}.",
        param=names[0],
    )
