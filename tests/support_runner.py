"""A model without weights and a driver without a scheduler, to test the runner alone."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.plan import (
    BlockCopy,
    ModelRunner,
    ModelRunnerOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)
from octavo.kernels.batch import StepBatch
from octavo.kernels.sampling.numpy_sampler import NumpySampler
from octavo.runner.fake import digest
from octavo.runner.runner import Runner
from support_sampling import MakeSampler

BLOCK_SIZE = 4


class ToyModel:
    """A step function whose logits are a pure function of the tokens read through the tables."""

    def __init__(self, *, num_blocks: int, vocab_size: int) -> None:
        self.batches: list[StepBatch] = []
        self.spoiled: dict[TokenId, float] = {}
        """Logits that follow this token get this value in their first entry."""
        self.error: Exception | None = None
        """Raised by the next steps, until it is taken away."""
        self._vocab_size = vocab_size
        self._digests = np.full(num_blocks * BLOCK_SIZE, -1, dtype=np.int64)

    def __call__(self, batch: StepBatch) -> NDArray[np.float32]:
        """Store the digests of the batch and return its logits, which nobody may write into."""
        self.batches.append(batch)
        if self.error is not None:
            raise self.error
        positions, slots = batch.positions, batch.slots(BLOCK_SIZE)
        for i in range(batch.num_sequences):
            for row in range(batch.cu_query_lens[i], batch.cu_query_lens[i + 1]):
                position = int(positions[row])
                before = 0 if position == 0 else self._read(batch, i, position - 1)
                self._digests[slots[row]] = digest([int(batch.token_ids[row])], before)
        rows = [
            self._logits(int(self._digests[slots[row]]), int(batch.token_ids[row]))
            for row in batch.logits_rows
        ]
        logits = np.array(rows, dtype=np.float32).reshape(len(rows), self._vocab_size)
        logits.setflags(write=False)
        return logits

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks."""
        blocks = self._digests.reshape(-1, BLOCK_SIZE)
        for copy in copies:
            blocks[copy.target] = blocks[copy.source]

    def _read(self, batch: StepBatch, sequence: int, position: int) -> int:
        block_id = int(batch.block_tables[sequence, position // BLOCK_SIZE])
        found = int(self._digests[block_id * BLOCK_SIZE + position % BLOCK_SIZE])
        assert found >= 0, f"position {position} has no KV"
        return found

    def _logits(self, seed: int, token_id: TokenId) -> NDArray[np.float32]:
        rng = np.random.default_rng(seed)
        logits = (3.0 * rng.standard_normal(self._vocab_size)).astype(np.float32)
        if token_id in self.spoiled:
            logits[0] = self.spoiled[token_id]
        return logits


class Driver:
    """Plays the scheduler for a few sequences, each with blocks of its own."""

    def __init__(self, runner: ModelRunner) -> None:
        self.tokens: dict[int, list[TokenId]] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self._runner = runner
        self._computed: dict[int, int] = {}
        self._num_blocks: dict[int, int] = {}
        self._sequences: dict[int, NewSequence] = {}
        self._new: list[NewSequence] = []
        self._released: list[SequenceId] = []
        self._next_block = 0
        self._step = 0

    def start(self, new: NewSequence) -> None:
        """Let a sequence join the next step."""
        key = int(new.sequence_id)
        self._new.append(new)
        self._sequences[key] = new
        self.tokens[key] = [*new.prompt_token_ids, *new.output_token_ids]
        self.num_prompt_tokens[key] = len(new.prompt_token_ids)
        self._computed[key] = self._num_blocks[key] = 0

    def stop(self, key: int) -> None:
        """Release a sequence with the next step."""
        self._released.append(SequenceId(key))

    def preempt(self, key: int) -> None:
        """Release a sequence and bring it back as a new one, with the output it has."""
        old = self._sequences[key]
        self.stop(key)
        self.start(
            NewSequence(
                old.sequence_id,
                old.prompt_token_ids,
                tuple(self.output(key)),
                old.sampling,
                old.seed,
                old.ending_token_ids,
            )
        )

    def output(self, key: int) -> list[TokenId]:
        """Return the tokens that a sequence has generated."""
        return self.tokens[key][self.num_prompt_tokens[key] :]

    def step(self, *keys: int, chunk: int = 10**6) -> ModelRunnerOutput:
        """Execute a plan with at most ``chunk`` tokens of each of these sequences."""
        scheduled = tuple(self._schedule(key, chunk) for key in keys)
        plan = SchedulerOutput(
            self._step, tuple(self._new), scheduled, released=tuple(self._released)
        )
        self._step += 1
        self._new, self._released = [], []
        result = self._runner.execute(plan)
        for sequence_id, token_ids in result.sampled.items():
            self.tokens[int(sequence_id)].extend(token_ids)
        return result

    def generate(self, *keys: int, num_tokens: int, chunk: int = 10**6) -> list[list[TokenId]]:
        """Step these sequences until each has ``num_tokens`` tokens of output."""
        while short := [key for key in keys if len(self.output(key)) < num_tokens]:
            self.step(*short, chunk=chunk)
        return [self.output(key) for key in keys]

    def _schedule(self, key: int, chunk: int) -> ScheduledSequence:
        start = self._computed[key]
        stop = min(len(self.tokens[key]), start + chunk)
        count = -(-stop // BLOCK_SIZE) - self._num_blocks[key]
        blocks = tuple(BlockId(self._next_block + i) for i in range(count))
        first = self._num_blocks[key]
        self._next_block += count
        self._num_blocks[key] += count
        self._computed[key] = stop
        return ScheduledSequence(
            SequenceId(key),
            tuple(self.tokens[key][start:stop]),
            start,
            first,
            blocks,
            samples=stop == len(self.tokens[key]),
        )


def toy_runner(
    vocab_size: int = 50,
    *,
    num_blocks: int = 500,
    max_num_seqs: int = 4,
    max_logits: int = 64,
    make_sampler: MakeSampler = NumpySampler,
) -> tuple[Runner, ToyModel]:
    """Return a runner on a toy model, and the model."""
    model = ToyModel(num_blocks=num_blocks, vocab_size=vocab_size)
    runner = Runner(
        model,
        model.copy_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=200,
        max_num_seqs=max_num_seqs,
        vocab_size=vocab_size,
        sampler=make_sampler(vocab_size),
        max_logits_bytes=4 * vocab_size * max_logits,
    )
    return runner, model


def toy_driver(
    vocab_size: int = 50,
    *,
    max_num_seqs: int = 4,
    max_logits: int = 64,
    make_sampler: MakeSampler = NumpySampler,
) -> Driver:
    """Return a driver of a runner on a toy model."""
    runner, _ = toy_runner(
        vocab_size, max_num_seqs=max_num_seqs, max_logits=max_logits, make_sampler=make_sampler
    )
    return Driver(runner)
