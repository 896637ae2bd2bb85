"""What waiting sequences will hit is spared, whenever it is computed, and however often lost."""

import pytest

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.request import CacheIdentity, Retention
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.keys import blake2b
from octavo.kvcache.manager import KVCacheManager
from support_cache import IDENTITY, cached, use

OTHER = CacheIdentity(model="m", tokenizer="t", kv_dtype="f", tenant="other")


@pytest.fixture(params=EVICTION_POLICIES.names)
def manager(request):
    """Six blocks of one token, under each policy; every test ends by checking all laws."""
    manager = KVCacheManager(CacheConfig(6, block_size=1, eviction_policy=request.param))
    yield manager
    check_cache(manager)


def expect(manager, number, tokens, identity=IDENTITY):
    """Let a sequence wait that goes on after ``tokens``."""
    manager.expect(SequenceId(number), identity, [*tokens, 0])


def press(manager, start=100):
    """Let many others pass by, each of them before whatever is not spared, under any policy."""
    for number in range(start, start + 20):
        use(manager, number, [1000 * number, 0], retention=Retention(priority=80))


def spared(manager):
    """Return, for each waiting sequence, how many blocks of its prompt are cached."""
    return {waiter.sequence_id: waiter.depth for waiter in manager.expecting()}


def test_what_is_computed_while_one_waits_is_spared(manager):
    """Turns red if only what was cached when a request came is spared (a burst on a cold cache)."""
    expect(manager, 9, [1, 2, 3])
    assert spared(manager) == {9: 0}
    use(manager, 0, [1, 2, 3])
    press(manager)
    assert cached(manager, [1, 2, 3]) == 3
    assert use(manager, 9, [1, 2, 3]) == 3
    press(manager, start=200)
    assert cached(manager, [1]) == 0


def test_a_prefix_is_spared_as_far_as_it_is_computed(manager):
    """Turns red if a sequence does not follow from block to block, or is sent past its prompt."""
    expect(manager, 9, [1, 2, 3])
    for tokens, depth in (([1, 7], 1), ([1, 2], 2), ([1, 2, 8], 2), ([1, 2, 3, 4], 3)):
        use(manager, 0, tokens)
        assert spared(manager) == {9: depth}
    press(manager)
    assert (cached(manager, [1, 2, 3]), cached(manager, [1, 7])) == (3, 1)


def test_the_last_token_is_never_waited_for(manager):
    """Turns red if a block is spared that no hit may cover."""
    manager.expect(SequenceId(9), IDENTITY, [1, 2, 3])
    use(manager, 0, [1, 2, 3])
    assert spared(manager) == {9: 2}
    press(manager)
    assert cached(manager, [1, 2, 3]) == 2


def test_what_is_lost_is_waited_for_again(manager):
    """Turns red if a prefix that was evicted in part or whole is not spared once recomputed."""
    use(manager, 0, [1, 2, 3])
    expect(manager, 9, [1, 2, 3])
    use(manager, 1, [4, 5, 6, 7])
    assert spared(manager) == {9: 2}
    use(manager, 2, [1, 2, 3])
    assert spared(manager) == {9: 3}
    use(manager, 3, [4, 5, 6, 7, 8, 10])
    assert spared(manager) == {9: 0}
    use(manager, 4, [1, 2])
    press(manager)
    assert spared(manager) == {9: 2}
    assert cached(manager, [1, 2, 3]) == 2


def test_a_reset_leaves_the_wishes(manager):
    """Turns red if those who wait are forgotten with what they would have hit."""
    use(manager, 0, [1, 2, 3])
    expect(manager, 9, [1, 2, 3])
    assert manager.reset()
    assert spared(manager) == {9: 0}
    use(manager, 1, [1, 2, 3])
    press(manager)
    assert cached(manager, [1, 2, 3]) == 3


