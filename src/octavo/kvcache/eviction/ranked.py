"""Policies that give each candidate a rank when it becomes one: LRU, LFU, SLRU and cost."""

import heapq
from collections import OrderedDict

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId
from octavo.kvcache.eviction.policy import CachedBlock, PrefixUse

Rank = tuple[float, ...]


class RankedPolicy:
    """Forgets the candidate of the lowest rank; the base for a user's own policy.

    A subclass needs ``rank`` alone. A heap with lazy deletion keeps the order: O(log n) each.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int, BlockId]] = []
        self._stamps: dict[BlockId, int] = {}
        self._num_added = 0

    def rank(self, block: CachedBlock) -> Rank:
        """Return the rank; the lowest is forgotten first, of equals the one added first."""
        raise NotImplementedError

    def attach(self, num_blocks: int) -> None:
        """Do nothing: ranks do not depend on the size of the pool."""

    def record(self, use: PrefixUse) -> None:
        """Do nothing: what a candidate says of itself is enough."""

    def add(self, block: CachedBlock) -> None:
        """Rank a candidate."""
        self._num_added += 1
        self._stamps[block.block_id] = self._num_added
        heapq.heappush(self._heap, (self.rank(block), self._num_added, block.block_id))

    def remove(self, block_id: BlockId) -> None:
        """Drop a candidate; its entry leaves the heap later."""
        del self._stamps[block_id]
        if len(self._heap) > 2 * len(self._stamps) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def victim(self) -> BlockId:
        """Return the candidate of the lowest rank."""
        return self._first()[2]

    def _first(self) -> tuple[Rank, int, BlockId]:
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        if not self._heap:
            raise InvariantError("a victim was asked for, but nothing can be evicted")
        return self._heap[0]

    def _is_current(self, entry: tuple[Rank, int, BlockId]) -> bool:
        return self._stamps.get(entry[2]) == entry[1]


class LeastRecentlyUsed(RankedPolicy):
    """Forget what was released longest ago, of one prefix the deepest block first (vLLM V1)."""

    def rank(self, block: CachedBlock) -> Rank:
        """Return when it was released."""
        return (block.last_use,)


class LeastFrequentlyUsed(RankedPolicy):
    """Forget what was used least often since it was filled, of equals the oldest (SGLang)."""

    def rank(self, block: CachedBlock) -> Rank:
        """Return the uses, then the time of release."""
        return (block.num_uses, block.last_use)


class SegmentedLRU(RankedPolicy):
    """Two LRU segments: blocks that were hit are protected from those that never were.

    The protected segment holds at most a share of the pool. What falls out of it is ranked as if
    it had just come into the other one, so nothing is protected for ever (Karedla et al., 1994).
    """

    def __init__(self, protected_share: float = 0.5) -> None:
        super().__init__()
        self._share = protected_share
        self._max_protected = 0
        self._protected: OrderedDict[BlockId, None] = OrderedDict()
        self._demoted: dict[BlockId, int] = {}
        self._candidates: dict[BlockId, CachedBlock] = {}
        self._now = 0

    def attach(self, num_blocks: int) -> None:
        """Size the protected segment."""
        self._max_protected = max(1, int(self._share * num_blocks))

    def record(self, use: PrefixUse) -> None:
        """Promote the blocks that were hit; the deepest first, so that parents outlive them."""
        for block_id in use.block_ids[use.num_hits :]:
            self._protected.pop(block_id, None)
            self._demoted.pop(block_id, None)
        for block_id in reversed(use.block_ids[: use.num_hits]):
            self._demoted.pop(block_id, None)
            self._protected[block_id] = None
            self._protected.move_to_end(block_id)
        while len(self._protected) > self._max_protected:
            self._demote(self._protected.popitem(last=False)[0])

    def add(self, block: CachedBlock) -> None:
        """Rank a candidate, and keep what is known of it in case it is demoted."""
        self._now = max(self._now, block.last_use)
        self._candidates[block.block_id] = block
        super().add(block)

    def remove(self, block_id: BlockId) -> None:
        """Drop a candidate."""
        del self._candidates[block_id]
        super().remove(block_id)

    def rank(self, block: CachedBlock) -> Rank:
        """Return the segment, then the time of release or of demotion."""
        if block.block_id in self._protected:
            return (1, block.last_use)
        return (0, max(block.last_use, self._demoted.get(block.block_id, 0)))

    def _demote(self, block_id: BlockId) -> None:
        self._demoted[block_id] = self._now
        block = self._candidates.get(block_id)
        if block is not None:
            super().add(block)


class CostPerByte(RankedPolicy):
    """Keep what saves most recomputing for the bytes it takes (GreedyDual-Size-Frequency).

    All blocks have equal size. Recomputing one costs a part that is the same for all, and
    attention, which grows with the tokens before it. The value of a block is cost times uses; as
    blocks are evicted the value that newcomers start from rises, so old fame fades.
    """

    def __init__(self, doubling_depth: float = 1024.0) -> None:
        """Blocks before a block at which attention costs as much as the rest.

        1,024 blocks of 16 tokens are what a model of hidden size 2,700 has: the projections of a
        layer take about 12 x hidden squared multiplications a token, attention 2 x hidden x depth.
        """
        super().__init__()
        self._doubling_depth = doubling_depth
        self._inflation = 0.0
        self._bases: dict[BlockId, float] = {}
        """The value that newcomers started from when the block was last used."""

    def record(self, use: PrefixUse) -> None:
        """Note from where the values of the blocks count; not from when they become leaves."""
        self._bases.update(dict.fromkeys(use.block_ids, self._inflation))

    def rank(self, block: CachedBlock) -> Rank:
        """Return the value, then the time of release."""
        cost = 1.0 + block.depth / self._doubling_depth
        base = self._bases.get(block.block_id, self._inflation)
        return (base + block.num_uses * cost, block.last_use)

    def victim(self) -> BlockId:
        """Return the least valuable candidate; newcomers start from its value."""
        rank, _, block_id = self._first()
        self._inflation = max(self._inflation, rank[0])
        return block_id
