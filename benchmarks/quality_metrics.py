"""How far one next-token distribution is from another, token by token and in the mean."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

BLOCK: Final = 64
"""Rows that are turned into float64 at once: 25 MB of 49,152 tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """What was measured at each token that has a next one, ``[N]`` each."""

    divergence: Float64
    """KL(reference || engine) in nats, over the whole vocabulary."""
    loss: Float64
    """Minus the log probability of the text's next token, in nats."""
    reference_loss: Float64
    """The reference's."""
    agrees: NDArray[np.bool_]
    """Whether both find the same token the likeliest."""

    @classmethod
    def joined(cls, parts: Sequence["TokenScores"]) -> "TokenScores":
        """Put the tokens of several documents one after the other."""
        return cls(
            np.concatenate([part.divergence for part in parts]),
            np.concatenate([part.loss for part in parts]),
            np.concatenate([part.reference_loss for part in parts]),
            np.concatenate([part.agrees for part in parts]),
        )

    def last(self, count: int) -> "TokenScores":
        """Return the scores of the last ``count`` tokens."""
        cut = slice(-count, None)
        return TokenScores(
            self.divergence[cut], self.loss[cut], self.reference_loss[cut], self.agrees[cut]
        )


@dataclass(frozen=True, slots=True)
class Quality:
    """An engine's distributions against the reference's, over many tokens."""

    num_tokens: int
    mean_kl: float
    """Nats."""
    kl_99: float
    """99th percentile, nats."""
    perplexity: float
    perplexity_ratio: float
    """To the reference's perplexity."""
    ratio_error: float
    """One standard error of the ratio, tokens taken as independent."""
    top1_agreement: float
    """Share of tokens."""

    @classmethod
    def of(cls, scores: TokenScores) -> "Quality":
        """Summarise; the ratio is of paired tokens, so most of the text's chance is not in it."""
        count = len(scores.loss)
        extra = scores.loss - scores.reference_loss
        ratio = math.exp(float(extra.mean()))
        spread = float(extra.std(ddof=1)) if count > 1 else math.nan
        return cls(
            num_tokens=count,
            mean_kl=float(scores.divergence.mean()),
            kl_99=float(np.quantile(scores.divergence, 0.99)),
            perplexity=math.exp(float(scores.loss.mean())),
            perplexity_ratio=ratio,
            ratio_error=ratio * spread / math.sqrt(count),
            top1_agreement=float(scores.agrees.mean()),
        )


def compare_logits(reference: Float32, logits: Float32, next_tokens: NDArray[Any]) -> TokenScores:
    """Score ``logits [N, vocab]`` against the reference's at N tokens.

    Raises:
        ValueError: the shapes differ.
    """
    if reference.shape != logits.shape or len(next_tokens) != len(logits):
        raise ValueError(
            f"Logits of {logits.shape} do not go with a reference of {reference.shape} and "
            f"{len(next_tokens)} next tokens."
        )
    starts = range(0, len(logits), BLOCK)
    blocks = [slice(start, start + BLOCK) for start in starts]
    return TokenScores.joined([_block(reference[b], logits[b], next_tokens[b]) for b in blocks])


def _block(reference: Float32, logits: Float32, next_tokens: NDArray[Any]) -> TokenScores:
    expected, found = log_softmax(reference), log_softmax(logits)
    rows = np.arange(len(next_tokens))
    return TokenScores(
        divergence(expected, found),
        -found[rows, next_tokens],
        -expected[rows, next_tokens],
        reference.argmax(axis=1) == logits.argmax(axis=1),
    )


def log_softmax(logits: Float32) -> Float64:
    """Return log probabilities ``[N, vocab]``."""
    values = logits.astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    values -= np.log(np.exp(values).sum(axis=1, keepdims=True))
    return values


def divergence(expected: Float64, found: Float64) -> Float64:
    """Return KL(expected || found) of log probabilities, row by row, in nats.

    What the first gives no probability adds nothing; what only the second gives none, infinity.
    """
    weights = np.exp(expected)
    with np.errstate(invalid="ignore"):
        terms = np.where(weights > 0, weights * (expected - found), 0.0)
    return np.maximum(terms.sum(axis=1), 0.0)  # below 0 by rounding alone