@pytest.mark.parametrize("when", ["cold", "cached"])
def test_who_leaves_wants_nothing(manager, when):
    """Turns red if an abort leaves a wish behind, for what is cached or what is to be."""
    if when == "cached":
        use(manager, 0, [1, 2, 3])
    expect(manager, 9, [1, 2, 3])
    manager.unexpect(SequenceId(9))
    manager.unexpect(SequenceId(9))
    use(manager, 1, [1, 2, 3])
    assert not list(manager.expecting())
    press(manager)
    assert cached(manager, [1]) == 0


def test_one_of_many_may_leave(manager):
    """Turns red if the wishes of those who stay go with one who wanted the same."""
    for number in (7, 8, 9):
        expect(manager, number, [1, 2, number])
    manager.unexpect(SequenceId(8))
    use(manager, 0, [1, 2])
    manager.unexpect(SequenceId(7))
    press(manager)
    assert spared(manager) == {9: 2}


def test_an_equal_prefix_of_another_tenant_is_none(manager):
    """Turns red if what one tenant computes is spared for another, who cannot hit it."""
    expect(manager, 9, [1, 2, 3], OTHER)
    use(manager, 0, [1, 2, 3])
    assert spared(manager) == {9: 0}
    press(manager)
    assert cached(manager, [1]) == 0


def test_who_came_first_keeps_longest_whoever_was_served_first(manager):
    """Turns red if the order in which prefixes were computed, or lost, decides."""
    expect(manager, 7, [1, 2])
    expect(manager, 8, [3, 4])
    use(manager, 0, [3, 4])
    use(manager, 1, [1, 2])
    use(manager, 2, [10, 11, 12])
    assert (cached(manager, [1, 2]), cached(manager, [3, 4])) == (2, 1)
    use(manager, 3, [10, 11, 12, 13])
    assert (cached(manager, [1, 2]), cached(manager, [3, 4])) == (2, 0)


def test_a_shared_prefix_is_kept_for_the_first_who_wants_it(manager):
    """Turns red if one who expects a block after others hides that he came before them."""
    use(manager, 0, [1, 2])
    use(manager, 1, [3, 4])
    expect(manager, 9, [1, 2])
    expect(manager, 8, [3, 4])
    expect(manager, 7, [1, 2])
    use(manager, 2, [10, 11, 12])
    assert (cached(manager, [1, 2]), cached(manager, [3, 4])) == (2, 1)
    manager.unexpect(SequenceId(7))
    use(manager, 3, [10, 11, 12, 13])
    assert (cached(manager, [1, 2]), cached(manager, [3, 4])) == (1, 1)


def test_a_weak_digest_spares_the_right_prefix():
    """Turns red if wishes are told apart by hashes alone."""
    manager = KVCacheManager(CacheConfig(8, block_size=2), digest=lambda data: b"same")
    expect(manager, 9, [1, 2, 3, 4])
    use(manager, 0, [1, 2, 5, 6])
    use(manager, 1, [3, 4, 3, 4])
    assert spared(manager) == {9: 1}
    use(manager, 2, [1, 2, 3, 4, 7, 7])
    assert spared(manager) == {9: 2}


@pytest.mark.parametrize("config", [{"prefix_cache": "flat"}, {"enable_prefix_caching": False}])
def test_where_nothing_is_spared_nothing_is_kept(config):
    """Turns red if wishes pile up that nothing can fulfil."""
    manager = KVCacheManager(CacheConfig(6, block_size=1, **config), digest=blake2b)
    expect(manager, 9, [1, 2, 3])
    use(manager, 0, [1, 2, 3])
    assert not manager.looks_ahead
    assert not list(manager.expecting())


def test_the_check_notices_a_wrong_expectation(manager):
    """Turns red if the law of what is spared cannot be broken."""
    use(manager, 0, [1, 2, 3])
    expect(manager, 9, [1, 2, 3])
    check_cache(manager)
    (waiter,) = manager.expecting()
    place, waiter.place = waiter.place, BlockId(1)
    with pytest.raises(InvariantError, match="is spared for sequence 9"):
        check_cache(manager)
    waiter.place = place
