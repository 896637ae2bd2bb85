"""The README's worked example, block numbers included."""

from octavo.core.config import CacheConfig
from octavo.core.ids import BlockId, SequenceId
from octavo.core.plan import BlockCopy
from octavo.core.request import CacheIdentity
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")
A, B, C, D = (SequenceId(number) for number in range(4))
TEXTS = {A: "abcdefghij", B: "abcdefxyz", C: "mnopqrstuvwxyz01", D: "abcd!"}


def test_the_readme_tells_what_happens():
    """Any change of allocation order, hits, splits or eviction order shows here first."""
    manager = KVCacheManager(CacheConfig(num_blocks=6, block_size=4))

    def admit(sequence):
        tokens = [ord(letter) for letter in TEXTS[sequence]]
        hit = manager.match(IDENTITY, tokens)
        assert manager.admit(sequence, hit, len(tokens))
        return hit.num_tokens

    def compute(sequence):
        tokens = [ord(letter) for letter in TEXTS[sequence]]
        manager.commit(sequence, tokens, len(tokens))

    def state():
        check_cache(manager)
        return (
            {number: table.block_ids for number, table in manager.tables.items()},
            sorted(node.block_ids for node in manager.tree.nodes() if node.block_ids),
            [block.block_id for block in manager.pool.free_blocks()],
            [block.block_id for block in manager.pool.cached_blocks()],
        )

    assert admit(A) == 0
    assert state() == ({A: [0, 1, 2]}, [], [3, 4, 5], [])
    compute(A)
    assert state() == ({A: [0, 1, 2]}, [[0, 1]], [3, 4, 5], [])
    assert admit(B) == 6
    assert manager.take_copies() == (BlockCopy(BlockId(1), BlockId(3)),)
    assert state() == ({A: [0, 1, 2], B: [0, 3, 4]}, [[0, 1]], [5], [])
    compute(B)
    assert state() == ({A: [0, 1, 2], B: [0, 3, 4]}, [[0], [1], [3]], [5], [])
    manager.free(A)
    assert state() == ({B: [0, 3, 4]}, [[0], [1], [3]], [2, 5], [1])
    manager.free(B)
    assert state() == ({}, [[0], [1], [3]], [4, 2, 5], [1, 3, 0])
    assert admit(C) == 0
    assert state() == ({C: [4, 2, 5, 1]}, [[0, 3]], [], [3, 0])
    assert admit(D) == 4
    assert state() == ({C: [4, 2, 5, 1], D: [0, 3]}, [[0]], [], [])
    assert manager.evictions_total == 2
