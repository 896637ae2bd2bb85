"""One token from the distribution that a row of logits makes.

Every function takes one row, so nothing can depend on what else is in the batch. Ties are always
settled by the lower token id.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.ids import TokenId
from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.weights import token_masses, token_weights

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Indices = NDArray[np.intp]

_MANY_CANDIDATES: Final = 1024
"""Candidates of top-p above which sorting them all costs more than a histogram."""
_CDF_BLOCK: Final = 256
"""Masses summed as one in the first of the two levels of the inverse CDF."""


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
    # Weights are relative to the likeliest token: they never overflow, at any temperature.
    weights = token_weights(logits, top, params.temperature)
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(params.min_p))
        ids, weights = kept if ids is None else ids[kept], weights[kept]
    masses = token_masses(weights)
    if params.top_p < 1.0:
        kept = nucleus_indices(weights, masses, params.top_p)
        ids, masses = kept if ids is None else ids[kept], masses[kept]
    index = invert_cdf(masses, uniform)
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


def nucleus_indices(weights: Float32, masses: Int64, top_p: float) -> Indices:
    """Return, ascending, the fewest of the largest weights whose share of mass reaches ``top_p``.

    Nucleus sampling (arXiv 1904.09751) without sorting the vocabulary: masses below
    ``(1 - p) * total / V`` are together less than ``1 - p``, so the nucleus is among the others;
    if these are many, only those near the cut are sorted.
    """
    total = int(masses.sum())
    wanted = min(total, math.ceil(top_p * total))
    # A little less than the bound, and none near 1, so that rounding of it never matters.
    least = 0.99 * (1.0 - top_p) * total / len(masses) if 1.0 - top_p > 1e-9 else 0.0
    candidates = np.flatnonzero(masses >= least)
    certain = candidates[:0]
    if len(candidates) > _MANY_CANDIDATES:
        certain, candidates, wanted = _split_at_cut(weights, masses, candidates, wanted)
    order = candidates[np.argsort(-weights[candidates], kind="stable")]
    shares = np.cumsum(masses[order])
    kept = order[: int(np.searchsorted(shares, wanted)) + 1]
    return np.sort(np.concatenate([certain, kept]))


def _split_at_cut(
    weights: Float32, masses: Int64, candidates: Indices, wanted: int
) -> tuple[Indices, Indices, int]:
    """Return candidates that are in the nucleus, those near its cut, and what these must add.

    A histogram over the upper half of the bits, which order positive floats as their values do.
    """
    buckets = weights[candidates].view(np.uint32) >> 16
    found = masses[candidates]
    # In two halves, because bincount adds in float64: each stays exact.
    upper = np.bincount(buckets, found >> 22).astype(np.int64) << 22
    sums = upper + np.bincount(buckets, found & (2**22 - 1)).astype(np.int64)
    above = np.cumsum(sums[::-1])[::-1]
    cut = int(np.count_nonzero(above >= wanted)) - 1
    missing = wanted - (int(above[cut + 1]) if cut + 1 < len(above) else 0)
    return candidates[buckets > cut], candidates[buckets == cut], missing


def invert_cdf(masses: Int64, uniform: float) -> int:
    """Return the first index whose cumulated share of ``masses`` exceeds ``uniform``.

    Long rows are first searched by blocks, which spares cumulating them whole.
    """
    total = int(masses.sum())
    target = min(int(uniform * total), total - 1)
    first, stop = 0, len(masses)
    if stop > 2 * _CDF_BLOCK:
        ends = np.cumsum(np.add.reduceat(masses, np.arange(0, stop, _CDF_BLOCK)))
        block = int(np.searchsorted(ends, target, side="right"))
        first, stop = block * _CDF_BLOCK, min(stop, (block + 1) * _CDF_BLOCK)
        target -= int(ends[block - 1]) if block else 0
    return first + int(np.searchsorted(np.cumsum(masses[first:stop]), target, side="right"))
