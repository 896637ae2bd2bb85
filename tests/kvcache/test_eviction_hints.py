"""What requests and operators may ask for: priority, TTL, do-not-store, pins; and looking ahead."""

import pytest

from octavo.core.config import CacheConfig
from octavo.core.errors import InvalidRequestError, SettingError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.request import CacheIdentity, Retention
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.kvcache.eviction.retention import BlockRetention
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager
from support_cache import IDENTITY, cached, use

LOW, HIGH = Retention(priority=10), Retention(priority=80)


@pytest.fixture(params=EVICTION_POLICIES.names)
def manager(request):
    """Six blocks of one token, under each policy; every test ends by checking all laws."""
    manager = KVCacheManager(CacheConfig(6, block_size=1, eviction_policy=request.param))
    yield manager
    check_cache(manager)


def test_low_priority_goes_first(manager):
    """Turns red if the policy's order comes before the priorities."""
    use(manager, 0, [1, 2])
    use(manager, 1, [3, 4], retention=LOW)
    use(manager, 2, [5, 6, 7, 8])
    assert cached(manager, [1, 2]) == 2
    assert cached(manager, [3]) == 0


def test_high_priority_goes_last(manager):
    """Turns red if a hinted prefix is evicted while one without a hint is left."""
    use(manager, 0, [1, 2], retention=HIGH)
    for number in range(1, 20):
        use(manager, number, [100 + number, 200 + number])
    assert cached(manager, [1, 2]) == 2


def test_high_priority_is_a_hint_not_a_promise(manager):
    """Turns red if retained prefixes can fill the cache for good and starve everybody."""
    for number in range(6):
        use(manager, number, [number], retention=HIGH)
    assert use(manager, 6, [10, 11, 12, 13, 14, 15]) == 0


def test_a_priority_holds_for_its_ttl(manager):
    """Turns red if a priority outlives its TTL, or ends before it."""
    use(manager, 0, [1, 2], retention=Retention(priority=80, ttl_s=10))
    manager.advance(9.0)
    for number in range(1, 9):
        use(manager, number, [100 + number, 200 + number])
    assert cached(manager, [1, 2]) == 2
    manager.advance(10.0)
    for number in range(11, 99):
        use(manager, number, [100 + number, 200 + number])
    assert cached(manager, [1, 2]) == 0


def test_a_use_renews_the_ttl(manager):
    """Turns red if the TTL counts from the first use instead of the last."""
    wish = Retention(priority=80, ttl_s=10)
    use(manager, 0, [1, 2], retention=wish)
    manager.advance(8.0)
    use(manager, 1, [1, 2], retention=wish)
    manager.advance(17.0)
    for number in range(2, 9):
        use(manager, number, [100 + number, 200 + number])
    assert cached(manager, [1, 2]) == 2


def test_renewals_do_not_pile_up():
    """Turns red if each use of a prefix with a long TTL leaves an entry behind."""
    retention = BlockRetention()
    for second in range(5000):
        retention.note([BlockId(1)], 1, Retention(priority=80, ttl_s=3600), float(second))
    assert len(retention._expiries) == 1
    assert retention.expire(3601.0) == []
    assert retention.expire(4999.0 + 3600) == [1]
    assert retention.priority(BlockId(1)) == 35


def test_ever_earlier_expiries_do_not_pile_up():
    """Turns red if a client whose TTLs shrink makes each use leave an entry for days."""
    retention = BlockRetention()
    for second in range(5000):
        wish = Retention(priority=80, ttl_s=1e6 - 2 * second)
        retention.note([BlockId(1), BlockId(2)], 0, wish, float(second))
        retention.forget(BlockId(1))
    assert len(retention._expiries) < 100
    assert retention.expire(1e6 - 5000) == []
    assert retention.expire(1e6) == [2]


def test_a_higher_wish_may_run_out_earlier():
    """Turns red if the first expiry that was noted is the only one looked at."""
    retention = BlockRetention()
    retention.note([BlockId(1)], 0, Retention(priority=50, ttl_s=100), 0.0)
    retention.note([BlockId(1)], 1, Retention(priority=80, ttl_s=10), 0.0)
    assert retention.expire(10.0) == [1]
    assert retention.expire(100.0) == []


def test_a_low_priority_document_does_not_drag_down_what_it_shares(manager):
    """Turns red if the last user decides: one RAG request would evict the system prompt."""
    use(manager, 0, [1, 2])
    use(manager, 1, [1, 2, 3, 4], retention=LOW)
    use(manager, 2, [5, 6, 7, 8])
    assert cached(manager, [1, 2, 3]) == 2


def test_a_use_without_a_hint_lifts_a_low_priority(manager):
    """Turns red if a prefix that everybody uses stays marked by its first, one-off user."""
    use(manager, 0, [1, 2], retention=LOW)
    use(manager, 1, [1, 2])
    use(manager, 2, [3, 4], retention=LOW)
    use(manager, 3, [5, 6, 7, 8])
    assert cached(manager, [1, 2]) == 2


def test_a_hint_does_not_outlive_the_block(manager):
    """Turns red if a block's next content inherits the priority of what it held before."""
    for number in range(6):
        use(manager, number, [number], retention=HIGH)
    use(manager, 7, [10, 11, 12, 13, 14, 15])
    use(manager, 8, [20, 21], retention=HIGH)
    use(manager, 9, [30, 31, 32, 33])
    assert cached(manager, [20, 21]) == 2


