"""Executes plans on a model: releases, copies, computes and samples as the scheduler decided."""

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import GenerationError
from octavo.core.ids import SequenceId, TokenId
from octavo.core.plan import BlockCopy, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import TokenLogprobs
from octavo.kernels.ops import StepFunction
from octavo.runner.input_batch import Chunk, build_batch, make_chunk, split_chunks
from octavo.runner.logprobs import score_token, score_tokens
from octavo.runner.rows import SequenceRows
from octavo.runner.sampler import Sampler

Float32 = NDArray[np.float32]

MAX_LOGITS_BYTES: Final = 256 * 2**20
"""Memory for the logits of one call of the step function; a row a sequence always fits."""


class Runner:
    """The model runner of the engine; one thread at a time.

    A plan is one call of ``step``, unless prompt logprobs want more logits than
    ``max_logits_bytes`` hold: then it is several, and a prompt's chunk is cut between them.
    """

    def __init__(
        self,
        step: StepFunction,
        copy_blocks: Callable[[Sequence[BlockCopy]], None],
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        vocab_size: int,
        max_logits_bytes: int = MAX_LOGITS_BYTES,
    ) -> None:
        self._step = step
        self._copy_blocks = copy_blocks
        self._block_size = block_size
        self._max_logits = max(max_logits_bytes // (4 * vocab_size), max_num_seqs)
        self._rows = SequenceRows(
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            vocab_size=vocab_size,
        )
        self._sampler = Sampler(vocab_size)

    @property
    def num_sequences(self) -> int:
        """Sequences that have a row: new to a plan and not released by a later one."""
        return len(self._rows)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one plan.

        After an exception, rows are those of the plan and its KV is undefined: the scheduler
        releases the plan's sequences with the next plan, which is all that recovery takes.
        """
        for sequence_id in plan.released:
            self._rows.release(sequence_id)
        for new in plan.new:
            self._rows.add(new)
        if plan.copies:
            self._copy_blocks(plan.copies)
        chunks = [make_chunk(self._rows.update(item), item) for item in plan.scheduled]
        result = _Result()
        for batch in split_chunks(chunks, self._max_logits):
            logits = self._step(build_batch(batch, self._rows.block_tables, self._block_size))
            self._score_prompts(batch, logits, result)
            self._sample(batch, logits, result)
        return result.output()

    def _score_prompts(self, batch: Sequence[Chunk], logits: Float32, result: "_Result") -> None:
        first = 0
        for chunk in batch:
            if chunk.num_scored:
                num_top = chunk.row.sampling.params.prompt_logprobs or 0
                rows = logits[first : first + chunk.num_scored]
                try:
                    scores = score_tokens(rows, chunk.scored_token_ids, num_top)
                    result.add_prompt_logprobs(chunk.row.sequence_id, scores)
                except GenerationError as error:
                    result.failed[chunk.row.sequence_id] = error.message
            first += chunk.num_logits

    def _sample(self, batch: Sequence[Chunk], logits: Float32, result: "_Result") -> None:
        sampling = [chunk for chunk in batch if chunk.samples]
        if not sampling:
            return
        if len(sampling) < len(logits):
            ends = np.cumsum([chunk.num_logits for chunk in batch])
            logits = logits[
                [end - 1 for chunk, end in zip(batch, ends, strict=True) if chunk.samples]
            ]
        sampled = self._sampler.sample(
            logits,
            [chunk.row.sampling for chunk in sampling],
            [chunk.num_output_tokens for chunk in sampling],
        )
        for i, (chunk, token_id) in enumerate(zip(sampling, sampled.token_ids, strict=True)):
            sequence_id = chunk.row.sequence_id
            if i in sampled.failures:
                result.failed[sequence_id] = sampled.failures[i]
                continue
            result.sampled[sequence_id] = (token_id,)
            num_top = chunk.row.sampling.params.logprobs
            if num_top is not None:
                result.logprobs[sequence_id] = (score_token(logits[i], token_id, num_top),)


class _Result:
    """The output of a step while it is being put together."""

    def __init__(self) -> None:
        self.sampled: dict[SequenceId, tuple[TokenId, ...]] = {}
        self.logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        self.prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        self.failed: dict[SequenceId, str] = {}

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
        return ModelRunnerOutput(self.sampled, self.logprobs, self.prompt_logprobs, self.failed)
