"""The pool of equal KV blocks: who is free, cached or used, in O(1) each."""

from collections.abc import Iterator

from octavo.core.errors import InvariantError
from octavo.core.events import CacheUsage
from octavo.core.ids import BlockId
from octavo.kvcache.block import Block, BlockList, BlockState


class BlockPool:
    """Owns every block; all methods but the iterators are O(1).

    Laws: a block is free, cached or used; the references of all blocks sum to the entries of all
    block tables plus the blocks of the tree; free + cached + used = total.

    Free blocks are reused last in, first out (their memory is likeliest to be warm). Cached blocks
    are linked in the order in which their last user released them. Tables are released tail first,
    so a block always comes before its ancestors in that order: least recently used also means
    leaf first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(BlockId(index)) for index in range(num_blocks)]
        self._free = BlockList()
        self._cached = BlockList()
        self._num_releases = 0
        for block in self._blocks:
            self._free.push_last(block)

    @property
    def num_total(self) -> int:
        """Blocks of the pool."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that only the tree holds."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones, and cached ones after eviction."""
        return len(self._free) + len(self._cached)

    def usage(self) -> CacheUsage:
        """Count the blocks in each state."""
        total, free, cached = len(self._blocks), len(self._free), len(self._cached)
        return CacheUsage(total, free, cached, total - free - cached)

    def allocate(self) -> BlockId:
        """Take a free block with one reference.

        Raises:
            InvariantError: no block is free; the caller evicts first.
        """
        block = self._free.pop_first()
        block.references = 1
        block.num_uses = 1
        return block.block_id

    def take(self, block_id: BlockId) -> None:
        """Take this very block, which must be free, with one reference.

        Raises:
            InvariantError: it is not free.
        """
        block = self._blocks[block_id]
        self._free.remove(block)
        block.references = 1
        block.num_uses = 1

    def acquire(self, block_id: BlockId) -> None:
        """Add a table's reference to a cached or used block (touch).

        Raises:
            InvariantError: the block is free.
        """
        block = self._blocks[block_id]
        if block.references == 0:
            raise InvariantError(f"block {block_id} was acquired while free")
        if block.owner is self._cached:
            self._cached.remove(block)
        block.references += 1
        block.num_uses += 1

    def release(self, block_id: BlockId) -> None:
        """Drop a table's reference; the last one makes the block cached or free.

        Raises:
            InvariantError: no table refers to the block (double free).
        """
        block = self._blocks[block_id]
        if block.state is not BlockState.USED:
            raise InvariantError(f"block {block_id} was freed twice: it is {block.state.value}")
        block.references -= 1
        if block.references == 0:
            self._free.push_first(block)
        elif block.references == 1 and block.in_tree:
            self._num_releases += 1
            block.last_use = self._num_releases
            self._cached.push_last(block)

    def keep(self, block_id: BlockId) -> None:
        """Add the tree's reference to a used block.

        Raises:
            InvariantError: the block is not used, or in the tree already.
        """
        block = self._blocks[block_id]
        if block.in_tree or block.references == 0:
            raise InvariantError(f"block {block_id} cannot enter the tree: {block.state.value}")
        block.in_tree = True
        block.references += 1

    def forget(self, block_id: BlockId) -> None:
        """Drop the tree's reference to a cached block, which makes it free.

        Raises:
            InvariantError: the block is not cached: nothing in use is ever evicted.
        """
        block = self._blocks[block_id]
        if block.state is not BlockState.CACHED:
            raise InvariantError(f"block {block_id} was evicted while {block.state.value}")
        self._cached.remove(block)
        block.in_tree = False
        block.references = 0
        self._free.push_first(block)

    def is_cached(self, block_id: BlockId) -> bool:
        """Whether only the tree holds the block."""
        return self._blocks[block_id].owner is self._cached

    def block(self, block_id: BlockId) -> Block:
        """Return a block, to be read only."""
        return self._blocks[block_id]

    def age(self, block_id: BlockId) -> int:
        """Return how many blocks became cached since this one last did."""
        return self._num_releases - self._blocks[block_id].last_use

    def cached_blocks(self) -> Iterator[Block]:
        """Yield cached blocks, least recently used first; the pool must not change meanwhile."""
        return iter(self._cached)

    def free_blocks(self) -> Iterator[Block]:
        """Yield free blocks in the order in which they are allocated."""
        return iter(self._free)

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks by id, to be read only."""
        return iter(self._blocks)