def test_do_not_store_leaves_nothing_but_may_read(manager):
    """Turns red if a request that asked not to be stored fills the cache, or may not hit."""
    use(manager, 0, [1, 2])
    assert use(manager, 1, [1, 2, 3, 4], retention=Retention(store=False)) == 2
    assert cached(manager, [1, 2, 3, 4]) == 2
    assert manager.usage().num_free == 4


@pytest.mark.parametrize("wrong", [{"priority": -1}, {"priority": 101}, {"ttl_s": 0.0}])
def test_wrong_hints_are_refused_by_name(wrong):
    """Turns red if a hint out of range is taken, or clipped without a word."""
    with pytest.raises(InvalidRequestError, match="retention"):
        Retention(**wrong)


def test_a_pinned_prefix_survives_any_pressure(manager):
    """Turns red if a pinned block becomes a candidate once it has been computed."""
    assert manager.pin(IDENTITY, [1, 2, 3]) == 3
    use(manager, 0, [1, 2, 3, 4])
    for number in range(1, 9):
        use(manager, number, [100 + number, 200 + number, 300 + number])
    assert cached(manager, [1, 2, 3]) == 3
    assert manager.usage().num_used == 3


def test_a_prefix_is_pinned_while_it_is_cached_too(manager):
    """Turns red if only what is computed after the pin is held."""
    use(manager, 0, [1, 2, 3])
    manager.pin(IDENTITY, [1, 2])
    for number in range(1, 9):
        use(manager, number, [100 + number, 200 + number])
    assert cached(manager, [1, 2, 3]) == 2


def test_pins_take_their_room_from_what_a_request_may_need(manager):
    """Turns red if a request that no longer fits beside the pins is accepted and hangs."""
    manager.pin(IDENTITY, [1, 2])
    manager.pin(IDENTITY, [1, 3])
    assert manager.num_slots == 3
    with pytest.raises(SettingError, match="more than half"):
        manager.pin(IDENTITY, [7])


def test_pins_need_prefix_caching():
    """Turns red if pins take room for prefixes that can never be cached."""
    manager = KVCacheManager(CacheConfig(num_blocks=8, block_size=1, enable_prefix_caching=False))
    with pytest.raises(SettingError, match="--pin-file needs prefix caching"):
        manager.pin(IDENTITY, [1, 2, 3])
    assert manager.num_slots == 8


def test_a_pin_belongs_to_its_identity(manager):
    """Turns red if another tenant's equal prompt is pinned as well."""
    manager.pin(IDENTITY, [1, 2])
    other = CacheIdentity(model="m", tokenizer="t", kv_dtype="f", tenant="other")
    use(manager, 0, [1, 2], identity=other)
    assert manager.usage().num_used == 0


def test_a_colliding_key_is_not_pinned():
    """Turns red if a pin trusts a hash: with one digest for all, the wrong prefix would stay."""
    manager = KVCacheManager(CacheConfig(6, block_size=1), digest=lambda data: b"")
    manager.pin(IDENTITY, [1])
    use(manager, 0, [7, 8])
    assert manager.usage().num_used == 0
    use(manager, 1, [1, 2])
    assert manager.usage().num_used == 1


def test_reset_forgets_pinned_prefixes_and_pins_them_again(manager):
    """Turns red if new weights would meet the KV of a pin, or the pin is lost with it."""
    manager.pin(IDENTITY, [1, 2])
    use(manager, 0, [1, 2, 3])
    assert manager.reset()
    assert manager.usage().num_free == 6
    use(manager, 1, [1, 2, 3])
    assert manager.usage().num_used == 2


def test_what_a_waiting_request_will_hit_is_spared(manager):
    """Turns red if the next victim is the prefix of the next request (vLLM #48485)."""
    use(manager, 0, [1, 2, 3])
    manager.expect(SequenceId(9), IDENTITY, [1, 2, 3, 4])
    for number in range(1, 9):
        use(manager, number, [100 + number, 200 + number], retention=HIGH)
    assert cached(manager, [1, 2, 3]) == 3
    assert use(manager, 9, [1, 2, 3, 4]) == 3
    for number in range(10, 15):
        use(manager, number, [100 + number, 200 + number, 300 + number], retention=HIGH)
    assert cached(manager, [1, 2, 3]) == 0


def test_a_request_that_leaves_the_queue_spares_nothing(manager):
    """Turns red if an abort leaks the protection."""
    use(manager, 0, [1, 2, 3])
    manager.expect(SequenceId(9), IDENTITY, [1, 2, 3, 4])
    manager.unexpect(SequenceId(9))
    manager.unexpect(SequenceId(9))
    for number in range(10, 99):
        use(manager, number, [100 + number, 200 + number, 300 + number])
    assert cached(manager, [1, 2, 3]) == 0


def test_with_nothing_else_left_the_last_to_wait_loses_first(manager):
    """Turns red if protection can stop an allocation, or hurts who is served next."""
    use(manager, 0, [1, 2, 3])
    use(manager, 1, [4, 5, 6])
    manager.expect(SequenceId(8), IDENTITY, [1, 2, 3, 9])
    manager.expect(SequenceId(9), IDENTITY, [4, 5, 6, 9])
    use(manager, 2, [7, 8])
    assert cached(manager, [1, 2, 3]) == 3
    assert cached(manager, [4, 5, 6]) == 1
    stats = manager.eviction_stats()[manager.eviction_policy]
    assert stats.expected_evictions_total == 2
    use(manager, 3, [17, 18])
    assert cached(manager, [4, 5, 6]) == 1
