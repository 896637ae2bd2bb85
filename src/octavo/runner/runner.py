"""Executes plans on a model: releases, copies, computes and samples as the scheduler decided."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError, RequestError
from octavo.core.ids import SequenceId, TokenId
from octavo.core.plan import BlockCopy, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import TokenLogprobs
from octavo.kernels.ops import StepFunction
from octavo.kernels.sampling.interface import Mask, Sampler
from octavo.runner.grammar_rows import GrammarRows
from octavo.runner.input_batch import Chunk, build_batch, make_chunk, split_chunks
from octavo.runner.pooling import Pooler
from octavo.runner.rows import Row, SequenceRows

Float32 = NDArray[np.float32]

MAX_LOGITS_BYTES: Final = 256 * 2**20
"""Memory for the logits of one call of the step function; a row a sequence always fits."""


class Runner:
    """The model runner of the engine; one thread at a time.

    A plan is one call of ``step``, unless prompt logprobs want more logits than
    ``max_logits_bytes`` hold: then it is several, and a prompt's chunk is cut between them.
    Masks of grammars are computed meanwhile. Sequences that are to be embedded are a call of the
    pooler's. Without ``grammars`` or a ``pooler`` no sequence may ask for one.
    """

    def __init__(  # noqa: PLR0913 - two collaborators that are optional, sizes passed by name
        self,
        step: StepFunction,
        copy_blocks: Callable[[Sequence[BlockCopy]], None],
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        vocab_size: int,
        sampler: Sampler,
        max_logits_bytes: int = MAX_LOGITS_BYTES,
        grammars: GrammarRows | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        self._step = step
        self._grammars = grammars
        self._pooler = pooler
        self._copy_blocks = copy_blocks
        self._block_size = block_size
        self._max_logits = max(max_logits_bytes // (4 * vocab_size), max_num_seqs)
        self._rows = SequenceRows(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            vocab_size=vocab_size,
            sampler=sampler,
        )
        self._sampler = sampler

    @property
    def num_sequences(self) -> int:
        """Sequences that have a row: new to a plan and not released by a later one."""
        return len(self._rows)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one plan.

        After an exception, rows are those of the plan and its KV is undefined: the scheduler
        releases the plan's sequences with the next plan, which is all that recovery takes.
        """
        self._update_rows(plan)
        if plan.copies:
            self._copy_blocks(plan.copies)
        rows = self._rows
        chunks = [
            make_chunk(rows.update(item), item, rows.forks(item) if item.forks else ())
            for item in plan.scheduled
        ]
        if self._grammars:
            self._grammars.prepare(
                (row.sequence_id, chunk.num_output_tokens)
                for chunk in chunks
                if chunk.samples
                for row in (chunk.row, *chunk.forks)
            )
        result = _Result()
        if self._pooler is not None:
            chunks = self._pool(chunks, result)
        for batch in split_chunks(chunks, self._max_logits):
            logits = self._step(build_batch(batch, self._rows.block_tables, self._block_size))
            if any(chunk.num_scored for chunk in batch):
                self._score_prompts(batch, logits, result)
            self._sample(batch, logits, result)
        return result.output()

    def _pool(self, chunks: Sequence[Chunk], result: "_Result") -> list[Chunk]:
        """Compute the chunks that are to be embedded; return the others."""
        assert self._pooler is not None
        pooled = [chunk for chunk in chunks if chunk.row.params.pooling is not None]
        if not pooled:
            return list(chunks)
        found = self._pooler.run(pooled, self._rows.block_tables)
        result.pooled |= found.embeddings
        result.failed |= found.failed
        return [chunk for chunk in chunks if chunk.row.params.pooling is None]

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for sequence_id in plan.released:
            self._rows.release(sequence_id)
            if self._grammars is not None:
                self._grammars.release(sequence_id)
            if self._pooler is not None:
                self._pooler.release(sequence_id)
        for new in plan.new:
            self._rows.add(new)
            if self._grammars is not None:
                self._grammars.add(new)
            elif new.sampling.structured_output is not None:
                raise InvariantError("A sequence has a grammar, but the runner knows none.")
            if self._pooler is None and new.sampling.pooling is not None:
                raise InvariantError("A sequence is to be embedded, but the runner cannot.")

    def _score_prompts(self, batch: Sequence[Chunk], logits: Float32, result: "_Result") -> None:
        first = 0
        for chunk in batch:
            if chunk.num_scored:
                num_top = chunk.row.params.prompt_logprobs or 0
                rows = logits[first : first + chunk.num_scored]
                try:
                    scores = self._sampler.score(rows, chunk.scored_token_ids, num_top)
                    result.add_prompt_logprobs(chunk.row.sequence_id, scores)
                except RequestError as error:
                    result.failed[chunk.row.sequence_id] = error
            first += chunk.num_logits

    def _sample(self, batch: Sequence[Chunk], logits: Float32, result: "_Result") -> None:
        rows: list[Row] = []
        draws: list[int] = []
        logits_rows: list[int] = []
        end = 0
        for chunk in batch:
            end += chunk.num_scored
            if not chunk.samples:
                continue
            num_output_tokens = chunk.num_output_tokens
            for row in (chunk.row, *chunk.forks):
                rows.append(row)
                draws.append(num_output_tokens)
                logits_rows.append(end)
            end += 1
        if not rows:
            return
        states = [row.sampling for row in rows]
        masks = self._masks(rows, draws, result)
        sampled = self._sampler.sample(logits, states, draws, masks, logits_rows)
        for row, token_id in zip(rows, sampled.token_ids, strict=True):
            result.sampled[row.sequence_id] = (token_id,)
        for i, error in sampled.failures.items():
            result.failed.setdefault(rows[i].sequence_id, error)
        for i, scores in sampled.logprobs.items():
            result.logprobs[rows[i].sequence_id] = (scores,)
        if self._grammars:
            for row in rows:
                self._accept(row.sequence_id, result)

    def _masks(
        self, rows: Sequence[Row], draws: Sequence[int], result: "_Result"
    ) -> dict[int, Mask]:
        """Return the masks of rows that ban tokens, waiting for those of grammars."""
        masks: dict[int, Mask] = {}
        if not self._grammars and not any(row.bans for row in rows):
            return masks
        for i, (row, num_output_tokens) in enumerate(zip(rows, draws, strict=True)):
            mask = None
            if self._grammars:
                try:
                    mask = self._grammars.mask(row.sequence_id)
                except RequestError as error:
                    result.failed[row.sequence_id] = error
                    continue
            if row.bans is not None:
                mask = row.bans.mask(num_output_tokens, mask)
            if mask is not None:
                masks[i] = mask
        return masks

    def _accept(self, sequence_id: SequenceId, result: "_Result") -> None:
        """Let the grammar of a sequence, if it has one, go on by the token that was sampled."""
        assert self._grammars is not None
        if sequence_id in result.failed:
            return
        (token_id,) = result.sampled[sequence_id]
        try:
            accepted = self._grammars.accept(sequence_id, token_id)
        except RequestError as error:
            result.failed[sequence_id] = error
            return
        if accepted is not None:
            result.sampled[sequence_id] = (token_id, *accepted.forced)
            if accepted.is_complete:
                result.completed.add(sequence_id)


class _Result:
    """The output of a step while it is being put together."""

    def __init__(self) -> None:
        self.sampled: dict[SequenceId, tuple[TokenId, ...]] = {}
        self.logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        self.prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        self.failed: dict[SequenceId, RequestError] = {}
        self.completed: set[SequenceId] = set()
        self.pooled: dict[SequenceId, tuple[float, ...]] = {}

    def add_prompt_logprobs(
        self, sequence_id: SequenceId, scores: tuple[TokenLogprobs, ...]
    ) -> None:
        """Append scores; a chunk that was cut brings them in several parts."""
        self.prompt_logprobs[sequence_id] = self.prompt_logprobs.get(sequence_id, ()) + scores

    def output(self) -> ModelRunnerOutput:
        """Return what the scheduler gets: a sequence that failed brings nothing else."""
        for sequence_id in self.failed:
            for results in (self.sampled, self.logprobs, self.prompt_logprobs):
                results.pop(sequence_id, None)
        return ModelRunnerOutput(
            self.sampled,
            self.logprobs,
            self.prompt_logprobs,
            self.failed,
            frozenset(self.completed - self.failed.keys()),
            self.pooled,
        )
