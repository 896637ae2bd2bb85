"""Histograms: every value lands in the one bucket that Prometheus would put it in."""

import bisect

from hypothesis import given
from hypothesis import strategies as st

from octavo.observe import buckets
from octavo.observe.buckets import BucketCounts

VALUES = st.floats(min_value=0, max_value=1e5, allow_nan=False)


@given(st.lists(VALUES | st.sampled_from(buckets.REQUEST_S)))
def test_cumulative_counts_are_values_at_or_below_each_bound(values: list[float]) -> None:
    """Turns red if a value equal to a bound moves up a bucket, or a bucket stops cumulating."""
    counts = BucketCounts(buckets.REQUEST_S)
    counts.observe_all(values)
    rows = counts.cumulative()
    ordered = sorted(values)
    for bound, count in rows:
        assert count == bisect.bisect_right(ordered, float(bound))
    assert rows[-1] == ("+Inf", len(values))
    assert counts.total == sum(values)


def test_a_limit_hides_bounds_but_loses_no_value() -> None:
    """Turns red if cutting token buckets at the context length drops observations."""
    counts = BucketCounts(buckets.TOKENS)
    counts.observe_all([1, 2048, 3000])
    assert counts.cumulative(limit=2048)[-2:] == [("2000.0", 1), ("+Inf", 3)]


def test_bounds_are_those_of_existing_dashboards() -> None:
    """Turns red if a bound is dropped or added: recorded quantiles would shift."""
    assert buckets.STEP_TOKENS[:4] == (1, 8, 16, 32)
    assert buckets.STEP_TOKENS[-1] == 16384
    assert (buckets.FIRST_TOKEN_S[0], buckets.FIRST_TOKEN_S[-1]) == (0.001, 2560)
    assert (buckets.INTER_TOKEN_S[0], buckets.INTER_TOKEN_S[-1]) == (0.01, 80)
    assert (buckets.REQUEST_S[0], buckets.REQUEST_S[-1]) == (0.3, 7680)
    assert [len(b) for b in (buckets.FIRST_TOKEN_S, buckets.INTER_TOKEN_S, buckets.REQUEST_S)] == [
        22,
        19,
        21,
    ]
    for bounds in (buckets.FIRST_TOKEN_S, buckets.INTER_TOKEN_S, buckets.REQUEST_S):
        assert list(bounds) == sorted(set(bounds))
