"""The forecast of reuse, the order made of it, and the fallback to LRU."""

import pytest

from octavo.core.config import CacheConfig
from octavo.core.ids import BlockId
from octavo.kvcache.eviction.forecast import ReuseForecast
from octavo.kvcache.eviction.policy import CachedBlock, PrefixUse
from octavo.kvcache.eviction.predict import Leader, PredictedReuse
from octavo.kvcache.eviction.shadow import ShadowForecast, ShadowLRU
from octavo.kvcache.eviction.worth_order import WorthOrder
from octavo.kvcache.manager import KVCacheManager
from support_cache import IDENTITY, use


def learn(forecast, prompts):
    """Show prompts to a forecast; return the kind of the last block of each."""
    return [forecast.observe("", prompt)[-1] for prompt in prompts]


def test_knowing_nothing_it_is_lru():
    """Turns red if the prior prefers an older block: a cold start must behave like LRU."""
    forecast = ReuseForecast(160)
    worths = [forecast.worth(forecast.unknown(), age) for age in range(2000)]
    assert worths == sorted(worths, reverse=True)
    assert worths[0] > worths[-1] > 0


def test_a_block_is_worth_more_as_its_time_of_reuse_comes_near():
    """Turns red if worth can only fall with age: then keeping a part for long is impossible."""
    forecast = ReuseForecast(160)
    for number in range(3000):
        learn(forecast, [[("a", number)]])
        if number >= 500:
            learn(forecast, [[("a", number - 500)]])
    kind = forecast.observe("", [("new",)])[0]
    worths = [forecast.worth(kind, age) for age in range(200)]
    peak = worths.index(max(worths))
    assert 40 <= peak <= 101  # reuse comes after 1,000 touches: 100 ticks
    assert worths[0] < 0.5 * worths[peak]
    assert worths[150] < 0.1 * worths[peak]


def test_kinds_tell_a_document_from_a_conversation():
    """Turns red if kinds are mixed up: what is never reused must become worth little."""
    forecast = ReuseForecast(320)
    for number in range(1500):
        chat = [("chat", number % 20), ("chat", number % 20, 1)]
        learn(forecast, [chat, [("document", number, part) for part in range(20)]])
    chat = learn(forecast, [[("chat", 3), ("chat", 3, 1)]])[0]
    document = learn(forecast, [[("other", part) for part in range(20)]])[0]
    assert forecast.worth(chat, 0) > 20 * forecast.worth(document, 0)


def test_tenants_are_learned_apart_up_to_a_bound():
    """Turns red if one tenant's habits rule another's blocks, or tenants grow the tables."""
    forecast = ReuseForecast(64)
    first, second = (forecast.observe(name, [(name,)])[0] for name in ("one", "two"))
    assert first != second
    kinds = {forecast.observe(f"tenant {n}", [(n,)])[0] for n in range(500)}
    assert len(kinds) <= 8


def test_memory_is_bounded():
    """Turns red if what was forgotten is remembered for ever."""
    forecast = ReuseForecast(16)
    for number in range(70_000):
        forecast.observe("", [number])
    assert len(forecast._history) == 1 << 16
    assert sum(len(curve.live) for curve in forecast._curves) <= 1 << 16


def test_the_order_gives_up_a_prefix_as_a_whole():
    """Turns red if of equals the oldest goes first: every prefix would lose its tail."""
    forecast = ReuseForecast(16)
    order = WorthOrder(forecast)
    for item in "abc":
        order.add(item, forecast.unknown(), forecast.tick)
    assert order.first() == "c"
    order.remove("c")
    order.add("parent of c", forecast.unknown(), forecast.tick)
    assert order.first() == "parent of c"


def test_the_order_follows_worths_as_time_passes():
    """Turns red if worths are those of when an item came: the order must change with age."""
    forecast = ReuseForecast(16)
    order = WorthOrder(forecast)
    order.add("old", forecast.unknown(), forecast.tick)
    learn(forecast, [[number] for number in range(100)])
    order.add("young", forecast.unknown(), forecast.tick)
    assert order.first() == "old"
    order.remove("old")
    assert order.first() == "young"
    assert "old" not in order
    assert len(order) == 1


def test_an_order_that_nobody_asks_does_not_grow():
    """Turns red if a cache that never fills leaks an entry for each hit."""
    forecast = ReuseForecast(16)
    order = WorthOrder(forecast)
    for _ in range(5000):
        order.add("hot", forecast.unknown(), forecast.tick)
        order.remove("hot")
    assert len(order._heap) < 200


def test_the_lru_shadow_hits_what_a_real_lru_cache_does():
    """Turns red if the shadow to compare with is not LRU: the fallback would be blind."""
    manager = KVCacheManager(CacheConfig(8, block_size=1))
    shadow = ShadowLRU(8)
    state = 1
    for number in range(3000):
        state = state * 48271 % 2147483647
        prompt = [state % 5, state // 7 % 3, state // 31 % 4][: 1 + state % 3]
        keys = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        assert shadow.use(keys) == use(manager, number, prompt)


def test_the_forecast_shadow_keeps_its_size_and_its_prefixes_whole():
    """Turns red if the shadow forgets a block before those that follow it, or grows."""
    forecast = ReuseForecast(8)
    shadow = ShadowForecast(8, forecast)
    state = 1
    for _ in range(2000):
        state = state * 48271 % 2147483647
        prompt = [state % 5, state // 7 % 3, state // 31 % 4][: 1 + state % 3]
        keys = [tuple(prompt[: end + 1]) for end in range(len(prompt))]
        tick = forecast.tick
        shadow.use(keys, forecast.observe("", keys), tick)
        held = set(shadow._nodes)
        assert len(held) <= 8
        assert all(key[:-1] in held for key in held if len(key) > 1)


def test_the_leader_waits_for_a_margin():
    """Turns red if one lucky hit changes sides, however long: chance must be ruled out."""
    leader = Leader(64)
    leader.compare(400, 0, 400)
    assert not leader.forecast_leads
    for _ in range(9):
        leader.compare(400, 0, 400)
    assert leader.forecast_leads
    for _ in range(3):
        leader.compare(40, 40, 0)
    assert leader.forecast_leads


def test_the_leader_returns_to_lru_and_asks_for_more_next_time():
    """Turns red if a stream that fools the forecast can do so again at the same price."""
    leader = Leader(64)
    waits = []
    for _ in range(4):
        wins = 0
        while not leader.forecast_leads:
            leader.compare(1, 0, 1)
            wins += 1
        waits.append(wins)
        losses = 0
        while leader.forecast_leads:
            leader.compare(1, 1, 0)
            losses += 1
        assert losses < 15
    assert waits[3] > 6 * waits[0]


def test_equal_shadows_change_nothing():
    """Turns red if the forecast takes over without being better."""
    leader = Leader(64)
    for _ in range(1000):
        leader.compare(10, 5, 5)
    assert not leader.forecast_leads


@pytest.mark.parametrize("known", [True, False])
def test_a_block_of_unknown_past_can_be_ordered(known):
    """Turns red if a live switch hands over candidates that crash the new policy."""
    policy = PredictedReuse()
    policy.attach(4)
    if known:
        policy.record(PrefixUse(IDENTITY, (BlockId(1),), (b"k",), 0))
    policy.add(CachedBlock(BlockId(1), b"k", 0, 1, 1))
    assert policy.victim() == 1
    policy.remove(BlockId(1))
