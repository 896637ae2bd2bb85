"""Which cached blocks the waiting requests will hit."""

from collections.abc import Iterator

from octavo.core.ids import BlockId, SequenceId


class Expectations:
    """The deepest block that each waiting sequence will hit.

    One block is enough: those before it are no leaves while it is cached. The order is that in
    which the sequences began to wait.
    """

    def __init__(self) -> None:
        self._blocks: dict[SequenceId, BlockId] = {}
        self._waiting: dict[BlockId, dict[SequenceId, None]] = {}

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._waiting

    @property
    def sequence_ids(self) -> Iterator[SequenceId]:
        """Who waits for a block."""
        return iter(self._blocks)

    def since(self, block_id: BlockId) -> SequenceId:
        """Return who waits longest for the block; somebody does."""
        return next(iter(self._waiting[block_id]))

    def expect(self, sequence_id: SequenceId, block_id: BlockId) -> None:
        """Note that a sequence will hit the block, and those before it."""
        self._blocks[sequence_id] = block_id
        self._waiting.setdefault(block_id, {})[sequence_id] = None

    def settle(self, sequence_id: SequenceId) -> BlockId | None:
        """Forget a sequence; return its block if nobody else waits for that one."""
        block_id = self._blocks.pop(sequence_id, None)
        if block_id is None:
            return None
        del self._waiting[block_id][sequence_id]
        if self._waiting[block_id]:
            return None
        del self._waiting[block_id]
        return block_id

    def move(self, block_id: BlockId, parent: BlockId | None) -> None:
        """Let those who waited for a block that is lost wait for the one before it."""
        for sequence_id in self._waiting.pop(block_id, {}):
            del self._blocks[sequence_id]
            if parent is not None:
                self.expect(sequence_id, parent)
