"""What requests asked for the blocks that they used: priority, and for how long."""

import heapq
from collections.abc import Sequence
from typing import Final

from octavo.core.ids import BlockId
from octavo.core.request import DEFAULT_RETENTION_PRIORITY, Retention

_NEVER: Final = float("inf")


class BlockRetention:
    """Priorities of the blocks that do not have the default one.

    Of several wishes for a block the highest counts, so a one-off document of low priority does
    not drag down the system prompt that it shares. A wish runs out ``ttl_s`` after its last use.
    """

    def __init__(self) -> None:
        self._wishes: dict[BlockId, tuple[int, float]] = {}
        self._expiries: list[tuple[float, BlockId]] = []
        self._scheduled: dict[BlockId, float] = {}
        """When each block is looked at next; one that is renewed is not looked at more often."""

    def note(self, block_ids: Sequence[BlockId], num_old: int, wish: Retention, now: float) -> None:
        """Take in what a user of blocks asked for; the first ``num_old`` had users before."""
        if wish.priority == DEFAULT_RETENTION_PRIORITY and not self._wishes:
            return
        expiry = _NEVER if wish.ttl_s is None else now + wish.ttl_s
        for index, block_id in enumerate(block_ids):
            self._note(block_id, wish.priority, expiry, is_old=index < num_old)

    def _note(self, block_id: BlockId, priority: int, expiry: float, *, is_old: bool) -> None:
        held, held_until = self._wishes.get(block_id, (DEFAULT_RETENTION_PRIORITY, _NEVER))
        if is_old and priority < held:
            return
        if priority == DEFAULT_RETENTION_PRIORITY:
            self._wishes.pop(block_id, None)
            return
        if priority == held:
            expiry = max(expiry, held_until)
        self._wishes[block_id] = (priority, expiry)
        self._schedule(block_id, expiry)

    def _schedule(self, block_id: BlockId, expiry: float) -> None:
        if expiry < self._scheduled.get(block_id, _NEVER):
            self._scheduled[block_id] = expiry
            heapq.heappush(self._expiries, (expiry, block_id))
            if len(self._expiries) > 2 * len(self._scheduled) + 64:  # superseded ones piled up
                self._expiries = [(time, block) for block, time in self._scheduled.items()]
                heapq.heapify(self._expiries)

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
            if self._scheduled.get(block_id) != time:
                continue  # it was looked at earlier
            del self._scheduled[block_id]
            _, expiry = self._wishes.get(block_id, (0, _NEVER))
            if expiry <= now:
                del self._wishes[block_id]
                expired.append(block_id)
            else:
                self._schedule(block_id, expiry)
        return expired
