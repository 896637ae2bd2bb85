"""Packs the scheduled sequences of a plan, and their rows, into batches for the step function."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError
from octavo.core.ids import TokenId
from octavo.core.plan import ScheduledSequence
from octavo.kernels.batch import StepBatch
from octavo.runner.rows import Row

Int32 = NDArray[np.int32]


class Chunk(NamedTuple):
    """Tokens of one sequence in one batch. A tuple, because every step makes one a sequence."""

    row: Row
    token_ids: tuple[TokenId, ...]
    start: int
    num_scored: int
    """Leading tokens whose logits score the prompt token after them."""
    samples: bool
    """Whether the last token's logits choose the next one; that token is not a scored one."""
    forks: tuple[Row, ...] = ()
    """Rows that choose a next token of their own from the same logits."""

    @property
    def num_logits(self) -> int:
        """Rows of logits that the chunk wants."""
        return self.num_scored + self.samples

    @property
    def sampling_rows(self) -> tuple[Row, ...]:
        """Rows that choose a next token from the last token's logits."""
        return (self.row, *self.forks) if self.samples else ()

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before the one that is sampled: its index in the random stream."""
        return self.start + len(self.token_ids) - self.row.num_prompt_tokens

    @property
    def scored_token_ids(self) -> tuple[TokenId, ...]:
        """The prompt tokens that the scored logits are about."""
        return self.row.prompt_token_ids[self.start + 1 : self.start + 1 + self.num_scored]


def make_chunk(row: Row, scheduled: ScheduledSequence, forks: tuple[Row, ...] = ()) -> Chunk:
    """Return the chunk of a scheduled sequence.

    Raises:
        InvariantError: it samples before the prompt is complete.
    """
    stop = scheduled.start + len(scheduled.token_ids)
    num_scored = 0
    if row.wants_prompt_logprobs:
        num_scored = max(0, min(stop, row.num_prompt_tokens - 1) - scheduled.start)
    if scheduled.samples and stop < row.num_prompt_tokens:
        raise InvariantError(
            f"Sequence {row.sequence_id} samples after {stop} of its {row.num_prompt_tokens} "
            f"prompt tokens."
        )
    return Chunk(row, scheduled.token_ids, scheduled.start, num_scored, scheduled.samples, forks)


def split_chunks(chunks: Sequence[Chunk], max_logits: int) -> Iterator[list[Chunk]]:
    """Yield the chunks in order, cut into batches of at most ``max_logits`` rows of logits.

    Only prompt logprobs want more than one row a sequence. Cutting a chunk in two is chunked
    prefill, so the results stay the same and memory stays bounded whatever the vocabulary.
    """
    batch: list[Chunk] = []
    room = max_logits
    for chunk in chunks:
        while chunk.num_logits > room:
            if 0 < room <= chunk.num_scored:
                head, chunk = _cut(chunk, room)
                batch.append(head)
            if batch:
                yield batch
            batch, room = [], max_logits
        batch.append(chunk)
        room -= chunk.num_logits
    if batch:
        yield batch


def _cut(chunk: Chunk, length: int) -> tuple[Chunk, Chunk]:
    """Cut a chunk after ``length`` scored tokens, fewer than it has tokens."""
    head = Chunk(chunk.row, chunk.token_ids[:length], chunk.start, length, samples=False)
    tail = Chunk(
        chunk.row,
        chunk.token_ids[length:],
        chunk.start + length,
        chunk.num_scored - length,
        chunk.samples,
        chunk.forks,
    )
    return head, tail


def build_batch(chunks: Sequence[Chunk], block_tables: Int32, block_size: int) -> StepBatch:
    """Pack chunks side by side; ``block_tables`` is the matrix that ``Row.index`` points into."""
    lens = np.array([len(chunk.token_ids) for chunk in chunks], dtype=np.int32)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int32)
    kv_lens = starts + lens
    cu_query_lens = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(lens, out=cu_query_lens[1:])
    num_tokens = int(cu_query_lens[-1])

    width = -(-int(kv_lens.max()) // block_size)
    rows = np.array([chunk.row.index for chunk in chunks], dtype=np.intp)
    tables = block_tables[:, :width].take(rows, axis=0)

    sequence = np.repeat(np.arange(len(chunks), dtype=np.int32), lens)
    positions = np.arange(num_tokens, dtype=np.int32) + (starts - cu_query_lens[:-1])[sequence]
    slots = tables[sequence, positions // block_size] * block_size + positions % block_size
    token_ids = np.fromiter(
        (token_id for chunk in chunks for token_id in chunk.token_ids), np.int32, num_tokens
    )
    return StepBatch(
        token_ids=token_ids,
        positions=positions,
        cu_query_lens=cu_query_lens,
        kv_lens=kv_lens,
        block_tables=tables,
        slots=slots.astype(np.int32, copy=False),
        logits_rows=_logits_rows(chunks, cu_query_lens),
    )


def _logits_rows(chunks: Sequence[Chunk], cu_query_lens: Int32) -> Int32:
    """Return, per chunk in order, its scored tokens and then its sampling one."""
    if all(chunk.samples and not chunk.num_scored for chunk in chunks):
        return cu_query_lens[1:] - 1
    rows: list[int] = []
    ends = cu_query_lens.tolist()
    for chunk, first, stop in zip(chunks, ends[:-1], ends[1:], strict=True):
        rows.extend(range(first, first + chunk.num_scored))
        if chunk.samples:
            rows.append(stop - 1)
    return np.array(rows, dtype=np.int32)
