"""A KV block as bookkeeping: its references and its neighbours in the list it is linked in."""

from collections.abc import Iterator
from enum import Enum

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId


class BlockState(Enum):
    """Every block is in exactly one of these states."""

    FREE = "free"
    """Holds nothing; linked in the free list."""
    CACHED = "cached"
    """In the radix tree and in no block table; linked in the LRU list."""
    USED = "used"
    """In at least one block table; linked in no list."""


class Block:
    """One block. Only the block pool writes it."""

    __slots__ = (
        "block_id",
        "in_tree",
        "last_use",
        "next",
        "num_uses",
        "owner",
        "previous",
        "references",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.references = 0
        """Entries of block tables that name this block, plus one while the tree holds it."""
        self.in_tree = False
        self.num_uses = 0
        """Times a sequence took it since it was last free."""
        self.last_use = 0
        """Number of the pool's releases when its last user let it go."""
        self.owner: BlockList | None = None
        """The list it is linked in."""
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def state(self) -> BlockState:
        """Derived from the references alone."""
        if self.references == 0:
            return BlockState.FREE
        if self.references == 1 and self.in_tree:
            return BlockState.CACHED
        return BlockState.USED


class BlockList:
    """A doubly linked list threaded through the blocks themselves.

    Why not a deque or a dict: a cached block that is hit leaves the middle of the LRU order, and
    that must cost O(1) and allocate nothing.
    """

    __slots__ = ("_first", "_last", "_length")

    def __init__(self) -> None:
        self._first: Block | None = None
        self._last: Block | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        """Yield first to last; the list must not change meanwhile."""
        block = self._first
        while block is not None:
            yield block
            block = block.next

    def push_first(self, block: Block) -> None:
        """Link an unlinked block before all others."""
        self._adopt(block)
        block.next = self._first
        if self._first is None:
            self._last = block
        else:
            self._first.previous = block
        self._first = block

    def push_last(self, block: Block) -> None:
        """Link an unlinked block after all others."""
        self._adopt(block)
        block.previous = self._last
        if self._last is None:
            self._first = block
        else:
            self._last.next = block
        self._last = block

    def pop_first(self) -> Block:
        """Unlink and return the first block.

        Raises:
            InvariantError: the list is empty.
        """
        if self._first is None:
            raise InvariantError("a block was taken from an empty list")
        block = self._first
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Unlink a block of this list.

        Raises:
            InvariantError: the block is not linked in this list.
        """
        if block.owner is not self:
            raise InvariantError(f"block {block.block_id} is not in the list it is removed from")
        if block.previous is None:
            self._first = block.next
        else:
            block.previous.next = block.next
        if block.next is None:
            self._last = block.previous
        else:
            block.next.previous = block.previous
        block.owner = block.previous = block.next = None
        self._length -= 1

    def _adopt(self, block: Block) -> None:
        if block.owner is not None:
            raise InvariantError(f"block {block.block_id} is in a list already")
        block.owner = self
        self._length += 1
