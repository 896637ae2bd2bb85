"""The permanent row of each sequence: what the runner remembers between steps."""

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError
from octavo.core.ids import SequenceId
from octavo.core.plan import NewSequence, ScheduledSequence
from octavo.kernels.sampling.interface import Sampler
from octavo.runner.token_bans import TokenBans

Int32 = NDArray[np.int32]


class Row:
    """One sequence from ``NewSequence`` to its release. Only ``SequenceRows`` changes it."""

    __slots__ = (
        "bans",
        "index",
        "num_blocks",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "prompt_token_ids",
        "sampling",
        "sequence_id",
        "wants_prompt_logprobs",
    )

    def __init__(self, index: int, new: NewSequence, sampler: Sampler, vocab_size: int) -> None:
        self.sequence_id = new.sequence_id
        self.index = index
        """Its row of the block tables."""
        self.prompt_token_ids = new.prompt_token_ids
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.num_tokens = len(new.prompt_token_ids) + len(new.output_token_ids)
        """Prompt and output tokens that plans have named so far."""
        self.num_blocks = 0
        self.params = new.sampling
        self.sampling = sampler.state(new)
        self.bans = TokenBans(new, vocab_size) if new.sampling.bans_tokens else None
        # Prompt logprobs leave with the first output token; one that has output is past that.
        self.wants_prompt_logprobs = (
            new.sampling.prompt_logprobs is not None and not new.output_token_ids
        )


class SequenceRows:
    """Rows by sequence, their block tables in one matrix that grows as needed."""

    def __init__(
        self,
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        vocab_size: int,
        sampler: Sampler,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._sampler = sampler
        width = -(-max_model_len // block_size)
        self._tables: Int32 = np.zeros((max_num_seqs, width), dtype=np.int32)
        self._rows: dict[SequenceId, Row] = {}
        self._free = list(reversed(range(max_num_seqs)))

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def block_tables(self) -> Int32:
        """``[rows, blocks of max_model_len]``: row ``Row.index`` is a sequence's block table."""
        return self._tables

    def add(self, new: NewSequence) -> None:
        """Make the row of a sequence that has none.

        Raises:
            InvariantError: it has one.
        """
        if new.sequence_id in self._rows:
            raise InvariantError(f"Sequence {new.sequence_id} is new, but the runner has its row.")
        if not self._free:
            self._grow()
        row = Row(self._free.pop(), new, self._sampler, self._vocab_size)
        self._rows[new.sequence_id] = row

    def forks(self, scheduled: ScheduledSequence) -> tuple[Row, ...]:
        """Return the rows of the sequences that are to sample from the same logits.

        Raises:
            InvariantError: one of them has no row, or other tokens.
        """
        rows = tuple(row for name in scheduled.forks if (row := self._rows.get(name)) is not None)
        stop = scheduled.start + len(scheduled.token_ids)
        if len(rows) < len(scheduled.forks) or any(row.num_tokens != stop for row in rows):
            raise InvariantError(
                f"Sequence {scheduled.sequence_id} is to be forked into {scheduled.forks}, but "
                f"not all of these have its {stop} tokens."
            )
        return rows

    def release(self, sequence_id: SequenceId) -> None:
        """Forget a sequence. One without a row is ignored: its first plan may have failed early."""
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free.append(row.index)

    def update(self, scheduled: ScheduledSequence) -> Row:
        """Bring the row of a scheduled sequence up to date, and return it.

        Output tokens are counted when a plan first names them, not when they are sampled, so the
        row holds what the scheduler accepted.

        Raises:
            InvariantError: the sequence has no row, or the plan does not fit what it holds.
        """
        row = self._rows.get(scheduled.sequence_id)
        if row is None:
            raise InvariantError(f"Sequence {scheduled.sequence_id} is scheduled, but has no row.")
        stop = scheduled.start + len(scheduled.token_ids)
        if not scheduled.token_ids or scheduled.start > row.num_tokens:
            raise InvariantError(
                f"Sequence {row.sequence_id} is scheduled from {scheduled.start} to {stop}, but "
                f"only {row.num_tokens} tokens are known."
            )
        if scheduled.block_ids:
            self._update_table(row, scheduled)
        if row.num_blocks * self._block_size < stop:
            raise InvariantError(
                f"The {row.num_blocks} blocks of sequence {row.sequence_id} do not hold its "
                f"{stop} tokens."
            )
        if stop > row.num_tokens:
            output = scheduled.token_ids[row.num_tokens - scheduled.start :]
            row.sampling.note_output(output)
            if row.bans is not None:
                row.bans.note_output(output)
            row.num_tokens = stop
        return row

    def _update_table(self, row: Row, scheduled: ScheduledSequence) -> None:
        first, block_ids = scheduled.first_block, scheduled.block_ids
        if first > row.num_blocks or first + len(block_ids) > self._tables.shape[1]:
            raise InvariantError(
                f"Blocks {first} to {first + len(block_ids)} do not continue the table of "
                f"sequence {row.sequence_id}, which has {row.num_blocks}."
            )
        self._tables[row.index, first : first + len(block_ids)] = block_ids
        row.num_blocks = first + len(block_ids)

    def _grow(self) -> None:
        """Double the rows: a plan may name new sequences before it releases old ones."""
        count = len(self._tables)
        self._tables = np.concatenate([self._tables, np.zeros_like(self._tables)])
        self._free = list(reversed(range(count, 2 * count)))
