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

    ``allocated = stored + pending + reserved + internal``; a block that several sequences share
    counts once.
    """

    num_total: int
    num_allocated: int
    """In blocks of running sequences."""
    num_stored: int
    """Of these, holding the KV of a token."""
    num_pending: int
    """Of these, waiting for the KV of a token that is known: a prefill is under way."""
    num_reserved: int
    """Of these, empty: for a token that the sequence may still generate."""
    num_internal: int
    """Of these, never to be filled: past the longest that the sequence can become."""
    num_external: int
    """Free, but in runs too short for the sequence that is next in line (contiguous only)."""

    @property
    def waste_ratio(self) -> float:
        """Share of the allocated slots that belong to no token, 0 to 1; 0 with nothing allocated.

        Those of a prefill under way do belong to one. What is external is not allocated.
        """
        wasted = self.num_reserved + self.num_internal
        return wasted / self.num_allocated if self.num_allocated else 0.0


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
    full = (size, size, size)
    # How far each block is filled: with KV, with known tokens, and at most in the end.
    blocks: dict[BlockId, tuple[int, ...]] = {}
    for sequence in running:
        computed = sequence.num_computed
        final = max(final_num_slots(sequence), computed)
        known = max(min(sequence.num_tokens, final), computed)
        for index, block_id in enumerate(cache.tables[sequence.sequence_id].block_ids):
            start = index * size
            filled: tuple[int, ...] = full
            if start + size > computed:
                filled = tuple(min(max(end - start, 0), size) for end in (computed, known, final))
            shared = blocks.get(block_id, filled)
            blocks[block_id] = filled if shared is filled else tuple(map(max, shared, filled))
    columns = zip((0, 0, 0), *blocks.values(), strict=True)
    num_stored, num_known, num_final = map(sum, columns)
    num_allocated = len(blocks) * size
    return KVOccupancy(
        num_total=cache.config.num_blocks * size,
        num_allocated=num_allocated,
        num_stored=num_stored,
        num_pending=num_known - num_stored,
        num_reserved=num_final - num_known,
        num_internal=num_allocated - num_final,
        num_external=_num_external(cache, -(-next_num_slots // size)) * size,
    )


def _num_external(cache: KVCacheManager, num_wanted: int) -> int:
    if not cache.config.is_contiguous:
        return 0
    runs = free_runs(cache.tables.values(), cache.config.num_blocks)
    return sum(len(run) for run in runs if len(run) < num_wanted)
