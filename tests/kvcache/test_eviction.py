"""Eviction: leaves first, least recently used first, nobody's block in use, policies by name."""

import pytest

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError, SettingError
from octavo.core.ids import SequenceId
from octavo.core.request import CacheIdentity
from octavo.kvcache.eviction.ranked import LeastRecentlyUsed, RankedPolicy
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")


class MostUsedFirst(RankedPolicy):
    """A user's own policy: forget the most used candidate (and note what it was offered)."""

    def __init__(self):
        super().__init__()
        self.offered = []

    def rank(self, block):
        """Rank the most used one lowest."""
        self.offered.append(block.block_id)
        return (-block.num_uses,)


class Unlucky(RankedPolicy):
    """A user's own policy that fails as no policy is expected to."""

    def __init__(self):
        raise KeyError("settings")


class OnlyVictim:
    """A user's own policy that forgets what else it must have."""

    def victim(self):
        """Return anything."""
        return 0


def use(manager, number, tokens):
    """Run a sequence over ``tokens`` from admission to the end; return its table."""
    sequence = SequenceId(number)
    assert manager.admit(sequence, manager.match(IDENTITY, tokens), len(tokens))
    manager.commit(sequence, tokens, len(tokens))
    table = list(manager.tables[sequence].block_ids)
    manager.free(sequence)
    check_cache(manager)
    return table


def cached_order(manager):
    """Return the cached blocks, next to be evicted first."""
    return [block.block_id for block in manager.pool.cached_blocks()]


def test_lru_takes_the_deepest_block_of_the_oldest_prefix_first():
    """Order is LRU, then deepest first: a tail-last free would evict a parent before its child."""
    manager = KVCacheManager(CacheConfig(num_blocks=6, block_size=1))
    old = use(manager, 0, [1, 2, 3])
    young = use(manager, 1, [7, 8, 9])
    assert cached_order(manager) == [*reversed(old), *reversed(young)]
    use(manager, 2, [5, 5])
    assert manager.evictions_total == 2
    assert manager.match(IDENTITY, [1, 2, 3, 4]).num_tokens == 1
    assert manager.match(IDENTITY, [7, 8, 9, 4]).num_tokens == 3


def test_a_hit_makes_a_prefix_young_again():
    """Without the touch at admission the hot prefix would be the next to go."""
    manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=1))
    use(manager, 0, [1, 2])
    use(manager, 1, [7, 8])
    use(manager, 2, [1, 2, 3][:2])
    use(manager, 3, [4, 4])
    assert manager.match(IDENTITY, [1, 2, 0]).num_tokens == 2
    assert manager.match(IDENTITY, [7, 8, 0]).num_tokens == 0


def test_a_look_without_admission_changes_no_order():
    """``match`` is read-only: a waiting request must not keep its prefix alive by asking."""
    manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=1))
    use(manager, 0, [1, 2])
    use(manager, 1, [7, 8])
    before = cached_order(manager)
    manager.match(IDENTITY, [1, 2, 3])
    assert cached_order(manager) == before


def test_blocks_in_use_are_never_candidates():
    """A live sequence's blocks survive any pressure; the allocation fails instead."""
    manager = KVCacheManager(CacheConfig(num_blocks=4, block_size=1))
    live = SequenceId(0)
    assert manager.admit(live, manager.match(IDENTITY, [1, 2, 3]), 3)
    manager.commit(live, [1, 2, 3], 3)
    assert not manager.admit(SequenceId(1), manager.match(IDENTITY, [5, 5]), 2)
    assert manager.evictions_total == 0
    assert manager.match(IDENTITY, [1, 2, 3, 4]).num_tokens == 3


def test_a_users_own_policy_is_named_by_module_and_class():
    """``module:Class`` chooses the policy, which sees only leaves, and none of them twice."""
    policy = MostUsedFirst()
    manager = KVCacheManager(CacheConfig(num_blocks=5, block_size=1), eviction=policy)
    use(manager, 0, [1, 2])
    use(manager, 1, [7])
    use(manager, 2, [1, 2, 3])
    use(manager, 3, [1, 2, 3])
    assert policy.offered == [1, 2, 3, 3]
    use(manager, 4, [5, 6])
    assert manager.match(IDENTITY, [1, 2, 3, 4]).num_tokens == 2
    assert manager.match(IDENTITY, [7, 7]).num_tokens == 1
    assert EVICTION_POLICIES.names == ("lru", "lfu", "slru", "cost", "predict")
    assert isinstance(EVICTION_POLICIES.create("lru"), LeastRecentlyUsed)
    assert isinstance(EVICTION_POLICIES.create(f"{__name__}:MostUsedFirst"), MostUsedFirst)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lfu2", "must be one of lru, lfu, slru, cost, predict or module:Class"),
        ("", "must be one of lru"),
        ("no.such.module:Class", "cannot be made"),
        ("octavo.kvcache.eviction.ranked:Missing", "cannot be made"),
        ("octavo.kvcache.block_pool:BlockPool", "cannot be made"),
        ("octavo.kvcache.block:BlockList", r"has no method victim\(\)"),
        (":", "cannot be made"),
        (f"{__name__}:Unlucky", "cannot be made: KeyError: 'settings'"),
        (f"{__name__}:OnlyVictim", r"has no method attach\(\)"),
    ],
)
def test_a_wrong_policy_name_stops_the_start_with_one_sentence(name, message):
    """A misspelt or unusable policy is a SettingError at construction, never a later crash."""
    config = CacheConfig(num_blocks=4, eviction_policy=name)
    with pytest.raises(SettingError, match=message) as caught:
        KVCacheManager(config)
    assert caught.value.name == "--eviction-policy"


@pytest.mark.parametrize("nonsense", [-1, 99, None, "block", "the one in use"])
def test_a_users_policy_that_names_no_candidate_is_named(nonsense):
    """Turns red if a wrong victim is forgotten all the same, or fails where nobody finds it."""
    policy = MostUsedFirst()
    config = CacheConfig(num_blocks=4, block_size=1, eviction_policy="my:Own")
    manager = KVCacheManager(config, eviction=policy)
    use(manager, 0, [1, 2])
    assert manager.admit(SequenceId(1), manager.match(IDENTITY, [7]), 1)
    in_use = manager.tables[SequenceId(1)].block_ids[0]
    policy.victim = lambda: in_use if nonsense == "the one in use" else nonsense
    with pytest.raises(InvariantError, match="eviction policy 'my:Own' chose"):
        manager.admit(SequenceId(2), manager.match(IDENTITY, [5, 5]), 2)
    assert manager.evictions_total == 0
