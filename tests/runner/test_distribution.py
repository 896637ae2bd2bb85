"""Top-k, top-p, min-p and the draw, against a naive float64 reference."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.core.sampling import SamplingParams
from octavo.runner.distribution import draw_token, invert_cdf, nucleus_indices, top_k_indices
from octavo.runner.random_stream import uniform

ALMOST_ONE = 1.0 - 2.0**-53


def reference_probabilities(
    logits: NDArray[np.float32], params: SamplingParams
) -> NDArray[np.float64]:
    """Sort everything, in float64; refuse inputs where rounding decides what is kept."""
    x = logits.astype(np.float64) / params.temperature
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weights = {i: float(np.exp(x[i] - x[order[0]])) for i in order}
    assume(all(abs(w - params.min_p) > 1e-5 for w in weights.values()) or params.min_p == 0)
    order = [i for i in order if weights[i] >= params.min_p]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        kept.append(i)
        mass += weights[i] / total
        assume(abs(mass - params.top_p) > 1e-5 or params.top_p == 1.0)
        if mass >= params.top_p and params.top_p < 1.0:
            break
    probabilities = np.zeros(len(x))
    probabilities[kept] = [weights[i] for i in kept]
    return probabilities / probabilities.sum()


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(
        st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3), st.just(-np.inf)),
        min_size=1,
        max_size=30,
    ),
    temperature=st.sampled_from([1e-4, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 29, 30, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    draw=st.floats(0.0, ALMOST_ONE),
)
def test_draws_like_the_naive_reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, draw: float
) -> None:
    """Turns red when an order, a bound or a tie of top-k, min-p or top-p is off by one."""
    x = np.array(logits, dtype=np.float32)
    assume(np.isfinite(x).any())
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = reference_probabilities(x, params)
    token_id = draw_token(x, params, draw)
    assert probabilities[token_id] > 0
    before = probabilities[:token_id].sum()
    assert before - 1e-5 <= draw <= before + probabilities[token_id] + 1e-5


@given(
    values=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    k=st.integers(1, 40),
)
def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(values: list[int], k: int) -> None:
    """Turns red when a tie at the cut keeps more than k, or keeps them by chance."""
    k = min(k, len(values))
    expected = sorted(sorted(range(len(values)), key=lambda i: (-values[i], i))[:k])
    assert top_k_indices(np.array(values, dtype=np.float32), k).tolist() == expected


@pytest.mark.parametrize("spread", [0.0, 0.1, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
def test_nucleus_of_a_large_vocabulary_needs_no_full_sort(spread: float, top_p: float) -> None:
    """Turns red when the shortcuts past a full sort drop or add tokens, flat rows included."""
    rng = np.random.default_rng(7)
    weights = np.exp(spread * rng.standard_normal(30_000)).astype(np.float32)
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    count = int(np.searchsorted(shares, top_p)) + 1
    kept = nucleus_indices(weights, top_p)
    assert abs(len(kept) - count) <= 1  # one more or less where float rounding decides
    assert kept.tolist() == sorted(order[: len(kept)].tolist())


@pytest.mark.parametrize("size", [1, 7, 512, 513, 1024, 5000])
@pytest.mark.parametrize("draw", [0.0, 1e-12, 0.25, 0.5, 0.999, ALMOST_ONE])
def test_inverse_cdf_equals_a_full_cumulated_sum(size: int, draw: float) -> None:
    """Turns red when the search by blocks lands in a neighbouring block or past the end."""
    weights = np.random.default_rng(size).random(size).astype(np.float32)
    weights[: size // 3] = 0.0
    weights[size - size // 4 :] = 0.0
    cumulated = np.cumsum(weights, dtype=np.float64)
    index = invert_cdf(weights, draw)
    assert weights[index] > 0
    assert cumulated[index] - weights[index] <= draw * cumulated[-1] + 1e-9
    assert draw * cumulated[-1] - 1e-9 <= cumulated[index]


def test_sampled_frequencies_follow_the_distribution() -> None:
    """Turns red when the stream or the inverse CDF is biased: chi-square over 20,000 draws."""
    logits = np.log(np.array([0.3, 0.05, 0.2, 0.01, 0.14, 0.1, 0.15, 0.05], dtype=np.float32))
    params = SamplingParams(temperature=1.0)
    counts = np.bincount(
        [draw_token(logits, params, uniform(99, k)) for k in range(20_000)], minlength=8
    )
    expected = 20_000 * np.exp(logits)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # 0.1 % at 7 degrees of freedom


def test_long_rows_follow_the_distribution_too() -> None:
    """Turns red when drawing by blocks favours blocks: 5,000 tokens, four groups of weights."""
    weights = np.repeat([4.0, 1.0, 0.0, 3.0], 1250)
    with np.errstate(divide="ignore"):
        logits = np.log(weights).astype(np.float32)
    draws = [draw_token(logits, SamplingParams(), uniform(5, k)) for k in range(8_000)]
    counts = np.bincount(np.array(draws) // 1250, minlength=4)
    assert counts[2] == 0
    expected = np.array([4000.0, 1000.0, 3000.0])
    assert ((counts[[0, 1, 3]] - expected) ** 2 / expected).sum() < 13.8


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e4, 3e38])
def test_tiny_temperatures_neither_overflow_nor_go_astray(temperature: float, scale: float) -> None:
    """SA-07: turns red when dividing by a tiny temperature yields infinity, NaN or token 0."""
    logits = (np.array([0.1, -1.0, 1.0, 0.5, -np.inf]) * scale).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert {draw_token(logits, params, uniform(3, k)) for k in range(100)} == {2}
