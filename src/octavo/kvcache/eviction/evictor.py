"""Chooses and forgets: candidates by priority, each offered to the policy in force."""

from collections.abc import Iterable, Mapping, Sequence

from octavo.core.errors import InvariantError, SettingError
from octavo.core.events import EvictionTotals
from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.request import DEFAULT_RETENTION_PRIORITY, CacheIdentity, Retention
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.eviction.counters import EvictionCounters, EvictionStats
from octavo.kvcache.eviction.expectation import Chunk, Expectations, Waiter
from octavo.kvcache.eviction.policy import CachedBlock, EvictionPolicy, PrefixUse
from octavo.kvcache.eviction.ranked import LeastRecentlyUsed, Rank, RankedPolicy
from octavo.kvcache.eviction.retention import BlockRetention
from octavo.kvcache.prefix_index import PrefixIndex

_EXPECTED = 101
"""The level of blocks that waiting requests will hit: above every priority."""


class _LatestWaitFirst(RankedPolicy):
    """Forget what the last one to come would hit, then what the one before it would."""

    def __init__(self, expectations: Expectations) -> None:
        super().__init__()
        self._expectations = expectations
        self.first: dict[BlockId, SequenceId] = {}
        """Who came first of those that a candidate is kept for, as it was ranked."""

    def rank(self, block: CachedBlock) -> Rank:
        """Return the youngest sequence first; ids grow with arrival."""
        first = self.first[block.block_id] = self._expectations.first(block.block_id)
        return (-first,)

    def remove(self, block_id: BlockId) -> None:
        """Drop a candidate."""
        del self.first[block_id]
        super().remove(block_id)


