"""Forks, copy-on-write and hits inside a block, as the cache's own bookkeeping."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.plan import BlockCopy
from octavo.core.request import CacheIdentity
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")
A, B, C = (SequenceId(number) for number in range(3))


def make(num_blocks: int = 8, block_size: int = 4, **settings: object) -> KVCacheManager:
    """Return an empty cache."""
    return KVCacheManager(CacheConfig(num_blocks, block_size, **settings))  # type: ignore[arg-type]


def start(manager: KVCacheManager, sequence: SequenceId, tokens: list[int]) -> int:
    """Admit and compute a sequence; return what it hit."""
    hit = manager.match(IDENTITY, tokens)
    assert manager.admit(sequence, hit, len(tokens))
    manager.commit(sequence, tokens, len(tokens))
    check_cache(manager)
    return hit.num_tokens


def test_a_fork_takes_no_block():
    """All blocks are shared, and each counts as many references as tables."""
    manager = make()
    start(manager, A, list(range(10)))
    manager.fork(A, B, 10)
    check_cache(manager)
    assert manager.usage().num_used == 3
    assert manager.tables[A].block_ids == manager.tables[B].block_ids
    assert manager.take_changes(B) == (0, (0, 1, 2))


def test_the_first_to_write_copies_and_the_last_does_not():
    """Whoever is left alone with a block writes in place."""
    manager = make()
    start(manager, A, list(range(10)))
    manager.fork(A, B, 10)
    manager.take_changes(A)
    assert manager.extend(A, 11, 10)
    assert manager.extend(B, 11, 10)
    assert manager.take_copies() == (BlockCopy(BlockId(2), BlockId(3)),)
    assert manager.take_copies() == ()
    assert manager.take_changes(A) == (2, (3,))
    assert (manager.tables[A].block_ids, manager.tables[B].block_ids) == ([0, 1, 3], [0, 1, 2])
    check_cache(manager)


def test_a_fork_at_the_end_of_a_block_copies_nothing():
    """Both begin a new block."""
    manager = make()
    start(manager, A, list(range(8)))
    manager.fork(A, B, 8)
    assert manager.extend(A, 9, 8)
    assert manager.extend(B, 9, 8)
    assert manager.take_copies() == ()
    assert manager.usage().num_used == 4


def test_room_beyond_what_is_computed_is_not_shared():
    """A fork gets the blocks of computed tokens only, so it never writes into another's room."""
    manager = make()
    start(manager, A, list(range(6)))
    assert manager.extend(A, 16, 6)
    manager.fork(A, B, 6)
    assert manager.tables[B].block_ids == manager.tables[A].block_ids[:2]


def test_a_copy_needs_a_block_and_changes_nothing_without_one():
    """KV-17: copy-on-write is all or nothing, together with the growth of the table."""
    manager = make(num_blocks=3)
    start(manager, A, list(range(6)))
    manager.fork(A, B, 6)
    assert not manager.extend(A, 9, 6)  # a copy and a new block, but one is free
    check_cache(manager)
    assert manager.take_copies() == ()
    assert manager.extend(A, 8, 6)
    assert not manager.extend(B, 9, 6)
    manager.free(A)
    assert manager.extend(B, 9, 6)
    check_cache(manager)


def test_a_copy_is_forgotten_with_the_sequence_that_wanted_it():
    """Preempted in the step that planned it: its block may be another's by the time of copying."""
    manager = make()
    start(manager, A, list(range(6)))
    manager.fork(A, B, 6)
    assert manager.extend(B, 7, 6)
    manager.free(B)
    assert manager.take_copies() == ()
    check_cache(manager)


def test_freeing_part_of_a_family_gives_back_only_its_own():
    """Preempting part of a group counts shared blocks once: two references, one block."""
    manager = make()
    start(manager, A, list(range(10)))
    for child in (B, C):
        manager.fork(A, child, 10)
        assert manager.extend(child, 13, 10)
    before = manager.usage().num_used
    manager.free(B)
    assert before - manager.usage().num_used == 2
    manager.free(A)
    manager.free(C)
    assert manager.usage().num_used == 0
    check_cache(manager)


