"""What each policy forgets first, and the laws that all of them keep."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError, SettingError
from octavo.core.ids import BlockId, SequenceId
from octavo.kvcache.eviction.policy import CachedBlock, PrefixUse
from octavo.kvcache.eviction.ranked import CostPerByte, LeastRecentlyUsed, SegmentedLRU
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager
from support_cache import IDENTITY, cached, use

POLICIES = EVICTION_POLICIES.names


def make(policy, num_blocks):
    """Return a cache of one-token blocks."""
    return KVCacheManager(CacheConfig(num_blocks, block_size=1, eviction_policy=policy))


def candidate(number, *, depth=0, num_uses=1, last_use=None):
    """Return a candidate as the evictor describes it."""
    when = number if last_use is None else last_use
    return CachedBlock(BlockId(number), bytes([number]), depth, num_uses, when)


def drain(policy):
    """Return the order in which a policy forgets all its candidates."""
    order = []
    while True:
        try:
            order.append(policy.victim())
        except InvariantError:
            return order
        policy.remove(order[-1])


def test_lfu_forgets_what_was_used_least():
    """Turns red if LFU looks at recency first: the old and often used prefix must stay."""
    manager = make("lfu", 4)
    for number in range(3):
        use(manager, number, [1, 2])
    use(manager, 3, [5])
    use(manager, 4, [6])
    use(manager, 5, [7, 8])
    assert cached(manager, [1, 2]) == 2
    assert cached(manager, [5]) == cached(manager, [6]) == 0


def test_lfu_forgets_the_older_of_equals():
    """Turns red if ties are broken by anything but time."""
    manager = make("lfu", 3)
    for number, token in enumerate([5, 6, 7, 8]):
        use(manager, number, [token])
    assert [cached(manager, [token]) for token in (5, 6, 7, 8)] == [0, 1, 1, 1]


def test_slru_protects_what_was_hit_from_a_scan():
    """Turns red if fresh blocks can push out those that were hit."""
    manager = make("slru", 10)
    for number in range(2):
        use(manager, number, [1, 2, 3])
    for number in range(2, 60):
        use(manager, number, [100 + number])
    assert cached(manager, [1, 2, 3]) == 3


def test_slru_protects_nothing_for_ever():
    """Turns red if the protected segment has no bound: yesterday's hits would fill the cache."""
    manager = make("slru", 10)
    for number, token in enumerate([token for token in range(30) for _ in range(2)]):
        use(manager, number, [token])
    assert sum(cached(manager, [token]) for token in range(20)) == 0
    assert cached(manager, [29]) == 1


def test_a_demoted_block_is_ranked_anew():
    """Turns red if a candidate keeps the rank of the segment that it fell out of."""
    policy = SegmentedLRU(protected_share=0.5)
    policy.attach(2)
    for number in (1, 2):
        policy.record(PrefixUse(IDENTITY, (BlockId(number),), (bytes([number]),), 1))
        policy.add(candidate(number))
    policy.add(candidate(3))
    assert drain(policy) == [1, 3, 2]


def test_cost_keeps_deep_blocks_before_shallow_ones():
    """Turns red if recompute cost ignores depth: attention makes a deep block dearer."""
    policy = CostPerByte(doubling_depth=4)
    for number, depth in [(1, 8), (2, 0), (3, 4)]:
        policy.add(candidate(number, depth=depth))
    assert drain(policy) == [2, 3, 1]


def test_cost_lets_old_fame_fade():
    """Turns red without inflation: what was popular once would never leave."""
    policy = CostPerByte()
    policy.add(candidate(0, num_uses=5))
    for number in range(1, 10):
        policy.add(candidate(number))
        victim = policy.victim()
        policy.remove(victim)
        if victim == 0:
            break
    assert victim == 0
    assert number > 2


def test_lazy_deletion_does_not_grow_without_bound():
    """Turns red if stale heap entries are kept: a hot prefix that is hit for hours would leak."""
    policy = LeastRecentlyUsed()
    for number in range(10_000):
        policy.add(candidate(1, last_use=number))
        policy.remove(BlockId(1))
    policy.add(candidate(2))
    assert policy.victim() == 2
    assert len(policy._heap) < 200


