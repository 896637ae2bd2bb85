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
    if 0 < len(chunks) + sum(chunk.num_scored for chunk in chunks) <= max_logits:
        yield list(chunks)  # most steps: no need to look at each
        return
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
    """Pack chunks side by side; ``block_tables`` is the matrix that ``Row.index`` points into.

    The logits wanted are, per chunk in order, those of its scored tokens and of its sampling one.
    Lists become arrays at the end: most steps are decodes, a token a sequence, where each call of
    numpy costs more than a turn of the loop.
    """
    token_ids: list[TokenId] = []
    logits_rows: list[int] = []
    ends, kv_lens, rows = [0], [], []
    for chunk in chunks:
        first = len(token_ids)
        token_ids += chunk.token_ids
        stop = len(token_ids)
        ends.append(stop)
        kv_lens.append(chunk.start + stop - first)
        rows.append(chunk.row.index)
        if chunk.num_scored:
            logits_rows += range(first, first + chunk.num_scored)
        if chunk.samples:
            logits_rows.append(stop - 1)
    width = -(-max(kv_lens) // block_size)
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        cu_query_lens=np.array(ends, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        block_tables=block_tables[:, :width].take(rows, axis=0),
        logits_rows=np.array(logits_rows, np.int32),
    )