class Evictor:
    """Keeps the evictable blocks in levels, and forgets from the lowest level first.

    Levels are the priorities that requests asked for. The default level is ordered by the policy,
    the others by recency, as in TensorRT-LLM. What a waiting request will hit goes last of all.
    """

    def __init__(
        self,
        pool: BlockPool,
        tree: PrefixIndex,
        block_size: int,
        name: str,
        policy: EvictionPolicy,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._block_size = block_size
        self._retention = BlockRetention()
        self._expectations = Expectations(block_size)
        self._waited_for = _LatestWaitFirst(self._expectations)
        self._levels: dict[int, EvictionPolicy] = {_EXPECTED: self._waited_for}
        self._sizes: dict[int, int] = {}
        self._places: dict[BlockId, int] = {}
        self._counters: dict[str, EvictionCounters] = {}
        self._totals: tuple[EvictionTotals, ...] | None = None
        self.evictions_total = 0
        self.policy_name = name
        policy.attach(pool.num_total)
        self._put_in_force(name, policy)

    @property
    def policy(self) -> EvictionPolicy:
        """The policy in force."""
        return self._levels[DEFAULT_RETENTION_PRIORITY]

    def candidates(self) -> Mapping[BlockId, int]:
        """Return the level of each evictable block, to be read only."""
        return self._places

    def switch(self, name: str, policy: EvictionPolicy) -> None:
        """Put another policy in force; it is told of every candidate, the oldest first.

        Raises:
            SettingError: a user's policy fails at that; the old one stays in force.
        """
        moved = [
            block for block, level in self._places.items() if level == DEFAULT_RETENTION_PRIORITY
        ]
        try:
            policy.attach(self._pool.num_total)
            for block_id in sorted(moved, key=lambda block: self._pool.block(block).last_use):
                policy.add(self._describe(block_id))
        except Exception as error:  # whatever the user's code raises, it cannot serve
            raise SettingError(
                f"--eviction-policy {name!r} cannot be put in force: "
                f"{type(error).__name__}: {error}.",
                name="--eviction-policy",
            ) from error
        self._put_in_force(name, policy)
        self._counter.switches_total += 1

    def stats(self) -> dict[str, EvictionStats]:
        """Return the totals of every policy that was ever in force, by name."""
        return {name: counters.stats() for name, counters in self._counters.items()}

    def totals(self) -> tuple[EvictionTotals, ...]:
        """Return the same totals for observers, made anew only when something has changed."""
        if self._totals is None:
            self._totals = tuple(
                self._total(name, counters) for name, counters in self._counters.items()
            )
        return self._totals

    def record(self, use: PrefixUse, wish: Retention, now: float) -> None:
        """Take note of a sequence that is about to release its blocks."""
        num_old = use.num_hits
        while (
            num_old < len(use.block_ids) and self._pool.block(use.block_ids[num_old]).num_uses > 1
        ):
            num_old += 1  # another sequence computed it at the same time
        self._retention.note(use.block_ids, num_old, wish, now)
        self.policy.record(use)

    def released(self, block_id: BlockId) -> None:
        """Take in a block that a table let go, if it can be evicted now."""
        if self._pool.is_cached(block_id) and self._tree.is_leaf(block_id):
            self._add(block_id)

    def taken(self, block_id: BlockId) -> None:
        """Drop a cached block that a sequence is about to take, and count the hit."""
        self._counter.count_hit(self._pool.age(block_id))
        self._totals = None
        if block_id in self._places:
            self._remove(block_id)

    def expect(
        self,
        sequence_id: SequenceId,
        identity: CacheIdentity,
        token_ids: Sequence[TokenId],
        block_ids: Sequence[BlockId],
    ) -> None:
        """Spare what a waiting sequence will hit: now these blocks, later what is computed."""
        self.settle(sequence_id)
        self._expectations.expect(sequence_id, identity, token_ids, block_ids)
        if block_ids:
            first = self._waited_for.first.get(block_ids[-1])
            if first is None or sequence_id < first:
                self._replace(block_ids[-1])

    def settle(self, sequence_id: SequenceId) -> None:
        """Spare nothing any more for a sequence that no longer waits."""
        block_id = self._expectations.settle(sequence_id)
        if block_id is not None and self._waited_for.first.get(block_id) == sequence_id:
            self._replace(block_id)

    def computed(
        self, identity: CacheIdentity, parent: BlockId | None, chunk: Chunk, block_id: BlockId
    ) -> None:
        """Spare a block that the tree took in, once it is released, if it is waited for."""
        self._expectations.computed(identity if parent is None else parent, chunk, block_id)

    def expecting(self) -> Iterable[Waiter]:
        """Return the waiting sequences."""
        return self._expectations.waiters

    def advance(self, now: float) -> None:
        """Let priorities run out."""
        for block_id in self._retention.expire(now):
            self._replace(block_id)

    def evict(self) -> None:
        """Forget one block.

        Raises:
            InvariantError: nothing can be evicted, or the policy names no candidate.
        """
        level = min((level for level, size in self._sizes.items() if size), default=None)
        if level is None:
            raise InvariantError("a block was needed, but none is free and none can be evicted")
        block_id = self._levels[level].victim()
        if self._places.get(block_id) != level:
            raise InvariantError(
                f"the eviction policy {self.policy_name!r} chose {block_id!r}, not one of the "
                "blocks that can be evicted"
            )
        num_uses = self._pool.block(block_id).num_uses
        self._counter.count_eviction(num_uses=num_uses, expected=level == _EXPECTED)
        self._totals = None
        self.evictions_total += 1
        self._forget(block_id)

    def forget_all(self) -> None:
        """Forget every cached block; counts as no eviction."""
        while self._places:
            self._forget(next(iter(self._places)))

    def _put_in_force(self, name: str, policy: EvictionPolicy) -> None:
        self._levels[DEFAULT_RETENTION_PRIORITY] = policy
        self._counter = self._counters.setdefault(name, EvictionCounters())
        self.policy_name = name
        self._totals = None

    def _total(self, name: str, counters: EvictionCounters) -> EvictionTotals:
        stats = counters.stats()
        return EvictionTotals(
            policy=name,
            is_in_force=name == self.policy_name,
            switches_total=counters.switches_total,
            evictions_total=stats.evictions_total,
            unused_evictions_total=stats.unused_evictions_total,
            expected_evictions_total=stats.expected_evictions_total,
            hits_total=stats.hits_total,
            saved_tokens_total=stats.hits_total * self._block_size,
        )

    def _forget(self, block_id: BlockId) -> None:
        self._remove(block_id)
        parent = self._tree.remove(block_id)
        self._pool.forget(block_id)
        self._retention.forget(block_id)
        self._expectations.lost(block_id, parent)
        if parent is not None:
            self.released(parent)

    def _replace(self, block_id: BlockId) -> None:
        """Move a candidate to the level where it belongs now."""
        if block_id in self._places:
            self._remove(block_id)
            self._add(block_id)

    def _add(self, block_id: BlockId) -> None:
        expected = block_id in self._expectations
        level = _EXPECTED if expected else self._retention.priority(block_id)
        policy = self._levels.get(level)
        if policy is None:
            policy = self._levels[level] = LeastRecentlyUsed()
        self._places[block_id] = level
        self._sizes[level] = self._sizes.get(level, 0) + 1
        policy.add(self._describe(block_id))

    def _describe(self, block_id: BlockId) -> CachedBlock:
        block = self._pool.block(block_id)
        key, depth = self._tree.key(block_id), self._tree.depth(block_id)
        return CachedBlock(block_id, key, depth, block.num_uses, block.last_use)

    def _remove(self, block_id: BlockId) -> None:
        level = self._places.pop(block_id)
        self._sizes[level] -= 1
        self._levels[level].remove(block_id)