def test_forks_need_paged_kv_and_fresh_names():
    """A contiguous run cannot be shared, and a table is never replaced."""
    manager = make(enable_prefix_caching=False, kv_reservation="max")
    start(manager, A, [1, 2])
    assert not manager.can_fork
    with pytest.raises(InvariantError, match="cannot be forked"):
        manager.fork(A, B, 2)
    manager = make()
    start(manager, A, [1, 2])
    start(manager, B, [3, 4])
    with pytest.raises(InvariantError, match="cannot be forked"):
        manager.fork(A, B, 2)


def test_a_prompt_that_diverges_inside_a_block_reuses_its_beginning():
    """Only what differs is computed: the rest of the block is copied."""
    manager = make()
    start(manager, A, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert start(manager, B, [1, 2, 3, 4, 5, 6, 70, 80, 90]) == 6
    assert manager.take_copies() == (BlockCopy(BlockId(1), BlockId(3)),)
    assert start(manager, C, [1, 2, 30, 40]) == 2
    assert manager.take_copies() == (BlockCopy(BlockId(0), BlockId(5)),)


def test_copying_less_than_it_costs_is_left():
    """An eighth of a block by default: of 16 tokens one is computed again, two are copied."""
    for length, expected in ((1, 0), (2, 2), (15, 15)):
        manager = make(block_size=16)
        start(manager, A, list(range(16)))
        assert start(manager, B, [*range(length), *range(100, 120)]) == expected
    manager = make(block_size=16, min_partial_hit=0)
    start(manager, A, list(range(16)))
    assert start(manager, B, [*range(15), 99, 98]) == 0
    manager = make(block_size=16, min_partial_hit=1)
    start(manager, A, list(range(16)))
    assert start(manager, B, [0, 99, 98]) == 1


def test_a_hit_that_only_its_own_source_can_make_room_for():
    """The source is the one block left: it becomes the target, its KV is there already."""
    manager = make(num_blocks=3)
    start(manager, A, [1, 2, 3, 4])
    manager.free(A)
    start(manager, B, [9] * 8)
    assert start(manager, C, [1, 2, 3, 40]) == 3
    assert manager.take_copies() == ()
    assert manager.tables[C].block_ids == [0]


def test_an_evicted_source_is_copied_before_it_is_written():
    """The copy comes first in the plan, so evicting the source for the same prompt is fine."""
    manager = make(num_blocks=3)
    start(manager, A, [1, 2, 3, 4])
    manager.free(A)
    assert start(manager, B, [1, 2, 3, 40, 50, 60, 70, 80, 90]) == 3
    (copy,) = manager.take_copies()
    table = manager.tables[B].block_ids
    assert (copy.source, copy.target) == (0, table[0])
    assert 0 in table[1:]


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=10)


@settings(max_examples=150, deadline=None)
@given(prompts=prompts, block_size=st.integers(1, 4), weak=st.booleans())
def test_partial_hits_equal_brute_force(prompts, block_size, weak):
    """The longest common prefix with whatever is cached, to the token, under any splits."""
    config = CacheConfig(400, block_size, min_partial_hit=1)
    manager = KVCacheManager(config, **({"digest": lambda data: b"same"} if weak else {}))
    cached: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        longest = 0
        for other in cached:
            same = next(
                (i for i, (x, y) in enumerate(zip(prompt, other, strict=False)) if x != y), None
            )
            longest = max(longest, min(len(prompt), len(other)) if same is None else same)
        assert start(manager, SequenceId(number), prompt) == min(longest, len(prompt) - 1)
        manager.free(SequenceId(number))
        check_cache(manager)
        cached.append(prompt[: len(prompt) // block_size * block_size])
