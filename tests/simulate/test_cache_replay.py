"""The policy laboratory: the serving cache replays traces, beside the offline optimum."""

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import SettingError
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.simulate.cache_replay import replay
from octavo.simulate.clairvoyant import Clairvoyant
from octavo.workload.cache_trace import CacheTrace, TraceRequest, hash_trace, read_mooncake
from octavo.workload.synthetic import conversations, scanned, streams

NUM_BLOCKS = 128


@cache
def made_streams():
    """Return one stream of each kind, small enough for a unit test."""
    return streams(NUM_BLOCKS, 1200)


def hits(prompts, num_blocks, policy):
    """Return the leading blocks that each prompt hit."""
    return replay(hash_trace("test", prompts), num_blocks, policy).hit_blocks


def test_hits_are_leading_blocks_in_tokens():
    """Turns red if a hit behind a miss counts, or a partly filled block counts as full."""
    requests = [
        TraceRequest((1, 2, 3), 1300),
        TraceRequest((1, 2, 3), 1300),
        TraceRequest((1, 9, 3), 1300),
    ]
    result = replay(CacheTrace("t", tuple(requests), 1, 512), 8, "lru")
    assert result.hit_blocks == (0, 3, 1)
    assert result.num_hit_tokens == 1300 + 512
    assert result.token_hit_ratio == pytest.approx(1812 / 3900)


def test_token_traces_replay_in_whole_blocks_per_tenant():
    """Turns red if a partial block is cached, or tenants share."""
    tokens = tuple(range(10))
    requests = [TraceRequest(tokens, 10, tenant=tenant) for tenant in ("a", "a", "b")]
    result = replay(CacheTrace("t", tuple(requests), 4, 4), 8, "lru")
    assert result.hit_blocks == (0, 2, 0)


def test_a_cache_too_small_for_a_request_is_refused():
    """Turns red if a request that cannot run is skipped without a word."""
    with pytest.raises(SettingError, match="takes 5 blocks: a cache of 4 is too small"):
        hits([[1, 2, 3, 4, 5]], 4, "lru")


def test_progress_is_told():
    """Turns red if a caller cannot follow a long replay."""
    told = []
    trace = hash_trace("t", [[1], [1]])
    replay(trace, 2, "lru", on_request=lambda index, count: told.append((index, count)))
    assert told == [(0, 0), (1, 1)]


def brute_force(prompts, num_blocks):
    """Return the most block hits that any evictions of leaves can reach."""
    paths = [tuple(tuple(p[: end + 1]) for end in range(len(p))) for p in prompts]

    @cache
    def best(index, held):
        if index == len(paths):
            return 0
        path = paths[index]
        count = next((i for i, block in enumerate(path) if block not in held), len(path))
        others = held - set(path)
        num_evicted = max(0, len(others) + len(path) - num_blocks)
        results = []
        for evicted in combinations(sorted(others), num_evicted):
            left = frozenset(others - set(evicted) | set(path))
            if all(block[:-1] in left for block in left if len(block) > 1):
                results.append(best(index + 1, left))
        return count + max(results)

    return best(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=8),
    num_blocks=st.integers(3, 5),
)
def test_the_optimum_is_optimal(prompts, num_blocks):
    """Turns red if other choices of leaves, or a policy, hit more than Belady on a tree."""
    trace = hash_trace("test", prompts)
    found = sum(replay(trace, num_blocks, Clairvoyant(trace)).hit_blocks)
    assert found == brute_force(prompts, num_blocks)
    for policy in EVICTION_POLICIES.names:
        assert sum(replay(trace, num_blocks, policy).hit_blocks) <= found


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names)
def test_policies_know_only_the_past(policy):
    """Turns red if what comes later changes what was decided before."""
    past = conversations(250, 12, 8)
    futures = [conversations(100, 12, 8, seed=seed) for seed in (1, 2)]
    first, second = (hits(past + future, NUM_BLOCKS, policy)[: len(past)] for future in futures)
    assert first == second == hits(past, NUM_BLOCKS, policy)


@pytest.mark.parametrize("policy", EVICTION_POLICIES.names)
def test_replays_repeat(policy):
    """Turns red if a policy draws chance or hash order: two runs must agree."""
    prompts = conversations(300, 12, 8)
    assert hits(prompts, NUM_BLOCKS, policy) == hits(prompts, NUM_BLOCKS, policy)


@pytest.mark.parametrize("name", sorted(streams(8, 8)))
def test_predict_is_never_below_lru(name):
    """Turns red if a kind of stream is found on which predicting costs more than 1 %."""
    trace = made_streams()[name]
    lru = sum(replay(trace, NUM_BLOCKS, "lru").hit_blocks)
    predict = sum(replay(trace, NUM_BLOCKS, "predict").hit_blocks)
    assert predict >= 0.99 * lru


def test_predict_uses_the_room_there_is():
    """Turns red if the forecast never leads: LRU hits nothing of a loop that is too long."""
    trace = made_streams()["loop, too long"]
    assert sum(replay(trace, NUM_BLOCKS, "lru").hit_blocks) == 0
    assert replay(trace, NUM_BLOCKS, "predict").token_hit_ratio > 0.5


def hot_ratio(policy, scan_share):
    """Return the share of hot blocks that hit in the second half of a stream with scans."""
    prompts = scanned(1600, 24, scan_share, 20)
    counts = hits(prompts, NUM_BLOCKS, policy)
    hot = [
        min(count, 2)
        for prompt, count in zip(prompts, counts, strict=True)
        if prompt[0][0] == "hot"
    ]
    measured = hot[len(hot) // 2 :]
    return sum(measured) / (2 * len(measured))


@pytest.mark.parametrize("policy", ["predict", "slru", "lfu"])
def test_a_scan_spares_the_hot_set(policy):
    """Turns red if one-off documents flush hot short prefixes (mlx-serve #378)."""
    assert hot_ratio(policy, 0.2) > 0.95 * hot_ratio(policy, 0.0)


@pytest.mark.shared
def test_the_real_trace_shows_the_published_figures_and_the_gain(shared):
    """Turns red if replay no longer means what FIELD.md's figures do, or the gain is lost."""
    trace = read_mooncake(shared / "traces" / "mooncake" / "conversation_trace.jsonl")
    lru = replay(trace, 3000, "lru").token_hit_ratio
    assert lru == pytest.approx(0.067, abs=5e-4)
    assert replay(trace, 3000, "predict").token_hit_ratio >= 1.2 * lru
