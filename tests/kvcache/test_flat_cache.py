"""The flat hash-chain cache: duplicates stay, holes heal, and a hit is as long as the tree's."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError, SettingError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.request import CacheIdentity
from octavo.kvcache.flat_cache import FlatCache, check_flat_cache
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.keys import blake2b
from octavo.kvcache.manager import KVCacheManager

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")
OTHER = CacheIdentity(model="m", tokenizer="t", kv_dtype="f", tenant="other")
SIZE = 2


def insert(cache, tokens, blocks, identity=IDENTITY):
    """Insert a prefix of whole blocks under the given ids."""
    parent = None
    for index, block in enumerate(blocks):
        chunk = tuple(tokens[index * SIZE : (index + 1) * SIZE])
        assert cache.insert(identity, parent, chunk, BlockId(block)) == block
        parent = BlockId(block)
    check_flat_cache(cache, SIZE)


@pytest.mark.parametrize("digest", [blake2b, lambda data: b"same"])
def test_a_hit_is_verified_and_stays_in_its_namespace(digest):
    """Turns red if a colliding digest, another tenant or another place gives a wrong hit."""
    cache = FlatCache(SIZE, digest)
    insert(cache, [1, 2, 3, 4], [0, 1])
    insert(cache, [3, 4], [2])
    assert cache.match(IDENTITY, [1, 2, 3, 4, 5], 2) == (0, 1)
    assert cache.match(IDENTITY, [1, 2, 3, 4, 5], 1) == (0,)
    assert cache.match(IDENTITY, [3, 4, 3, 4], 2) == (2,)
    assert cache.match(IDENTITY, [9, 9, 3, 4], 2) == ()
    assert cache.match(OTHER, [1, 2, 3, 4], 2) == ()


def test_equal_blocks_are_kept_twice():
    """vLLM does not deduplicate: turns red if a second block of a prefix is swapped or lost."""
    cache = FlatCache(SIZE)
    insert(cache, [1, 2, 3, 4], [0, 1])
    insert(cache, [1, 2, 3, 4], [2, 3])
    assert len(cache) == 4
    cache.remove(BlockId(0))
    assert cache.match(IDENTITY, [1, 2, 3, 4], 2) == (2, 1)


def test_what_follows_a_hole_is_found_again():
    """A block whose parent was evicted is out of reach, and in reach once that is computed."""
    cache = FlatCache(SIZE)
    insert(cache, [1, 2, 3, 4, 5, 6], [0, 1, 2])
    assert cache.is_leaf(BlockId(0))
    cache.remove(BlockId(0))
    check_flat_cache(cache, SIZE)
    assert cache.match(IDENTITY, [1, 2, 3, 4, 5, 6], 3) == ()
    insert(cache, [1, 2], [7])
    assert cache.match(IDENTITY, [1, 2, 3, 4, 5, 6], 3) == (7, 1, 2)
    for block in (7, 1, 2):
        cache.remove(BlockId(block))
        check_flat_cache(cache, SIZE)
    assert len(cache) == 0
    assert not list(cache.prefixes()), "entries of forgotten blocks are left behind"


def test_places_are_told():
    """Turns red if eviction policies are told a wrong depth or key."""
    cache = FlatCache(SIZE)
    insert(cache, [1, 2, 3, 4], [5, 6])
    assert (cache.depth(BlockId(5)), cache.depth(BlockId(6))) == (0, 1)
    assert cache.path_keys(BlockId(6)) == (cache.key(BlockId(5)), cache.key(BlockId(6)))


def test_misuse_is_told():
    """Turns red if a bug in the manager corrupts the cache silently."""
    cache = FlatCache(SIZE)
    insert(cache, [1, 2], [0])
    with pytest.raises(InvariantError, match="in the cache already"):
        cache.insert(IDENTITY, None, (3, 4), BlockId(0))
    with pytest.raises(InvariantError, match="not a cached block"):
        cache.insert(IDENTITY, BlockId(9), (3, 4), BlockId(1))
    with pytest.raises(InvariantError, match="not a cached block"):
        cache.insert(OTHER, BlockId(0), (3, 4), BlockId(1))
    with pytest.raises(InvariantError, match="not in it"):
        cache.remove(BlockId(9))


@pytest.mark.parametrize("breach", ["depth", "num_children", "chunk", "block_ids"])
def test_the_check_notices(breach):
    """Turns red if the invariant check of the flat cache cannot fail."""
    cache = FlatCache(SIZE)
    insert(cache, [1, 2, 3, 4], [0, 1])
    last = next(prefix for prefix in cache.prefixes() if prefix.depth)
    damage = {"depth": 5, "num_children": 1, "chunk": (1,), "block_ids": []}
    setattr(last, breach, damage[breach])
    with pytest.raises(InvariantError):
        check_flat_cache(cache, SIZE)


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8)


@settings(max_examples=150, deadline=None)
@given(prompts=prompts, size=st.integers(1, 3), weak=st.booleans())
def test_hits_are_as_long_as_the_trees(prompts, size, weak):
    """With room for all, flat and radix find the same prefix of any prompt."""
    digest = (lambda data: b"same") if weak else blake2b
    kinds = {
        kind: KVCacheManager(CacheConfig(200, size, prefix_cache=kind), digest=digest)
        for kind in ("radix", "flat")
    }
    for index, prompt in enumerate(prompts):
        found = set()
        for manager in kinds.values():
            hit = manager.match(IDENTITY, prompt, whole_blocks=True)
            found.add(hit.num_tokens)
            assert manager.admit(SequenceId(index), hit, len(prompt))
            manager.commit(SequenceId(index), prompt, len(prompt))
            if index % 2:
                manager.free(SequenceId(index))
            check_cache(manager)
        assert len(found) == 1, f"{prompt} hits {found} tokens"


def test_a_kind_of_ones_own_can_be_named():
    """Turns red if ``module:Class`` is made without the block size, or a typo starts anyway."""
    own = CacheConfig(4, SIZE, prefix_cache="octavo.kvcache.flat_cache:FlatCache")
    assert isinstance(KVCacheManager(own).tree, FlatCache)
    with pytest.raises(SettingError, match="--prefix-cache must be one of radix, flat"):
        KVCacheManager(CacheConfig(4, SIZE, prefix_cache="hash"))
