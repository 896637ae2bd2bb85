"""A runner that remembers what was written where, and shortcuts to drive a scheduler with it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from octavo.core.clock import ManualClock
from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.errors import GenerationError
from octavo.core.ids import BlockId, RequestId, SequenceId, TokenId
from octavo.core.plan import ModelRunnerOutput, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.core.request import (
    CacheIdentity,
    FinishReason,
    Request,
    RequestStats,
    SequenceOutput,
    TokenLogprobs,
)
from octavo.core.sampling import SamplingParams
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.beam_search import BeamSearch, Hypothesis
from octavo.scheduler.outcome import StepUpdate
from octavo.scheduler.scheduler import Scheduler

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="float32")
STEP_S = 0.01


def chain(before: int, token: TokenId) -> int:
    """Stand for the KV of a token: a number that depends on all tokens up to it."""
    return hash((before, token))


def next_token(kv: int, vocab_size: int) -> TokenId:
    """Return the token that the oracle chooses after KV ``kv``."""
    return kv % vocab_size


def expected_output(
    prompt: Sequence[TokenId],
    num_tokens: int,
    vocab_size: int,
    ends: frozenset[TokenId] = frozenset(),
) -> list[TokenId]:
    """Return what the oracle generates for an undisturbed, uncached, whole prompt."""
    kv = 0
    for token in prompt:
        kv = chain(kv, token)
    output: list[TokenId] = []
    while len(output) < num_tokens:
        output.append(next_token(kv, vocab_size))
        kv = chain(kv, output[-1])
        if output[-1] in ends:
            break
    return output


@dataclass
class Row:
    """What a runner keeps for a sequence."""

    new: NewSequence
    token_ids: list[TokenId]
    table: list[BlockId] = field(default_factory=list)


def completion(request_id: str, index: int) -> str:
    """Return the name of a completion: that of its request for the first."""
    return f"{request_id}#{index}" if index else request_id


class PagedOracle:
    """Executes plans on paged memory and asserts that every KV it reads is the right one.

    So a plan that reuses an evicted, overwritten or foreign block, skips a token, or hides a
    change of the block table fails here, where a real model would only answer strangely.
    """

    def __init__(
        self,
        block_size: int,
        vocab_size: int = 97,
        *,
        choose: Callable[[Row, int], TokenId] | None = None,
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.memory: dict[tuple[BlockId, int], int] = {}
        self.rows: dict[SequenceId, Row] = {}
        self.num_computed_total = 0
        self.failing: dict[SequenceId, str] = {}
        self._choose = choose or (lambda row, kv: next_token(kv, vocab_size))

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Release, compute and sample as planned."""
        for sequence_id in plan.released:
            del self.rows[sequence_id]
        for copy in plan.copies:
            for slot in range(self.block_size):
                self.memory.pop((copy.target, slot), None)
                if (copy.source, slot) in self.memory:
                    self.memory[copy.target, slot] = self.memory[copy.source, slot]
        for new in plan.new:
            assert new.sequence_id not in self.rows
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self.rows[new.sequence_id] = Row(new, tokens)
        result = ModelRunnerOutput({}, {}, {}, {})
        for item in plan.scheduled:
            self._execute_one(item, result)
        return result

    def _execute_one(self, item: ScheduledSequence, result: ModelRunnerOutput) -> None:
        row = self.rows[item.sequence_id]
        end = item.start + len(item.token_ids)
        if row.new.sampling.use_beam_search and end == len(row.token_ids) + 1:
            row.token_ids.append(item.token_ids[-1])
        assert list(item.token_ids) == row.token_ids[item.start : end]
        assert item.first_block <= len(row.table), "the diff leaves a gap"
        row.table[item.first_block :] = item.block_ids
        kvs = self._read(row, item.start)
        scores = []
        for position, token in enumerate(item.token_ids, item.start):
            kvs.append(chain(kvs[-1] if kvs else 0, token))
            self.memory[self._slot(row, position)] = kvs[-1]
            if position + 1 < len(row.new.prompt_token_ids):
                scores.append(score(kvs[-1], row.token_ids[position + 1]))
        self.num_computed_total += len(item.token_ids)
        if item.sequence_id in self.failing:
            result.failed[item.sequence_id] = GenerationError(self.failing[item.sequence_id])
            return
        if row.new.sampling.prompt_logprobs is not None:
            result.prompt_logprobs[item.sequence_id] = tuple(scores)
        if item.samples:
            assert end == len(row.token_ids)
            for name in (item.sequence_id, *item.forks):
                self._sample(self.rows[name], kvs[-1], result)

    def _sample(self, row: Row, kv: int, result: ModelRunnerOutput) -> None:
        sampling = row.new.sampling
        token = self._choose(row, kv)
        if not sampling.use_beam_search:  # a search chooses itself
            row.token_ids.append(token)
        result.sampled[row.new.sequence_id] = (token,)
        if sampling.logprobs is not None:
            entry = score(kv, token)
            if sampling.logprobs:
                entry = replace(entry, top=likeliest(kv, self.vocab_size, sampling.logprobs))
            result.logprobs[row.new.sequence_id] = (entry,)

    def _read(self, row: Row, num_tokens: int) -> list[int]:
        kvs: list[int] = []
        for position in range(num_tokens):
            kvs.append(chain(kvs[-1] if kvs else 0, row.token_ids[position]))
            found = self.memory.get(self._slot(row, position))
            assert found == kvs[-1], f"wrong KV at position {position} of {row.new.sequence_id}"
        return kvs

    def _slot(self, row: Row, position: int) -> tuple[BlockId, int]:
        return row.table[position // self.block_size], position % self.block_size


def score(kv: int, token: TokenId) -> TokenLogprobs:
    """Return the oracle's logprob of a token after KV ``kv``."""
    return TokenLogprobs(token, -float(hash((kv, token, 7)) % 1000) / 100, rank=1)


def likeliest(kv: int, vocab_size: int, count: int) -> tuple[tuple[TokenId, float], ...]:
    """Return the tokens that the oracle finds likeliest after KV ``kv``."""
    scores = [(token, score(kv, token).logprob) for token in range(vocab_size)]
    return tuple(sorted(scores, key=lambda item: (-item[1], item[0]))[:count])


def kv_of(tokens: Iterable[TokenId]) -> int:
    """Return what stands for the KV of the last of some tokens."""
    kv = 0
    for token in tokens:
        kv = chain(kv, token)
    return kv


def search_alone(
    vocab_size: int,
    prompt: Sequence[TokenId],
    *,
    max_tokens: int,
    ends: Iterable[TokenId] = (),
    **asked: object,
) -> list[Hypothesis]:
    """Run a beam search on the oracle's scores, without scheduler or cache."""
    sampling = SamplingParams(use_beam_search=True, temperature=0.0, **asked)  # type: ignore[arg-type]
    search = BeamSearch(SequenceId(0), sampling, max_tokens, frozenset(ends))
    tokens = {SequenceId(0): list(prompt)}
    while tokens:
        scores = {
            name: TokenLogprobs(0, 0.0, 1, likeliest(kv_of(ids), vocab_size, search.num_candidates))
            for name, ids in tokens.items()
        }
        beams = {SequenceId(index): beam for index, beam in enumerate(search.advance(scores))}
        tokens = {
            name: [*tokens[beam.parent], beam.tokens[-1].token_id] for name, beam in beams.items()
        }
        search.place(beams)
    return search.best()


class Harness:
    """A scheduler with debug checks, the oracle, a clock, and what each request got."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 97,
        max_model_len: int = 512,
        max_num_batched_tokens: int = 256,
        max_num_seqs: int = 8,
        policy: str = "fcfs",
        batching: str = "continuous",
        caching: bool = True,
        chunked: bool = True,
        threshold: int = 0,
        watermark: float = 0.0,
        end_token_ids: Iterable[TokenId] = (),
        manager: KVCacheManager | None = None,
        choose: Callable[[Row, int], TokenId] | None = None,
    ) -> None:
        self.manager = manager or KVCacheManager(
            CacheConfig(
                num_blocks=num_blocks,
                block_size=block_size,
                enable_prefix_caching=caching,
                watermark=watermark,
            )
        )
        self.config = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            policy=policy,
            batching_policy=batching,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=threshold,
            end_token_ids=frozenset(end_token_ids),
            vocab_size=vocab_size,
        )
        self.clock = ManualClock()
        self.scheduler = Scheduler(self.config, self.manager, debug=True)
        self.oracle = PagedOracle(self.manager.config.block_size, vocab_size, choose=choose)
        self.plans: list[SchedulerOutput] = []
        self.updates: list[StepUpdate] = []
        self.tokens: dict[str, list[TokenId]] = {}
        self.outputs: dict[str, list[SequenceOutput]] = {}
        self.finished: dict[str, RequestStats] = {}

    def add(
        self,
        request_id: str,
        prompt: Sequence[TokenId],
        *,
        priority: int = 0,
        arrival_time: float | None = None,
        identity: CacheIdentity = IDENTITY,
        **sampling: object,
    ) -> None:
        """Queue a request; sampling parameters by name, seed 0 unless given."""
        self.scheduler.add(
            Request(
                RequestId(request_id),
                tuple(prompt),
                SamplingParams(**{"seed": 0, "max_tokens": 4, **sampling}),  # type: ignore[arg-type]
                identity,
                self.clock() if arrival_time is None else arrival_time,
                priority,
            )
        )
        self.tokens[request_id] = []
        self.outputs[request_id] = []

    def schedule(self) -> SchedulerOutput:
        """Plan a step."""
        plan = self.scheduler.schedule(self.clock())
        self.plans.append(plan)
        return plan

    def execute(self, plan: SchedulerOutput) -> StepUpdate:
        """Execute a plan and take its results in."""
        result = self.oracle.execute(plan)
        self.clock.advance(STEP_S)
        return self.record(self.scheduler.update(plan, result, self.clock()))

    def record(self, update: StepUpdate) -> StepUpdate:
        """Keep what the requests got."""
        self.updates.append(update)
        for output in update.outputs:
            name = completion(output.request_id, output.index)
            self.outputs.setdefault(name, []).append(output)
            self.tokens.setdefault(name, []).extend(output.new_token_ids)
        for stats in update.finished:
            self.finished[completion(stats.request_id, stats.index)] = stats
        return update

    def step(self) -> StepUpdate:
        """Plan, execute, take in."""
        return self.execute(self.schedule())

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left; return the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.has_work():
                return steps
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps")

    def abort(self, request_id: str) -> tuple[RequestStats, ...]:
        """Abort a request and keep its statistics."""
        ended = self.scheduler.abort(RequestId(request_id), self.clock())
        for stats in ended:
            self.finished[completion(request_id, stats.index)] = stats
        return ended

    def reason(self, request_id: str) -> FinishReason:
        """Return why a request ended."""
        return self.finished[request_id].finish_reason

    def cached(self, request_id: str) -> int:
        """Return the cached prompt tokens of a finished request."""
        return self.finished[request_id].num_cached_tokens

    def assert_idle(self) -> None:
        """Nothing lives, nothing is used, and the runner keeps no row after one more plan."""
        assert not self.scheduler.has_work()
        usage = self.manager.usage()
        assert usage.num_used == 0
        assert usage.num_free + usage.num_cached == usage.num_total
        plan = self.schedule()
        self.oracle.execute(plan)
        assert not self.oracle.rows
