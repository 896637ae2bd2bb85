"""Which cached blocks the waiting requests will hit, as blocks are computed and evicted."""

from collections.abc import Iterable, Sequence

from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.request import CacheIdentity

Place = BlockId | CacheIdentity
"""What a block follows: a cached block, or in a namespace nothing."""

Chunk = tuple[TokenId, ...]
"""The tokens of one whole block."""


class Waiter:
    """A sequence that waits, and how far its prompt is cached. To be read only."""

    __slots__ = ("chunk", "depth", "identity", "place", "sequence_id", "token_ids")

    def __init__(
        self, sequence_id: SequenceId, identity: CacheIdentity, token_ids: Sequence[TokenId]
    ) -> None:
        self.sequence_id = sequence_id
        self.identity = identity
        self.token_ids = token_ids
        self.place: Place = identity
        """The last whole block that it will hit, or its namespace if it will hit none."""
        self.depth = 0
        """Whole blocks that it will hit."""
        self.chunk: Chunk = ()
        """The block that it lacks next; empty where it lacks none that could be hit."""

    @property
    def block_id(self) -> BlockId | None:
        """The last whole block that it will hit."""
        return None if isinstance(self.place, CacheIdentity) else self.place


class Expectations:
    """How far the prompt of each waiting sequence is cached.

    Of what a sequence will hit the last block is enough: in a tree, those before it are no leaves
    while it is cached. Sequences are filed under that block and under the one that they lack next.
    So a block that is computed or lost is looked up once, and concerns only those who move.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._waiters: dict[SequenceId, Waiter] = {}
        self._files: dict[Place, dict[Chunk, dict[SequenceId, Waiter]]] = {}

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._files

    @property
    def waiters(self) -> Iterable[Waiter]:
        """All who wait, also those who will hit nothing so far."""
        return self._waiters.values()

    def first(self, block_id: BlockId) -> SequenceId:
        """Return who came first of those who will hit the block; somebody does. Ids grow."""
        return min(min(waiters) for waiters in self._files[block_id].values())

    def expect(
        self,
        sequence_id: SequenceId,
        identity: CacheIdentity,
        token_ids: Sequence[TokenId],
        block_ids: Sequence[BlockId],
    ) -> None:
        """Note that a sequence waits, and the whole blocks that it would hit now.

        Its tokens must not change until it is settled.
        """
        waiter = self._waiters[sequence_id] = Waiter(sequence_id, identity, token_ids)
        self._file(waiter, block_ids[-1] if block_ids else identity, len(block_ids))

    def settle(self, sequence_id: SequenceId) -> BlockId | None:
        """Forget a sequence, if it waits; return the last block that it would have hit."""
        waiter = self._waiters.pop(sequence_id, None)
        if waiter is None:
            return None
        waiters = self._files[waiter.place][waiter.chunk]
        del waiters[sequence_id]
        if not waiters:
            self._take(waiter.place, waiter.chunk)
        return waiter.block_id

    def computed(self, place: Place, chunk: Chunk, block_id: BlockId) -> None:
        """Let those who lack the chunk after a place expect the block that now holds it."""
        if chunk in self._files.get(place, ()):
            for waiter in self._take(place, chunk):
                self._file(waiter, block_id, waiter.depth + 1)

    def lost(self, block_id: BlockId, parent: BlockId | None) -> None:
        """Let those who expected a block expect the one before it, and lack this one."""
        for waiters in self._files.pop(block_id, {}).values():
            for waiter in waiters.values():
                place = waiter.identity if parent is None else parent
                self._file(waiter, place, waiter.depth - 1)

    def _take(self, place: Place, chunk: Chunk) -> Iterable[Waiter]:
        followers = self._files[place]
        waiters = followers.pop(chunk)
        if not followers:
            del self._files[place]
        return waiters.values()

    def _file(self, waiter: Waiter, place: Place, depth: int) -> None:
        start = depth * self._block_size
        end = start + self._block_size
        can_hit = end < len(waiter.token_ids)  # the last token is never hit
        waiter.place, waiter.depth = place, depth
        waiter.chunk = tuple(waiter.token_ids[start:end]) if can_hit else ()
        followers = self._files.setdefault(place, {})
        followers.setdefault(waiter.chunk, {})[waiter.sequence_id] = waiter
