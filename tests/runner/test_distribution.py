"""Top-k, top-p, min-p and the draw, against a naive float64 reference."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.distribution import (
    invert_cdf,
    nucleus_indices,
    top_k_indices,
)
from octavo.kernels.sampling.random_stream import uniform
from octavo.kernels.sampling.weights import log_total, token_masses, token_weights
from support_sampling import MakeSampler, sampling_state

ALMOST_ONE = 1.0 - 2.0**-53
GRID = st.integers(-1280, 1280).map(lambda x: x / 64)
"""Logits that are equal or far enough apart for weights in float32 to tell them apart."""


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
        st.one_of(GRID, st.integers(-3, 3), st.just(-np.inf)),
        min_size=1,
        max_size=30,
    ),
    temperature=st.sampled_from([1e-4, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 29, 30, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    k=st.integers(0, 10**6),
)
def test_draws_like_the_naive_reference(
    make_sampler: MakeSampler,
    logits: list[float],
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    k: int,
) -> None:
    """Turns red when an order, a bound or a tie of top-k, min-p or top-p is off by one."""
    x = np.array(logits, dtype=np.float32)
    assume(np.isfinite(x).any())
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = reference_probabilities(x, params)
    sampler = make_sampler(len(x))
    token_id = sampler.sample(x[None], [sampling_state(sampler, params, seed=7)], [k]).token_ids[0]
    draw = uniform(7, k)
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
    logits = (spread * rng.standard_normal(30_000)).astype(np.float32)
    weights = token_weights(logits, logits.max())
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    count = int(np.searchsorted(shares, top_p)) + 1
    kept = nucleus_indices(weights, token_masses(weights), top_p)
    assert abs(len(kept) - count) <= 1  # one more or less where float rounding decides
    assert kept.tolist() == sorted(order[: len(kept)].tolist())


@pytest.mark.parametrize("size", [1, 7, 512, 513, 1024, 5000])
@pytest.mark.parametrize("draw", [0.0, 1e-12, 0.25, 0.5, 0.999, ALMOST_ONE])
def test_inverse_cdf_equals_a_full_cumulated_sum(size: int, draw: float) -> None:
    """Turns red when the search by blocks lands in a neighbouring block or past the end."""
    weights = np.random.default_rng(size).random(size).astype(np.float32)
    weights[: size // 3] = 0.0
    weights[size - size // 4 :] = 0.0
    masses = token_masses(weights)
    cumulated = np.cumsum(masses).tolist()
    index = invert_cdf(masses, draw)
    assert masses[index] > 0
    assert (cumulated[index - 1] if index else 0) <= draw * cumulated[-1] < cumulated[index]


def draw_many(
    make_sampler: MakeSampler, logits: NDArray[np.float32], params: SamplingParams, count: int
) -> NDArray[np.intp]:
    """Return draws 0 to ``count - 1`` of one seed."""
    sampler = make_sampler(len(logits))
    state = sampling_state(sampler, params, seed=99)
    draws = range(count)
    result = sampler.sample(logits[None], [state] * count, draws, rows=[0] * count)
    assert not result.failures
    return np.array(result.token_ids)


def test_sampled_frequencies_follow_the_distribution(make_sampler: MakeSampler) -> None:
    """Turns red when the stream or the inverse CDF is biased: chi-square over 20,000 draws."""
    logits = np.log(np.array([0.3, 0.05, 0.2, 0.01, 0.14, 0.1, 0.15, 0.05], dtype=np.float32))
    counts = np.bincount(draw_many(make_sampler, logits, SamplingParams(), 20_000), minlength=8)
    expected = 20_000 * np.exp(logits)
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # 0.1 % at 7 degrees of freedom


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_p=0.999999)])
def test_long_rows_follow_the_distribution_too(
    make_sampler: MakeSampler, params: SamplingParams
) -> None:
    """Turns red when drawing by blocks favours blocks: 5,000 tokens, four groups of weights."""
    weights = np.repeat([4.0, 1.0, 0.0, 3.0], 1250)
    with np.errstate(divide="ignore"):
        logits = np.log(weights).astype(np.float32)
    counts = np.bincount(draw_many(make_sampler, logits, params, 8_000) // 1250, minlength=4)
    assert counts[2] == 0
    expected = np.array([4000.0, 1000.0, 3000.0])
    assert ((counts[[0, 1, 3]] - expected) ** 2 / expected).sum() < 13.8


def test_weights_are_those_of_the_exponential_function() -> None:
    """Turns red when the polynomial or the scaling by powers of two is off."""
    logits = np.linspace(-30.0, 0.0, 100_001, dtype=np.float32)
    for temperature in (0.5, 1.0, 2.0):
        weights = token_weights(logits, np.float32(0.0), temperature)
        exact = np.exp(logits.astype(np.float64) / temperature)
        assert np.abs(weights / exact - 1.0).max() < 2e-7 * 30 / temperature
        total = log_total(0.0, int(token_masses(weights).sum()))
        assert total == pytest.approx(np.log(exact.sum()), abs=1e-7)
    assert token_weights(np.array([-np.inf, -3e38], np.float32), np.float32(3e38)).max() < 1e-30


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 1e4, 3e38])
def test_tiny_temperatures_neither_overflow_nor_go_astray(
    make_sampler: MakeSampler, temperature: float, scale: float
) -> None:
    """SA-07: turns red when dividing by a tiny temperature yields infinity, NaN or token 0."""
    logits = (np.array([0.1, -1.0, 1.0, 0.5, -np.inf]) * scale).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1)
    assert set(draw_many(make_sampler, logits, params, 100).tolist()) == {2}
