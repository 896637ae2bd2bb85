"""How the KV memory is spent right now: tokens held, and the three kinds of waste."""

from collections.abc import Iterable
from dataclasses import dataclass

from octavo.core.ids import BlockId
from octavo.kvcache.contiguous import free_runs
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.reservation import final_num_slots
from octavo.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVOccupancy:
    """Token slots of the pool by what they are for (after figure 2 of the PagedAttention paper).

    ``allocated = stored + reserved + internal``; a block that several sequences share counts once.
    """

    num_total: int
    num_allocated: int
    """In blocks of running sequences."""
    num_stored: int
    """Of these, holding the KV of a token."""
    num_reserved: int
    """Of these, empty, but the sequence may still fill it."""
    num_internal: int
    """Of these, never to be filled: past the longest that the sequence can become."""
    num_external: int
    """Free, but in runs too short for the sequence that is next in line (contiguous only)."""

    @property
    def waste_ratio(self) -> float:
        """Share of the allocated slots that hold no token, 0 to 1; 0 with nothing allocated."""
        return 1.0 - self.num_stored / self.num_allocated if self.num_allocated else 0.0


def measure_occupancy(
    running: Iterable[Sequence], cache: KVCacheManager, next_num_slots: int
) -> KVOccupancy:
    """Count slots. Changes nothing; costs O(blocks in tables).

    Args:
        running: the sequences that hold blocks.
        cache: where they hold them.
        next_num_slots: what the next sequence in line would take; 0 if nobody waits.
    """
    size = cache.config.block_size
    stored: dict[BlockId, int] = {}
    fillable: dict[BlockId, int] = {}
    for sequence in running:
        final = max(final_num_slots(sequence), sequence.num_computed)
        for index, block_id in enumerate(cache.tables[sequence.sequence_id].block_ids):
            start = index * size
            num_stored = min(max(sequence.num_computed - start, 0), size)
            num_fillable = min(max(final - start, 0), size)
            stored[block_id] = max(stored.get(block_id, 0), num_stored)
            fillable[block_id] = max(fillable.get(block_id, 0), num_fillable)
    num_stored, num_fillable = sum(stored.values()), sum(fillable.values())
    num_allocated = len(stored) * size
    return KVOccupancy(
        num_total=cache.config.num_blocks * size,
        num_allocated=num_allocated,
        num_stored=num_stored,
        num_reserved=num_fillable - num_stored,
        num_internal=num_allocated - num_fillable,
        num_external=_num_external(cache, -(-next_num_slots // size)) * size,
    )


def _num_external(cache: KVCacheManager, num_wanted: int) -> int:
    if not cache.config.is_contiguous:
        return 0
    runs = free_runs(cache.tables.values(), cache.config.num_blocks)
    return sum(len(run) for run in runs if len(run) < num_wanted)
