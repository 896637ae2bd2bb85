"""Contiguous reservation: each sequence in one run of consecutive blocks of the pool.

What serving systems did before paging (FasterTransformer, Orca). The runs are first-fit over the
same pool of blocks that paging uses, so both are compared at equal memory and granularity, and
holes that are too short for anyone (external fragmentation) come about as they did there.
"""

from collections.abc import Iterable

from octavo.core.errors import InvariantError
from octavo.kvcache.block_table import BlockTable


def free_runs(tables: Iterable[BlockTable], num_blocks: int) -> list[range]:
    """Return the runs of free block ids between contiguous tables, in order.

    Derived from the tables, a few dozen at most, so there is no second record of what is free.
    """
    taken = sorted(
        (table.block_ids[0], len(table.block_ids)) for table in tables if table.block_ids
    )
    runs: list[range] = []
    start = 0
    for first, length in [*taken, (num_blocks, 0)]:
        if first > start:
            runs.append(range(start, first))
        start = first + length
    return runs


def first_fit(runs: Iterable[range], length: int) -> range | None:
    """Return the first ``length`` ids of the first run that has so many; None if none has."""
    for run in runs:
        if len(run) >= length:
            return run[:length]
    return None


def check_contiguous(tables: Iterable[BlockTable], num_blocks: int) -> None:
    """Every table is one run of the pool, and no two overlap.

    Raises:
        InvariantError: at the first breach.
    """
    end = 0
    for table in sorted(tables, key=lambda table: table.block_ids):
        first = table.block_ids[0]
        if table.block_ids != list(range(first, first + len(table.block_ids))):
            raise InvariantError(f"blocks {table.block_ids} are not one run")
        if first < end:
            raise InvariantError(f"blocks {table.block_ids} overlap those before {end}")
        end = first + len(table.block_ids)
    if end > num_blocks:
        raise InvariantError(f"a run ends at {end}, past the pool's {num_blocks} blocks")
