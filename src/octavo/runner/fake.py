"""A runner without a model that notices wrong KV: the scheduler's partner in simulation."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest

from octavo.core.errors import GenerationError, InvariantError, RequestError
from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.plan import ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.core.request import TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.random_stream import uniform

Digest = int

_EMPTY: Digest = 0
_UNWRITTEN: Digest = -1
_RUINED: Digest = -2


class InjectedFault(Exception):
    """The failure that a test asked for."""


@dataclass(frozen=True, slots=True)
class Faults:
    """When the fake runner fails. ``call`` counts the calls of ``execute`` from 0."""

    raises: Callable[[int], bool] = lambda call: False
    """Whether this call raises ``InjectedFault`` after it has written its KV."""
    fails: Callable[[int, SequenceId], bool] = lambda call, sequence_id: False
    """Whether this call reports the result of this sequence as unusable."""


def digest(token_ids: Sequence[TokenId], before: Digest = _EMPTY) -> Digest:
    """Return the digest of a sequence whose earlier tokens have the digest ``before``."""
    for token_id in token_ids:
        before = int(uniform(before, token_id) * 2.0**53)
    return before


def choose_token(
    before: Digest,
    draw: int,
    *,
    sampling: SamplingParams,
    seed: int,
    ending_token_ids: Collection[TokenId],
    vocab_size: int,
) -> TokenId:
    """Return output token ``draw`` of a sequence whose tokens so far have the digest ``before``.

    A pure function of the sequence and, unless greedy, of its seed. Ids that end the output are
    avoided for ``min_tokens``, unless there is no other; logits are shaped in no other way.
    """
    stream = before if sampling.is_greedy else digest([draw, seed], before)
    banned = ending_token_ids if draw < sampling.min_tokens else ()
    first = int(uniform(stream, 0) * vocab_size)
    choices = ((first + step) % vocab_size for step in range(vocab_size))
    return next((token_id for token_id in choices if token_id not in banned), first)


def score_token(before: Digest, token_id: TokenId) -> TokenLogprobs:
    """Return made-up logprobs of ``token_id`` after a sequence with the digest ``before``."""
    return TokenLogprobs(token_id, logprob=-10.0 * uniform(before, token_id), rank=1)


def likeliest_tokens(
    before: Digest, vocab_size: int, count: int
) -> tuple[tuple[TokenId, float], ...]:
    """Return the tokens with the highest made-up logprobs, likeliest first."""
    scores = ((token_id, score_token(before, token_id).logprob) for token_id in range(vocab_size))
    return tuple(nsmallest(count, scores, key=lambda item: (-item[1], item[0])))


class FakeRunner:
    """Writes and reads a fake paged memory, and chooses tokens by hashing what it reads.

    A slot holds the digest of the sequence up to and with its token, as real KV depends on the
    whole prefix. Each step stores the digests of its tokens through the block tables and then
    reads every scheduled sequence back from its first token. A wrong table, a block that two
    sequences write, a stale or unfilled cached block, or a missed copy raises ``InvariantError``
    in the step that first meets it. KV of failed work is ruined, so that it cannot be reused.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        faults: Faults | None = None,
        run_length: Callable[[Digest], int] = lambda before: 1,
    ) -> None:
        """Make the memory.

        Args:
            block_size: slots per block.
            num_blocks: blocks in the pool.
            vocab_size: tokens are 0 to ``vocab_size - 1``.
            faults: when to fail.
            run_length: how many tokens come at once after a sequence with this digest, as when a
                grammar forces them. It changes no token, only when the tokens come.
        """
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._faults = faults or Faults()
        self._run_length = run_length
        self._memory = [_UNWRITTEN] * (num_blocks * block_size)
        self._rows: dict[SequenceId, _Row] = {}
        self._calls = 0

    @property
    def sequence_ids(self) -> frozenset[SequenceId]:
        """Sequences that are known: new to a plan and not released by a later one."""
        return frozenset(self._rows)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Execute one plan.

        Raises:
            InvariantError: the plan is inconsistent, or a sequence met KV that is not its own.
            InjectedFault: as asked for.
        """
        call = self._calls
        self._calls += 1
        self._admit(plan)
        for copy in plan.copies:
            self._memory[self._slots(copy.target)] = self._memory[self._slots(copy.source)]
        work = [(self._updated_row(item), item) for item in plan.scheduled]
        self._check_writes(work)
        for row, item in work:
            self._store(row, item)
        if self._faults.raises(call):
            for row, item in work:
                self._ruin(row, item)
            raise InjectedFault(f"Call {call} of the fake runner was told to fail.")
        for row, item in work:
            self._read_back(row, item)
        return self._results(call, work)

    def _admit(self, plan: SchedulerOutput) -> None:
        for sequence_id in plan.released:
            if self._rows.pop(sequence_id, None) is None:
                raise InvariantError(f"Sequence {sequence_id} is released, but was not known.")
        for new in plan.new:
            if new.sequence_id in self._rows:
                raise InvariantError(f"Sequence {new.sequence_id} is new, but was known already.")
            self._rows[new.sequence_id] = _Row(new, self._vocab_size)
        if len({item.sequence_id for item in plan.scheduled}) < len(plan.scheduled):
            raise InvariantError("A sequence is scheduled twice in one plan.")

    def _updated_row(self, item: ScheduledSequence) -> "_Row":
        row = self._rows.get(item.sequence_id)
        if row is None:
            raise InvariantError(f"Sequence {item.sequence_id} is scheduled, but was never new.")
        row.update(item)
        if len(row.block_table) * self._block_size < item.start + len(item.token_ids):
            raise InvariantError(f"The block table does not cover all tokens: {row.story}.")
        if not all(0 <= block_id < self._num_blocks for block_id in row.block_table):
            raise InvariantError(f"The block table leaves the pool: {row.story}.")
        return row

    def _check_writes(self, work: Sequence[tuple["_Row", ScheduledSequence]]) -> None:
        """A block that is written has one holder; blocks that are shared are only read.

        The tables of sequences that this plan does not schedule may be out of date; whoever loses
        a block to another notices when it next reads it.
        """
        holders = Counter(block_id for row, _ in work for block_id in row.block_table)
        for row, item in work:
            first = item.start // self._block_size
            last = (item.start + len(item.token_ids) - 1) // self._block_size
            for block_id in row.block_table[first : last + 1]:
                if holders[block_id] > 1:
                    raise InvariantError(
                        f"Sequence {row.sequence_id} writes block {block_id}, which is in "
                        f"{holders[block_id]} block tables.",
                        story="; ".join(other.story for other in self._rows.values()),
                    )

    def _store(self, row: "_Row", item: ScheduledSequence) -> None:
        for position in range(item.start, item.start + len(item.token_ids)):
            self._memory[self._slot(row, position)] = row.digests[position]

    def _ruin(self, row: "_Row", item: ScheduledSequence) -> None:
        for position in range(item.start, item.start + len(item.token_ids)):
            self._memory[self._slot(row, position)] = _RUINED

    def _read_back(self, row: "_Row", item: ScheduledSequence) -> None:
        for position in range(item.start + len(item.token_ids)):
            slot = self._slot(row, position)
            found = self._memory[slot]
            if found != row.digests[position]:
                what = {_UNWRITTEN: "nothing", _RUINED: "what failed work left"}.get(
                    found, "the KV of other tokens"
                )
                raise InvariantError(
                    f"Sequence {row.sequence_id} found {what} in block "
                    f"{slot // self._block_size} at its token {position}.",
                    story=row.story,
                )

    def _results(
        self, call: int, work: Sequence[tuple["_Row", ScheduledSequence]]
    ) -> ModelRunnerOutput:
        sampled: dict[SequenceId, tuple[TokenId, ...]] = {}
        logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[SequenceId, tuple[TokenLogprobs, ...]] = {}
        failed: dict[SequenceId, RequestError] = {}
        for row, item in work:
            sequence_id = item.sequence_id
            if self._faults.fails(call, sequence_id):
                self._ruin(row, item)
                failed[sequence_id] = GenerationError(
                    "The fake runner was told to fail this sequence."
                )
                continue
            if scores := row.score_prompt(item):
                prompt_logprobs[sequence_id] = scores
            if item.samples:
                before = self._memory[self._slot(row, len(row.token_ids) - 1)]
                for branch in (row, *self._forks(row, item)):
                    name = branch.sequence_id
                    sampled[name] = branch.choose(before, self._run_length(before))
                    if branch.sampling.logprobs is not None:
                        logprobs[name] = branch.score_chosen(before)
        return ModelRunnerOutput(sampled, logprobs, prompt_logprobs, failed)

    def _forks(self, row: "_Row", item: ScheduledSequence) -> list["_Row"]:
        rows = [self._rows[sequence_id] for sequence_id in item.forks]
        if any(fork.token_ids != row.token_ids or fork.block_table for fork in rows):
            raise InvariantError(f"A fork has other tokens, or blocks already: {row.story}.")
        return rows

    def _slot(self, row: "_Row", position: int) -> int:
        block_id = row.block_table[position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _slots(self, block_id: BlockId) -> slice:
        if not 0 <= block_id < self._num_blocks:
            raise InvariantError(f"Block {block_id} of a copy is outside the pool.")
        return slice(block_id * self._block_size, (block_id + 1) * self._block_size)


class _Row:
    """What the fake runner expects of one sequence."""

    def __init__(self, new: NewSequence, vocab_size: int) -> None:
        self.sequence_id = new.sequence_id
        self._vocab_size = vocab_size
        self.sampling = new.sampling
        self.block_table: list[BlockId] = []
        self.token_ids = [*new.prompt_token_ids, *new.output_token_ids]
        self.digests: list[Digest] = []
        """Of the sequence up to and with each token."""
        self._new = new
        self._chosen: tuple[TokenId, ...] = ()
        """The token sampled last, until a plan names it."""
        self._extend_digests()

    @property
    def story(self) -> str:
        """Describe the row for an error."""
        return f"sequence {self.sequence_id}, tokens {self.token_ids}, blocks {self.block_table}"

    def update(self, item: ScheduledSequence) -> None:
        """Take over block ids and the token sampled last; check that the rest is known."""
        if item.first_block > len(self.block_table):
            raise InvariantError(f"Blocks from {item.first_block} on leave a gap: {self.story}.")
        if item.block_ids:
            self.block_table[item.first_block :] = item.block_ids
        stop = item.start + len(item.token_ids)
        if self._chosen and stop > len(self.token_ids):
            if self.sampling.use_beam_search:  # the search chooses, from what was scored
                self._chosen = item.token_ids[-1:]
            self.token_ids += self._chosen
            self._chosen = ()
            self._extend_digests()
        if not item.token_ids or item.token_ids != tuple(self.token_ids[item.start : stop]):
            raise InvariantError(
                f"Tokens {item.token_ids} at {item.start} are not those of {self.story}."
            )
        if item.samples and stop != len(self.token_ids):
            raise InvariantError(f"It samples before all its tokens have KV: {self.story}.")

    def choose(self, before: Digest, count: int) -> tuple[TokenId, ...]:
        """Choose and remember the next ``count`` tokens."""
        first = len(self.token_ids) - len(self._new.prompt_token_ids)
        chosen: list[TokenId] = []
        for draw in range(first, first + count):
            token_id = choose_token(
                before,
                draw,
                sampling=self.sampling,
                seed=self._new.seed,
                ending_token_ids=self._new.ending_token_ids,
                vocab_size=self._vocab_size,
            )
            chosen.append(token_id)
            before = digest([token_id], before)
        self._chosen = tuple(chosen)
        return self._chosen

    def score_chosen(self, before: Digest) -> tuple[TokenLogprobs, ...]:
        """Score the tokens that were just chosen."""
        scores = []
        for token_id in self._chosen:
            score = score_token(before, token_id)
            if num_top := self.sampling.logprobs:
                score = replace(score, top=likeliest_tokens(before, self._vocab_size, num_top))
            scores.append(score)
            before = digest([token_id], before)
        return tuple(scores)

    def score_prompt(self, item: ScheduledSequence) -> tuple[TokenLogprobs, ...]:
        """Score the prompt tokens after those of this step, if asked and not done before."""
        if self.sampling.prompt_logprobs is None or self._new.output_token_ids:
            return ()
        prompt = self._new.prompt_token_ids
        stop = min(item.start + len(item.token_ids), len(prompt) - 1)
        return tuple(
            score_token(self.digests[position], prompt[position + 1])
            for position in range(item.start, stop)
        )

    def _extend_digests(self) -> None:
        for token_id in self.token_ids[len(self.digests) :]:
            before = self.digests[-1] if self.digests else _EMPTY
            self.digests.append(digest([token_id], before))
