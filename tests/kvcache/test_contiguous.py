"""Contiguous runs: first fit, no overlap, and holes that nobody can use."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError, SettingError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.request import CacheIdentity
from octavo.kvcache.contiguous import check_contiguous, first_fit, free_runs
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")
SIZE = 4


def make(num_blocks=8):
    """Return a manager of contiguous runs."""
    config = CacheConfig(num_blocks, SIZE, enable_prefix_caching=False, kv_reservation="max")
    return KVCacheManager(config)


def admit(manager, sequence, num_blocks):
    """Take a run; return whether it was there."""
    hit = manager.match(IDENTITY, [1])
    assert not hit.block_ids
    return manager.admit(SequenceId(sequence), hit, num_blocks * SIZE)


def blocks(manager, sequence):
    """Return the run of a sequence."""
    return manager.tables[SequenceId(sequence)].block_ids


def test_the_first_run_that_fits_is_taken():
    """Turns red if placement is anything but first fit, from the start of the pool."""
    manager = make()
    for sequence, length in enumerate([2, 3, 1]):
        assert admit(manager, sequence, length)
    manager.free(SequenceId(0))
    manager.free(SequenceId(2))
    assert admit(manager, 3, 3)
    assert blocks(manager, 3) == [5, 6, 7], "three blocks do not fit the hole of two"
    assert admit(manager, 4, 1)
    assert blocks(manager, 4) == [0]
    check_cache(manager)


def test_holes_are_of_no_use():
    """External fragmentation: enough blocks are free, but no run; need says so beforehand."""
    manager = make()
    for sequence in range(4):
        assert admit(manager, sequence, 2)
    manager.free(SequenceId(0))
    manager.free(SequenceId(2))
    need = manager.need(manager.match(IDENTITY, [1]), 3 * SIZE)
    assert (need.num_new, need.num_available, manager.usage().num_free) == (3, 2, 4)
    before = manager.usage()
    assert not admit(manager, 4, 3)
    assert manager.usage() == before
    manager.free(SequenceId(1))
    assert admit(manager, 4, 6), "neighbouring holes become one"
    check_cache(manager)


def test_runs_are_not_shared():
    """Turns red if contiguous reservation starts with prefix caching, which it cannot honour."""
    with pytest.raises(SettingError, match="--no-enable-prefix-caching"):
        CacheConfig(8, kv_reservation="oracle")


@settings(max_examples=100, deadline=None)
@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 5)), max_size=30),
    num_blocks=st.integers(1, 9),
)
def test_runs_never_overlap(steps, num_blocks):
    """Any order of taking and freeing: runs are contiguous and apart; a run that fits is found."""
    manager = make(num_blocks)
    for frees, sequence, length in steps:
        if SequenceId(sequence) in manager.tables:
            if frees:
                manager.free(SequenceId(sequence))
        else:
            taken = {block for table in manager.tables.values() for block in table.block_ids}
            fits = any(
                not taken & set(range(start, start + length))
                for start in range(num_blocks - length + 1)
            )
            assert admit(manager, sequence, length) == fits
        check_cache(manager)


def test_no_run_of_no_length():
    """Turns red if a full pool has a run, or a run is cut too short."""
    assert free_runs([], 3) == [range(3)]
    assert first_fit([range(2), range(4, 8)], 3) == range(4, 7)
    assert first_fit([range(2)], 3) is None
    manager = make(2)
    assert admit(manager, 0, 2)
    assert free_runs(manager.tables.values(), 2) == []


@pytest.mark.parametrize("damaged", [[1, 3], [1, 0], [2, 3], [8, 9]])
def test_the_check_notices(damaged):
    """Turns red if the invariant check of runs cannot fail."""
    manager = make()
    for sequence in range(2):
        assert admit(manager, sequence, 2)
    check_contiguous(manager.tables.values(), 8)
    manager.tables[SequenceId(0)].block_ids[:] = [BlockId(block) for block in damaged]
    with pytest.raises(InvariantError):
        check_contiguous(manager.tables.values(), 8)
