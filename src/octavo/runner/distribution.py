"""One token from the distribution that a row of logits makes.

Every function takes one row, so nothing can depend on what else is in the batch. Ties are always
settled by the lower token id.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams

Float32 = NDArray[np.float32]
Indices = NDArray[np.intp]

_MANY_CANDIDATES: Final = 1024
"""Candidates of top-p above which sorting them all costs more than a histogram."""
_CDF_BLOCK: Final = 256
"""Weights summed as one in the first of the two levels of the inverse CDF."""


def draw_token(logits: Float32, params: SamplingParams, uniform: float) -> TokenId:
    """Return the token that ``uniform`` in [0, 1) picks from ``logits [V]``, at least one finite.

    Temperature, top-k, min-p and top-p apply in this order, each to what the one before left;
    min-p compares with the likeliest token, so its place before or after top-k does not matter.
    """
    top = logits.max()
    ids: Indices | None = None
    if 0 < params.top_k < len(logits):
        ids = top_k_indices(logits, params.top_k)
        logits = logits[ids]
    # Weights are relative to the likeliest token: exp never overflows, at any temperature.
    with np.errstate(over="ignore"):
        weights = np.subtract(logits, top)
        weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    if params.top_p < 1.0:
        kept = nucleus_indices(weights, params.top_p)
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    index = invert_cdf(weights, uniform)
    return index if ids is None else int(ids[index])


def top_k_indices(values: Float32, k: int) -> Indices:
    """Return, ascending, the indices of the ``k`` largest of ``values``, ``0 < k <= len``."""
    cut = np.partition(values, len(values) - k)[len(values) - k]
    indices = np.flatnonzero(values >= cut)
    if len(indices) == k:
        return indices
    above = np.flatnonzero(values > cut)
    ties = np.flatnonzero(values == cut)[: k - len(above)]
    return np.sort(np.concatenate([above, ties]))


def nucleus_indices(weights: Float32, top_p: float) -> Indices:
    """Return, ascending, the fewest of the largest weights whose share reaches ``top_p``.

    Nucleus sampling (arXiv 1904.09751) without sorting the vocabulary: weights below
    ``(1 - p) * total / V`` are together less than ``1 - p``, so the nucleus is among the others;
    if these are many, only those near the cut are sorted.
    """
    total = float(weights.sum(dtype=np.float64))
    wanted = top_p * total
    candidates = np.flatnonzero(weights >= (1.0 - top_p) * total / len(weights))
    certain = candidates[:0]
    if len(candidates) > _MANY_CANDIDATES:
        certain, candidates, wanted = _split_at_cut(weights, candidates, wanted)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    shares = np.cumsum(weights[order], dtype=np.float64)
    kept = order[: int(np.searchsorted(shares, wanted)) + 1]
    return np.sort(np.concatenate([certain, kept]))


def _split_at_cut(
    weights: Float32, candidates: Indices, wanted: float
) -> tuple[Indices, Indices, float]:
    """Return candidates that are in the nucleus, those near its cut, and what these must add.

    A histogram over the upper half of the bits, which order positive floats as their values do.
    """
    values = weights[candidates]
    buckets = values.view(np.uint32) >> 16
    masses = np.bincount(buckets, weights=values)
    above = np.cumsum(masses[::-1])[::-1]
    cut = max(int(np.count_nonzero(above >= wanted)) - 1, 0)
    missing = wanted - (float(above[cut + 1]) if cut + 1 < len(above) else 0.0)
    return candidates[buckets > cut], candidates[buckets == cut], missing


def invert_cdf(weights: Float32, uniform: float) -> int:
    """Return the first index whose cumulated share of ``weights`` exceeds ``uniform``.

    Sums are float64. Long rows are first searched by blocks, which spares cumulating them whole.
    """
    first, stop = 0, len(weights)
    if stop > 2 * _CDF_BLOCK:
        sums = np.add.reduceat(weights, np.arange(0, stop, _CDF_BLOCK), dtype=np.float64)
        block, rest = _search(sums, uniform * float(sums.sum()))
        first, stop = block * _CDF_BLOCK, min(stop, (block + 1) * _CDF_BLOCK)
    else:
        rest = uniform * float(weights.sum(dtype=np.float64))
    return first + _search(weights[first:stop], rest)[0]


def _search(weights: NDArray[np.floating], target: float) -> tuple[int, float]:
    """Return the first index whose cumulated weight exceeds ``target``, and what is left of it."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulated, target, side="right"))
    if index == len(cumulated):  # rounding carried the target past the end
        index = int(np.flatnonzero(weights)[-1])
    return index, target - float(cumulated[index - 1]) if index else target
