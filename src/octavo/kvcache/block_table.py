"""The blocks of one sequence, in order of position."""

from octavo.core.ids import BlockId
from octavo.core.request import CacheIdentity


class BlockTable:
    """Block ``i`` holds the KV of token positions ``i * block_size`` and following.

    ::

        | committed: full, computed, in the tree | computing | room |
        0                            num_committed           len(block_ids)

    Only the KV cache manager writes it.
    """

    __slots__ = ("_first_changed", "block_ids", "identity", "num_committed")

    def __init__(self, identity: CacheIdentity, cached: tuple[BlockId, ...]) -> None:
        self.identity = identity
        self.block_ids = list(cached)
        self.num_committed = len(cached)
        """Leading blocks that are the tree's own; with prefix caching off it stays 0."""
        self._first_changed = 0

    def fork(self, num_blocks: int) -> "BlockTable":
        """Return a table over the first ``num_blocks`` blocks, of which nobody was told."""
        table = BlockTable(self.identity, tuple(self.block_ids[:num_blocks]))
        table.num_committed = min(self.num_committed, num_blocks)
        return table

    def append(self, block_id: BlockId) -> None:
        """Add room at the end."""
        self.block_ids.append(block_id)

    def replace(self, index: int, block_id: BlockId) -> None:
        """Name another block that holds the same KV."""
        self.block_ids[index] = block_id
        self._first_changed = min(self._first_changed, index)

    def take_changes(self) -> tuple[int, tuple[BlockId, ...]]:
        """Return ``(first, block_ids[first:])`` since the last call, and mark it as told."""
        first = self._first_changed
        self._first_changed = num_blocks = len(self.block_ids)
        return first, tuple(self.block_ids[first:]) if first < num_blocks else ()
