"""The block pool: O(1) moves between three states, and no double free."""

import pytest

from octavo.core.errors import InvariantError
from octavo.kvcache.block import Block, BlockList, BlockState
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.invariants import check_pool


@pytest.fixture
def pool():
    """A pool of four blocks; every test ends by checking its laws."""
    pool = BlockPool(4)
    yield pool
    check_pool(pool)


def states(pool):
    """Return (free, cached, used)."""
    usage = pool.usage()
    return usage.num_free, usage.num_cached, usage.num_used


def test_blocks_come_in_order_and_return_last_in_first_out(pool):
    """Fresh blocks come by id and the last freed one is reused first: a FIFO would be red."""
    first, second = pool.allocate(), pool.allocate()
    assert (first, second) == (0, 1)
    pool.release(second)
    pool.release(first)
    assert [pool.allocate(), pool.allocate(), pool.allocate()] == [0, 1, 2]


def test_a_block_walks_through_its_states(pool):
    """used -> used and kept -> cached -> used -> cached -> free, one state at a time."""
    block = pool.allocate()
    assert states(pool) == (3, 0, 1)
    pool.keep(block)
    assert states(pool) == (3, 0, 1)
    pool.release(block)
    assert states(pool) == (3, 1, 0)
    assert pool.is_cached(block)
    pool.acquire(block)
    assert states(pool) == (3, 0, 1)
    pool.release(block)
    pool.forget(block)
    assert states(pool) == (4, 0, 0)


def test_a_shared_block_stays_used_until_its_last_user_leaves(pool):
    """References count users one by one; losing count frees a live block."""
    block = pool.allocate()
    pool.keep(block)
    pool.acquire(block)
    pool.release(block)
    assert states(pool) == (3, 0, 1)
    pool.release(block)
    assert states(pool) == (3, 1, 0)


def test_cached_blocks_are_ordered_by_release(pool):
    """A hit takes a block out of the middle of the LRU order and its release puts it last."""
    blocks = [pool.allocate() for _ in range(3)]
    for block in blocks:
        pool.keep(block)
        pool.release(block)
    pool.acquire(blocks[1])
    pool.release(blocks[1])
    assert [block.block_id for block in pool.cached_blocks()] == [0, 2, 1]


@pytest.mark.parametrize("kept", [False, True])
def test_double_free_is_an_error_and_changes_nothing(pool, kept):
    """KV-03: a second release never pushes a block on a list twice, cached or free."""
    block = pool.allocate()
    if kept:
        pool.keep(block)
    pool.release(block)
    before = states(pool)
    with pytest.raises(InvariantError, match="freed twice"):
        pool.release(block)
    assert states(pool) == before


def test_the_pool_refuses_moves_that_only_a_bug_makes(pool):
    """Acquiring a free block, keeping twice, and evicting a used one are errors."""
    with pytest.raises(InvariantError, match="while free"):
        pool.acquire(0)
    with pytest.raises(InvariantError, match="cannot enter"):
        pool.keep(0)
    block = pool.allocate()
    pool.keep(block)
    with pytest.raises(InvariantError, match="cannot enter"):
        pool.keep(block)
    with pytest.raises(InvariantError, match="evicted while used"):
        pool.forget(block)


def test_an_empty_pool_raises(pool):
    """Allocation never hands out a block twice when none is left."""
    for _ in range(4):
        pool.allocate()
    with pytest.raises(InvariantError, match="empty list"):
        pool.allocate()


def test_a_list_knows_its_own_blocks():
    """A block in one list can neither enter another nor leave a list it is not in."""
    one, other = BlockList(), BlockList()
    block = Block(0)
    one.push_last(block)
    with pytest.raises(InvariantError, match="in a list already"):
        other.push_first(block)
    with pytest.raises(InvariantError, match="not in the list"):
        other.remove(block)
    assert block.state is BlockState.FREE


def test_used_ratio_counts_blocks_in_tables_only(pool):
    """Cached blocks do not count as used, or a warm server would look full."""
    pool.allocate()
    kept = pool.allocate()
    pool.keep(kept)
    pool.release(kept)
    assert pool.usage().used_ratio == 0.25
