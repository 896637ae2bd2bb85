"""What requests asked for the blocks that they used: priority, and for how long."""

import heapq

from octavo.core.ids import BlockId
from octavo.core.request import DEFAULT_RETENTION_PRIORITY, Retention


class BlockRetention:
    """Priorities of the blocks that do not have the default one.

    Of several wishes for a block the highest counts, so a one-off document of low priority does
    not drag down the system prompt that it shares. A wish runs out ``ttl_s`` after its last use.
    """

    def __init__(self) -> None:
        self._wishes: dict[BlockId, tuple[int, float | None]] = {}
        self._expiries: list[tuple[float, BlockId]] = []

    def note(self, block_id: BlockId, wish: Retention, now: float, *, is_new: bool) -> None:
        """Take in what the user of a block asked for; ``is_new``: nobody had it before."""
        held, expiry = self._wishes.get(block_id, (DEFAULT_RETENTION_PRIORITY, None))
        if not is_new and wish.priority < held:
            return
        if wish.priority == DEFAULT_RETENTION_PRIORITY:
            self._wishes.pop(block_id, None)
            return
        new_expiry = None if wish.ttl_s is None else now + wish.ttl_s
        if wish.priority == held and block_id in self._wishes:
            new_expiry = (
                None if None in (expiry, new_expiry) else max(expiry or 0.0, new_expiry or 0.0)
            )
        self._wishes[block_id] = (wish.priority, new_expiry)
        if new_expiry is not None:
            heapq.heappush(self._expiries, (new_expiry, block_id))

    def priority(self, block_id: BlockId) -> int:
        """Return the priority that holds now."""
        wish = self._wishes.get(block_id)
        return DEFAULT_RETENTION_PRIORITY if wish is None else wish[0]

    def forget(self, block_id: BlockId) -> None:
        """Drop what was asked for a block that leaves the cache."""
        self._wishes.pop(block_id, None)

    def expire(self, now: float) -> list[BlockId]:
        """Drop the wishes that have run out, and return their blocks."""
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            time, block_id = heapq.heappop(self._expiries)
            wish = self._wishes.get(block_id)
            if wish is not None and wish[1] == time:
                del self._wishes[block_id]
                expired.append(block_id)
        return expired
