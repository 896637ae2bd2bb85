"""The manager: all or nothing, whole blocks, swaps of duplicates, and no leak."""

import pytest

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError
from octavo.core.ids import SequenceId
from octavo.core.request import CacheIdentity
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")
A, B, C = SequenceId(0), SequenceId(1), SequenceId(2)


@pytest.fixture
def manager():
    """Six blocks of four slots; every test ends by checking all laws."""
    manager = KVCacheManager(CacheConfig(num_blocks=6, block_size=4))
    yield manager
    check_cache(manager)


def admit(manager, sequence, tokens):
    """Admit with whatever is cached; return the hit's tokens, or None if it does not fit."""
    hit = manager.match(IDENTITY, tokens)
    return hit.num_tokens if manager.admit(sequence, hit, len(tokens)) else None


@pytest.mark.parametrize(
    ("length", "whole", "expected"), [(7, 4, 4), (8, 4, 7), (9, 8, 8), (4, 0, 3), (1, 0, 0)]
)
def test_at_least_one_token_is_recomputed(manager, length, whole, expected):
    """KV-01: the hit never covers the last token of the prompt, in whole blocks or to the token."""
    tokens = list(range(length))
    assert admit(manager, A, tokens) == 0
    manager.commit(A, tokens, length)
    manager.free(A)
    assert manager.match(IDENTITY, tokens).num_tokens == expected
    assert manager.match(IDENTITY, tokens, whole_blocks=True).num_tokens == whole
    assert manager.match(IDENTITY, [*tokens, 99]).num_tokens == length // 4 * 4


def test_only_computed_full_blocks_are_cached(manager):
    """A block is never shared before all its KV is there: commit rounds down."""
    tokens = list(range(12))
    admit(manager, A, tokens)
    manager.commit(A, tokens, 7)
    assert manager.match(IDENTITY, tokens).num_tokens == 4
    manager.commit(A, tokens, 8)
    assert manager.match(IDENTITY, tokens).num_tokens == 8
    manager.free(A)
    assert manager.usage().num_cached == 2


def test_admission_is_all_or_nothing(manager):
    """KV-17: with k blocks left and k + 1 needed nothing is taken, and no prefix stays locked."""
    shared = list(range(8))
    admit(manager, A, [*shared, 50])
    manager.commit(A, [*shared, 50], 9)
    manager.free(A)
    admit(manager, B, list(range(100, 112)))
    before = manager.usage()
    order = [block.block_id for block in manager.pool.cached_blocks()]
    for _ in range(3):
        assert admit(manager, C, [*shared, *range(200, 209)]) is None
    assert manager.usage() == before
    assert [block.block_id for block in manager.pool.cached_blocks()] == order
    assert C not in manager.tables


def test_a_hit_counts_no_block_twice(manager):
    """Blocks of the hit that are cached cannot also be evicted to make room for its rest."""
    tokens = list(range(20))
    admit(manager, A, tokens)
    manager.commit(A, tokens, 20)
    manager.free(A)
    need = manager.need(manager.match(IDENTITY, [*tokens, 1]), 28)
    assert (need.num_new, need.num_available) == (2, 1)
    assert not manager.admit(B, manager.match(IDENTITY, [*tokens, 1]), 28)


def test_extension_is_all_or_nothing_and_keeps_what_fits(manager):
    """KV-17: a failed extension changes nothing; one that fits the last block takes none."""
    admit(manager, A, [1] * 5)
    admit(manager, B, [2] * 13)
    assert manager.extend(A, 8, 5)
    assert manager.usage().num_used == 6
    assert not manager.extend(A, 9, 5)
    assert manager.usage().num_used == 6
    assert len(manager.tables[A].block_ids) == 2


def test_a_duplicate_is_swapped_for_the_trees_block(manager):
    """KV-11: of two blocks computed at once the tree's gets both references, the other is freed."""
    tokens = list(range(9))
    admit(manager, A, tokens)
    admit(manager, B, tokens)
    assert manager.take_changes(A) == (0, (0, 1, 2))
    assert manager.take_changes(B) == (0, (3, 4, 5))
    manager.commit(A, tokens, 9)
    manager.commit(B, tokens, 9)
    assert manager.tables[B].block_ids == [0, 1, 5]
    assert manager.take_changes(B) == (0, (0, 1, 5))
    assert manager.take_changes(B) == (3, ())
    assert manager.usage().num_free == 2
    check_cache(manager)
    manager.free(A)
    check_cache(manager)
    assert not manager.pool.is_cached(0)
    manager.free(B)
    assert manager.usage().num_cached == 2


