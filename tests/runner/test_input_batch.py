"""Rows and the packed batch: ragged, unpadded, and the same as building it token by token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.plan import ScheduledSequence
from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.numpy_sampler import NumpySampler
from octavo.runner.input_batch import Chunk, build_batch, make_chunk, split_chunks
from octavo.runner.rows import SequenceRows
from support_runner import BLOCK_SIZE
from support_sampling import GREEDY, new_sequence

SCORED = SamplingParams(temperature=0.0, prompt_logprobs=1)


def make_rows(max_num_seqs: int = 4) -> SequenceRows:
    """Return empty rows."""
    return SequenceRows(
        block_size=BLOCK_SIZE,
        max_model_len=100,
        max_num_seqs=max_num_seqs,
        vocab_size=1000,
        sampler=NumpySampler(1000),
    )


def scheduled(
    key: int, tokens: range, blocks: list[int], *, first_block: int = 0, samples: bool = False
) -> ScheduledSequence:
    """Schedule tokens whose ids are their positions."""
    return ScheduledSequence(
        SequenceId(key),
        tuple(tokens),
        tokens.start,
        first_block,
        tuple(BlockId(block) for block in blocks),
        samples,
    )


def test_packs_a_decode_beside_two_chunks() -> None:
    """Turns red when an array of the batch is off: a worked example with block numbers."""
    rows = make_rows()
    for key, length in ((0, 5), (1, 3), (2, 9)):
        rows.add(new_sequence(key, range(length)))
    rows.update(scheduled(0, range(5), [7, 3], samples=True))
    items = [
        scheduled(0, range(5, 6), [], samples=True),
        scheduled(1, range(3), [1], samples=True),
        scheduled(2, range(6), [4, 0]),
    ]
    chunks = [make_chunk(rows.update(item), item) for item in items]
    batch = build_batch(chunks, rows.block_tables, BLOCK_SIZE)
    assert batch.token_ids.tolist() == [5, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert batch.positions.tolist() == [5, 0, 1, 2, 0, 1, 2, 3, 4, 5]
    assert batch.cu_query_lens.tolist() == [0, 1, 4, 10]
    assert batch.kv_lens.tolist() == [6, 3, 6]
    assert [
        table[:count].tolist() for table, count in zip(batch.block_tables, (2, 1, 2), strict=True)
    ] == [
        [7, 3],
        [1],
        [4, 0],
    ]
    assert batch.slots(BLOCK_SIZE).tolist() == [13, 4, 5, 6, 16, 17, 18, 19, 0, 1]
    assert batch.logits_rows.tolist() == [0, 3]
    for array in (batch.token_ids, batch.positions, batch.cu_query_lens, batch.kv_lens):
        assert array.dtype == np.int32
    for array in (batch.slots(BLOCK_SIZE), batch.block_tables, batch.logits_rows):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous


chunk_lists = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 29), st.booleans()), min_size=1, max_size=6
)


def chunks_of(spec: list[tuple[int, int, bool]]) -> tuple[list[Chunk], SequenceRows]:
    """Make rows whose last chunk starts anywhere; each sequence has blocks of its own."""
    rows, chunks = make_rows(max_num_seqs=2), []
    for key, (length, start, scores) in enumerate(spec):
        start = min(start, length - 1)
        rows.add(new_sequence(key, range(length), SCORED if scores else GREEDY))
        item = scheduled(
            key, range(start, length), [key * 10 + i for i in range(10)], samples=key % 2 == 0
        )
        chunks.append(make_chunk(rows.update(item), item))
    return chunks, rows


@settings(max_examples=150, deadline=None)
@given(spec=chunk_lists, max_logits=st.integers(1, 12))
def test_splitting_keeps_every_token_and_every_row_of_logits(
    spec: list[tuple[int, int, bool]], max_logits: int
) -> None:
    """Turns red when bounding memory drops, repeats or reorders a token or a score."""
    chunks, rows = chunks_of(spec)
    whole = build_batch(chunks, rows.block_tables, BLOCK_SIZE)
    parts = list(split_chunks(chunks, max_logits))
    batches = [build_batch(part, rows.block_tables, BLOCK_SIZE) for part in parts]
    assert all(len(batch.logits_rows) <= max_logits for batch in batches)
    assert all(part for part in parts)
    assert all(chunk.token_ids for part in parts for chunk in part)
    for part in (
        lambda batch: batch.token_ids,
        lambda batch: batch.positions,
        lambda batch: batch.slots(BLOCK_SIZE),
    ):
        joined = np.concatenate([part(batch) for batch in batches])
        assert joined.tolist() == part(whole).tolist()
    positions = [int(b.positions[row]) for b in batches for row in b.logits_rows]
    assert positions == whole.positions[whole.logits_rows].tolist()
    scored = [i for part in parts for chunk in part for i in chunk.scored_token_ids]
    assert scored == [i for chunk in chunks for i in chunk.scored_token_ids]


def test_a_plan_without_prompt_logprobs_is_one_batch() -> None:
    """Turns red when ordinary steps are cut in two: they want one row of logits a sequence."""
    chunks, _ = chunks_of([(30, 0, False)] * 6)
    assert len(list(split_chunks(chunks, 3))) == 1
    assert list(split_chunks([], 3)) == []


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_every_prompt_token_but_the_first_is_scored_once(length: int, chunk: int) -> None:
    """SA-17: turns red when a chunk border loses or repeats a prompt token's score."""
    rows = make_rows()
    rows.add(new_sequence(0, range(length), SCORED))
    scored: list[int] = []
    for start in range(0, length, chunk):
        stop = min(length, start + chunk)
        item = scheduled(0, range(start, stop), list(range(25)), samples=stop == length)
        made = make_chunk(rows.update(item), item)
        assert made.num_logits == made.num_scored + (stop == length)
        scored.extend(made.scored_token_ids)
    assert scored == list(range(1, length))