@pytest.mark.parametrize("policy", POLICIES)
def test_the_only_leaf_is_the_victim(policy):
    """Turns red if a policy takes a block that others follow: only the tail may go."""
    manager = make(policy, 6)
    use(manager, 0, [1, 2, 3, 4, 5])
    use(manager, 1, [9, 9])
    assert cached(manager, [1, 2, 3, 4, 5]) == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exhausted_policy_says_so(policy):
    """Turns red if a victim is made up when there is no candidate."""
    made = EVICTION_POLICIES.create(policy)
    made.attach(4)
    with pytest.raises(InvariantError, match="nothing can be evicted"):
        made.victim()


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "commit", "extend", "free", "switch", "expect", "reset"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 1), min_size=1, max_size=6),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(policy=st.sampled_from(POLICIES), steps=steps)
def test_no_policy_breaks_a_law(policy, steps):
    """Turns red if any policy, or a switch between two, loses a block, evicts one in use, or one
    that is no leaf (six blocks, two tokens, all invariants after each step)."""
    manager = make(policy, 6)
    tokens = {}
    for action, number, drawn in steps:
        sequence = SequenceId(number)
        if action == "admit" and sequence not in tokens:
            hit = manager.match(IDENTITY, drawn)
            if manager.admit(sequence, hit, len(drawn)):
                tokens[sequence] = list(drawn)
        elif action == "commit" and sequence in tokens:
            manager.commit(sequence, tokens[sequence], len(tokens[sequence]))
        elif action == "extend" and sequence in tokens:
            if manager.extend(sequence, len(tokens[sequence]) + len(drawn), len(tokens[sequence])):
                tokens[sequence] += drawn
        elif action == "free" and sequence in tokens:
            manager.free(sequence)
            del tokens[sequence]
        elif action == "switch":
            manager.set_eviction_policy(POLICIES[len(drawn) % len(POLICIES)])
        elif action == "expect" and sequence not in tokens:
            manager.unexpect(sequence)
            manager.expect(sequence, IDENTITY, drawn)
        elif action == "reset":
            assert manager.reset() == (not tokens)
        check_cache(manager)
    for sequence in tokens:
        manager.free(sequence)
    check_cache(manager)
    assert manager.usage().num_used == 0


@pytest.mark.parametrize("old", POLICIES)
@pytest.mark.parametrize("new", POLICIES)
def test_a_switch_loses_nothing_that_is_cached(old, new):
    """Turns red if a live switch forgets a prefix, or leaves the new policy without candidates."""
    manager = make(old, 8)
    use(manager, 0, [1, 2, 3])
    use(manager, 1, [1, 2, 4])
    manager.set_eviction_policy(new)
    assert manager.eviction_policy == new
    assert cached(manager, [1, 2, 3]) == cached(manager, [1, 2, 4]) == 3
    use(manager, 2, list(range(10, 18)))
    assert cached(manager, [1]) == 0


def test_a_wrong_switch_changes_nothing():
    """Turns red if a misspelt name leaves the cache without a policy."""
    manager = make("lfu", 4)
    use(manager, 0, [1, 2])
    with pytest.raises(SettingError, match="must be one of lru, lfu, slru, cost, predict"):
        manager.set_eviction_policy("lruu")
    assert manager.eviction_policy == "lfu"
    use(manager, 1, [5, 6, 7, 8])


class Failing(LeastRecentlyUsed):
    """A user's own policy that a few candidates are too many for."""

    def add(self, block):
        """Take in the first one."""
        if self._stamps:
            raise KeyError(block.block_id)
        super().add(block)


class Unattached(LeastRecentlyUsed):
    """A user's own policy that no pool is large enough for."""

    def attach(self, num_blocks):
        """Refuse."""
        raise ValueError(num_blocks)


@pytest.mark.parametrize(("name", "why"), [("Failing", "KeyError"), ("Unattached", "ValueError")])
def test_a_policy_that_fails_to_take_over_changes_nothing(name, why):
    """Turns red if a switch that a user's policy breaks off loses candidates."""
    manager = make("lfu", 6)
    use(manager, 0, [1, 2])
    use(manager, 1, [3])
    before = set(manager.eviction_candidates())
    with pytest.raises(SettingError, match=f"{name}' cannot be put in force: {why}: ") as caught:
        manager.set_eviction_policy(f"{__name__}:{name}")
    assert caught.value.name == "--eviction-policy"
    assert (manager.eviction_policy, set(manager.eviction_candidates())) == ("lfu", before)
    assert not any(totals.switches_total for totals in manager.eviction_totals())
    use(manager, 2, [5, 6, 7, 8, 9, 10])
    assert manager.evictions_total == 3


def test_counters_are_kept_for_each_policy():
    """Turns red if a switch mixes or drops the totals of the policies."""
    manager = make("lru", 4)
    use(manager, 0, [1, 2])
    use(manager, 1, [1, 2])
    use(manager, 2, [5, 6, 7])
    manager.set_eviction_policy("lfu")
    use(manager, 3, [8])
    stats = manager.eviction_stats()
    assert (stats["lru"].evictions_total, stats["lru"].unused_evictions_total) == (1, 0)
    assert stats["lru"].hits_total == sum(stats["lru"].hits_by_age) == 2
    assert stats["lru"].hits_by_age[:2] == (1, 1)
    assert (stats["lfu"].evictions_total, stats["lfu"].unused_evictions_total) == (1, 1)
    assert manager.evictions_total == 2