def test_a_swap_in_the_middle_reports_from_there_on(manager):
    """The runner is told of the first changed entry, not only of appended ones."""
    tokens = list(range(12))
    admit(manager, A, tokens)
    manager.commit(A, tokens, 4)
    admit(manager, B, tokens)
    manager.take_changes(B)
    manager.commit(A, tokens, 8)
    manager.commit(B, tokens, 8)
    first, block_ids = manager.take_changes(B)
    assert first == 1
    assert block_ids[0] == manager.tables[A].block_ids[1]


def test_a_second_free_is_an_explicit_error(manager):
    """KV-03: freeing twice is refused before it reaches the pool."""
    admit(manager, A, [1, 2, 3])
    manager.free(A)
    before = manager.usage()
    with pytest.raises(InvariantError, match="holds no blocks"):
        manager.free(A)
    assert manager.usage() == before


def test_a_stale_hit_is_refused(manager):
    """KV-14: a hit is only good until the tree changes; then it must be looked up again."""
    tokens = list(range(9))
    admit(manager, A, tokens)
    manager.commit(A, tokens, 9)
    manager.free(A)
    hit = manager.match(IDENTITY, tokens)
    admit(manager, B, list(range(100, 124)))
    manager.free(B)
    with pytest.raises(InvariantError, match="stale"):
        manager.admit(C, hit, 9)


def test_admitting_twice_is_refused(manager):
    """A second table would leak the first one's blocks."""
    admit(manager, A, [1])
    with pytest.raises(InvariantError, match="admitted twice"):
        manager.admit(A, manager.match(IDENTITY, [1]), 1)


def test_other_identities_never_hit(manager):
    """KV-05: any differing field of the identity is another cache."""
    tokens = list(range(9))
    admit(manager, A, tokens)
    manager.commit(A, tokens, 9)
    for field in ("model", "tokenizer", "kv_dtype", "adapter", "tenant", "salt"):
        other = {"model": "m", "tokenizer": "t", "kv_dtype": "f", field: "X"}
        assert manager.match(CacheIdentity(**other), tokens).num_tokens == 0


def test_a_constant_digest_never_gives_a_wrong_hit():
    """KV-08: with every hash equal, hits still compare tokens."""
    manager = KVCacheManager(CacheConfig(num_blocks=6, block_size=2), digest=lambda data: b"")
    admit(manager, A, [1, 2, 3, 4, 5])
    manager.commit(A, [1, 2, 3, 4, 5], 5)
    manager.free(A)
    assert manager.match(IDENTITY, [1, 2, 3, 4, 9]).num_tokens == 4
    assert manager.match(IDENTITY, [1, 2, 9, 9, 9]).num_tokens == 2
    assert manager.match(IDENTITY, [3, 4, 1, 2, 9]).num_tokens == 0
    admit(manager, B, [3, 4, 1, 2, 9])
    manager.commit(B, [3, 4, 1, 2, 9], 5)
    check_cache(manager)
    assert manager.match(IDENTITY, [3, 4, 1, 2, 9]).num_tokens == 4


def test_without_prefix_caching_nothing_is_kept():
    """The setting turns reading and writing off; freed blocks are free at once."""
    config = CacheConfig(num_blocks=6, block_size=2, enable_prefix_caching=False)
    manager = KVCacheManager(config)
    admit(manager, A, [1, 2, 3, 4])
    manager.commit(A, [1, 2, 3, 4], 4)
    assert manager.match(IDENTITY, [1, 2, 3]).num_tokens == 0
    manager.free(A)
    assert manager.usage().num_free == 6


def test_reset_forgets_everything_or_nothing(manager):
    """Reset is refused while blocks are in use, and leaves no namespace behind otherwise."""
    tokens = list(range(9))
    admit(manager, A, tokens)
    manager.commit(A, tokens, 9)
    assert not manager.reset()
    assert manager.match(IDENTITY, tokens).num_tokens == 8
    manager.free(A)
    assert manager.reset()
    assert manager.usage().num_free == 6
    assert manager.match(IDENTITY, tokens).num_tokens == 0


def test_many_times_the_pool_passes_through_it(manager):
    """KV-12: prompts of ten times the pool all fit one after another, by eviction."""
    for number in range(20):
        tokens = [number * 100 + index for index in range(12)]
        assert admit(manager, SequenceId(number), tokens) == 0
        manager.commit(SequenceId(number), tokens, 12)
        manager.free(SequenceId(number))
    usage = manager.usage()
    assert usage.num_free + usage.num_cached == 6
    assert manager.evictions_total > 0