def test_rows_come_back_and_grow() -> None:
    """Turns red when a released row leaks, or more sequences than expected break the tables."""
    rows = make_rows(max_num_seqs=2)
    for generation in range(5):
        for key in range(3):
            rows.add(new_sequence(3 * generation + key))
            item = scheduled(3 * generation + key, range(1), [key])
            rows.update(item)
        for key in range(3):
            rows.release(SequenceId(3 * generation + key))
    assert len(rows) == 0
    assert len(rows.block_tables) == 4
    rows.release(SequenceId(999))  # never seen: its first plan failed before it had a row


def test_a_table_is_replaced_from_the_first_changed_block_on() -> None:
    """Turns red when a copied block's new id does not reach the table, or a stale tail stays."""
    rows = make_rows()
    rows.add(new_sequence(0, range(12)))
    row = rows.update(scheduled(0, range(12), [1, 2, 3]))
    rows.update(scheduled(0, range(4, 12), [8, 9], first_block=1))
    assert rows.block_tables[row.index, :3].tolist() == [1, 8, 9]
    with pytest.raises(InvariantError, match="do not hold"):
        rows.update(scheduled(0, range(12), [5]))


def test_an_inconsistent_plan_is_a_bug_and_not_an_index_error() -> None:
    """Turns red when a scheduler's bug becomes garbage KV instead of a clear error."""
    rows = make_rows()
    rows.add(new_sequence(0, range(8)))
    with pytest.raises(InvariantError, match="has its row"):
        rows.add(new_sequence(0))
    with pytest.raises(InvariantError, match="has no row"):
        rows.update(scheduled(1, range(1), [0]))
    with pytest.raises(InvariantError, match="do not hold"):
        rows.update(scheduled(0, range(5), [0]))
    with pytest.raises(InvariantError, match="do not continue"):
        rows.update(scheduled(0, range(4), [0], first_block=2))
    with pytest.raises(InvariantError, match="do not continue"):
        rows.update(scheduled(0, range(4), list(range(26))))
    with pytest.raises(InvariantError, match="are known"):
        rows.update(scheduled(0, range(9, 10), [0, 1, 2]))
    with pytest.raises(InvariantError, match="are known"):
        rows.update(scheduled(0, range(0), [0]))
    item = scheduled(0, range(4), [0], samples=True)
    with pytest.raises(InvariantError, match="samples after 4"):
        make_chunk(rows.update(item), item)
