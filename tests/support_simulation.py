"""A small world drawn from one seed: the real engine core, a fake runner and a virtual clock.

Everything in it is a function of its seed, so a failure is reproduced by its number alone.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.core.clock import ManualClock
from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.errors import InvalidRequestError
from octavo.core.events import NullObserver
from octavo.core.ids import RequestId, SequenceId, TokenId
from octavo.core.plan import ModelRunner, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import (
    CacheIdentity,
    FinishReason,
    Request,
    RequestStats,
    SequenceOutput,
    TokenLogprobs,
)
from octavo.core.sampling import SamplingParams
from octavo.engine.core import STEP_FAILED, EngineCore
from octavo.kvcache.manager import KVCacheManager
from octavo.runner.fake import (
    FakeRunner,
    Faults,
    choose_token,
    digest,
    likeliest_tokens,
    score_token,
)
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.intake import Intake
from octavo.scheduler.invariants import check_scheduler
from octavo.scheduler.outcome import StepUpdate
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.stop import ending_token_ids

FAULTS = ("told to fail", STEP_FAILED)
"""What the message of an injected fault says."""
MAX_DRAIN_STEPS = 3000


def undisturbed_output(
    request: Request, config: SchedulerConfig, num_slots: int
) -> tuple[list[TokenId], FinishReason]:
    """Return what a request generates when it runs alone: a pure function of the request."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    assert sampling.seed is not None
    room = min(config.max_model_len, num_slots + 1) - len(prompt)
    limit = room if sampling.max_tokens is None else sampling.max_tokens
    ending = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ending |= config.end_token_ids
    before, output = digest(prompt), list[TokenId]()
    while len(output) < limit:
        token_id = choose_token(
            before,
            len(output),
            sampling=sampling,
            seed=sampling.seed,
            ending_token_ids=ending,
            vocab_size=config.vocab_size,
        )
        output.append(token_id)
        before = digest([token_id], before)
        if token_id in ending and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


def undisturbed_beams(
    request: Request, config: SchedulerConfig, max_tokens: int
) -> list[tuple[list[TokenId], FinishReason]]:
    """Return what a beam search finds when nothing disturbs it."""
    sampling, root = request.sampling, SequenceId(0)
    if max_tokens == 0:
        return [([], FinishReason.LENGTH)] * sampling.n
    ending = ending_token_ids(sampling, config.end_token_ids)
    search = BeamSearch(root, sampling, max_tokens, ending)
    digests = {root: digest(request.prompt_token_ids)}
    while digests:
        scores = {
            name: TokenLogprobs(
                0, 0.0, 1, likeliest_tokens(before, config.vocab_size, search.num_candidates)
            )
            for name, before in digests.items()
        }
        beams = search.advance(scores)
        named = {SequenceId(index): beam for index, beam in enumerate(beams)}
        digests = {
            name: digest([beam.tokens[-1].token_id], digests[beam.parent])
            for name, beam in named.items()
        }
        search.place(named)
    return [([token.token_id for token in found.tokens], found.reason) for found in search.best()]


def separate(request: Request, index: int) -> Request:
    """Return the request whose only completion is completion ``index`` of this one."""
    sampling = request.sampling
    assert sampling.seed is not None
    is_ranked = sampling.num_reported > sampling.n
    return replace(
        request,
        sampling=replace(
            sampling,
            n=1,
            best_of=None,
            seed=sampling.seed + index,
            logprobs=0 if is_ranked and sampling.logprobs is None else sampling.logprobs,
            prompt_logprobs=None if index else sampling.prompt_logprobs,
        ),
    )


def undisturbed_scores(request: Request) -> tuple[TokenLogprobs | None, ...]:
    """Return the prompt logprobs of a request."""
    prompt = request.prompt_token_ids
    return None, *(score_token(digest(prompt[:i]), prompt[i]) for i in range(1, len(prompt)))


@dataclass
class Tracked:
    """What the world has seen of one completion of a request."""

    request: Request
    """As if it were its only completion."""
    index: int
    expected: list[TokenId]
    expected_reason: FinishReason
    token_ids: list[TokenId] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stats: RequestStats | None = None


class Witness:
    """Stands between the engine and the runner, and checks every plan against the limits."""

    def __init__(
        self, runner: ModelRunner, config: SchedulerConfig, interrupt: Callable[[], None]
    ) -> None:
        self._runner = runner
        self._config = config
        self._interrupt = interrupt
        self.broken: list[str] = []
        """Laws that plans have broken; the engine turns exceptions into failed requests."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Check and pass on."""
        if plan.num_tokens > self._config.max_num_batched_tokens:
            self.broken.append(f"step {plan.step} computes {plan.num_tokens} tokens")
        if len(plan.scheduled) > self._config.max_num_seqs:
            self.broken.append(f"step {plan.step} runs {len(plan.scheduled)} sequences")
        self._interrupt()
        return self._runner.execute(plan)


@dataclass(frozen=True)
class Parts:
    """What a mutation test replaces to prove that the world notices."""

    manager: Callable[[CacheConfig], KVCacheManager] = KVCacheManager
    runner: Callable[[ModelRunner], ModelRunner] = lambda runner: runner


class World:
    """Random settings, arrivals, aborts, early finishes and faults, all drawn from ``seed``."""

    def __init__(self, seed: int, parts: Parts | None = None) -> None:
        parts = parts or Parts()
        self.rng = random.Random(seed)
        self.cache_config, self.config = self._draw_configs()
        self.manager = parts.manager(self.cache_config)
        self.runner = FakeRunner(
            block_size=self.cache_config.block_size,
            num_blocks=self.cache_config.num_blocks,
            vocab_size=self.config.vocab_size,
            faults=self._draw_faults(seed),
            run_length=self._draw_run_length(),
        )
        self.witness = Witness(parts.runner(self.runner), self.config, self._interrupt)
        self.clock = ManualClock()
        self.scheduler = Scheduler(self.config, self.manager, debug=True)
        self.core = EngineCore(self.scheduler, self.witness, self.clock, NullObserver())
        self.tracked: dict[tuple[RequestId, int], Tracked] = {}
        self._branching = self.rng.random() < 0.5
        self.prefixes = [self._draw_tokens(24) for _ in range(self.rng.randint(1, 3))]

    @property
    def live(self) -> list[Tracked]:
        """Completions that have not ended."""
        return [item for item in self.tracked.values() if item.stats is None]

    def run(self) -> None:
        """Live for a while, then drain, checking everything all the way."""
        arrivals = self.rng.choice([0.2, 0.5, 0.7])
        for _ in range(self.rng.randint(5, 20)):
            self.clock.advance(self.rng.choice([0.0, 0.01, 0.01, 1.0, 3600.0]))
            while self.rng.random() < arrivals:
                self.arrive()
            if self.live and self.rng.random() < 0.08:
                self.abort(self.rng.choice(self.live))
            if self.live and self.rng.random() < 0.08:
                self.finish(self.rng.choice(self.live))
            self.step()
        self.drain()

    def arrive(self) -> None:
        """Add one request; a refusal must be for a request that can never run."""
        request = self._draw_request()
        try:
            self.core.add(request)
        except InvalidRequestError:
            if not request.sampling.use_beam_search:
                assert not self._can_run(request), f"{request} was refused but fits"
            return
        assert self._can_run(request), f"{request} was accepted but cannot run"
        for index, (tokens, reason) in enumerate(self._expected(request)):
            item = Tracked(separate(request, index), index, tokens, reason)
            self.tracked[request.request_id, index] = item
        self.check_gauges()

    def _expected(self, request: Request) -> list[tuple[list[TokenId], FinishReason]]:
        num_slots = self.manager.num_slots
        if request.sampling.use_beam_search:
            intake = Intake(self.config, num_slots, self.cache_config)
            return undisturbed_beams(request, self.config, intake.resolve_max_tokens(request))
        return [
            undisturbed_output(separate(request, index), self.config, num_slots)
            for index in range(request.sampling.num_branches)
        ]

    def _interrupt(self) -> None:
        """Now and then a client gives up while its step is being computed."""
        if self.live and self.rng.random() < 0.02:
            self.abort(self.rng.choice(self.live))

    def abort(self, item: Tracked) -> None:
        """The client gives up all completions; a second abort finds nothing."""
        name = item.request.request_id
        ended = self.core.abort(name)
        assert {stats.index for stats in ended} == {
            other.index for other in self.live if other.request.request_id == name
        }
        for stats in ended:
            self._end(self.tracked[name, stats.index], stats, FinishReason.ABORT)
        assert not self.core.abort(name)
        assert self.core.finish(name, len(item.token_ids), item.index) is None
        self.check()

    def finish(self, item: Tracked) -> None:
        """The front end sees a stop string somewhere in what it was given."""
        if not item.token_ids:
            return
        kept = self.rng.randint(1, len(item.token_ids))
        stats = self.core.finish(item.request.request_id, kept, item.index)
        assert stats is not None
        assert stats.num_generation_tokens == kept
        del item.token_ids[kept:]
        self._end(item, stats, FinishReason.STOP)
        self.check()

    def step(self) -> None:
        """One step of the engine, and what it brought."""
        update = self.core.step()
        assert not self.witness.broken, self.witness.broken
        finished = {(stats.request_id, stats.index): stats for stats in update.finished}
        assert len(finished) == len(update.finished)
        self._check_latencies(update)
        for output in update.outputs:
            self._take(output, finished)
        assert not finished, f"{finished} ended without an output"
        self.check_gauges()

    def drain(self) -> None:
        """Run out of work; nothing may be left behind."""
        for _ in range(MAX_DRAIN_STEPS):
            if not self.core.has_work():
                break
            self.clock.advance(0.01)
            self.step()
        assert not self.live, f"{len(self.live)} requests never ended"
        assert not self.core.has_work()
        self.step()  # hands the last releases to the runner
        usage = self.core.stats().usage
        assert usage.num_used == 0
        assert usage.num_free + usage.num_cached == usage.num_total
        assert not self.runner.sequence_ids, "the runner still knows sequences"
        stats = self.core.stats()
        ended = [item.stats for item in self.tracked.values() if item.stats is not None]
        known = sum(item.num_preemptions for item in ended)
        if not any(item.request.sampling.use_beam_search for item in self.tracked.values()):
            assert stats.preemptions_total == known  # beams come and go with theirs
        assert stats.prefix_hits_total <= stats.prefix_queries_total
        assert stats.preempted_hits_total <= stats.preempted_queries_total

    def check(self) -> None:
        """Every law that holds between steps; after a step the scheduler checks them itself."""
        check_scheduler(self.scheduler)
        self.check_gauges()

    def check_gauges(self) -> None:
        """The numbers that operators see agree with what is there."""
        stats = self.core.stats()
        groups = self.scheduler.live.values()
        alive = sum(len([*group.active]) + len(group.pending) for group in groups)
        assert stats.num_running + stats.num_waiting == alive
        assert {item.request.request_id for item in self.live} == set(self.scheduler.live)
        assert stats.num_running <= self.config.max_num_seqs
        usage = stats.usage
        assert usage.num_free + usage.num_cached + usage.num_used == usage.num_total
        assert (usage.num_used == 0) or stats.num_running > 0

    def _take(
        self, output: SequenceOutput, finished: dict[tuple[RequestId, int], RequestStats]
    ) -> None:
        name = (output.request_id, output.index)
        item = self.tracked[name]
        assert item.stats is None, f"{output} came after its request had ended"
        item.token_ids.extend(output.new_token_ids)
        if output.prompt_logprobs is not None:
            assert item.prompt_logprobs is None, "prompt logprobs came twice"
            item.prompt_logprobs = output.prompt_logprobs
        asked = item.request.sampling.logprobs is not None
        assert len(output.new_logprobs) == (len(output.new_token_ids) if asked else 0)
        if output.finish_reason is None:
            assert name not in finished
            return
        if output.finish_reason is FinishReason.ERROR:
            assert output.error is not None
            assert any(fault in output.error.message for fault in FAULTS), output.error
        self._end(item, finished.pop(name), output.finish_reason)

    def _end(self, item: Tracked, stats: RequestStats, reason: FinishReason) -> None:
        assert stats.finish_reason is reason
        assert (stats.request_id, stats.index) == (item.request.request_id, item.index)
        assert item.stats is None, "a request ended twice"
        item.stats = stats
        assert item.token_ids == item.expected[: len(item.token_ids)], (
            f"{item.request} gave {item.token_ids}, not {item.expected}"
        )
        assert stats.num_generation_tokens == len(item.token_ids)
        assert 0 <= stats.num_cached_tokens < max(1, stats.num_prompt_tokens)
        times = (
            stats.arrival_time,
            stats.first_scheduled_time,
            stats.first_token_time,
            stats.last_token_time,
            stats.finish_time,
        )
        known = [time for time in times if time is not None]
        assert known == sorted(known), f"times run backwards: {times}"
        if reason is FinishReason.LENGTH or (reason is FinishReason.STOP and self._ended(item)):
            assert (item.token_ids, reason) == (item.expected, item.expected_reason)
        scored = item.request.sampling.prompt_logprobs is not None
        if item.token_ids or reason is FinishReason.LENGTH:
            expected = undisturbed_scores(item.request) if scored else None
            assert item.prompt_logprobs == expected

    def _can_run(self, request: Request) -> bool:
        """Whether it fits the context, and the pool where its last token needs no KV."""
        num_prompt, sampling = len(request.prompt_token_ids), request.sampling
        num_output = max(1, sampling.min_tokens)
        if sampling.max_tokens is not None:
            num_output = sampling.max_tokens
        in_context = num_prompt + num_output <= self.config.max_model_len
        return in_context and num_prompt + max(0, num_output - 1) <= self.manager.num_slots

    def _ended(self, item: Tracked) -> bool:
        """Whether the engine, and not the front end, ended a request with a stop."""
        return len(item.token_ids) == len(item.expected)

    def _check_latencies(self, update: StepUpdate) -> None:
        """One latency a token: TTFT for the first of a request, a gap for every other."""
        with_tokens = [output for output in update.outputs if output.new_token_ids]
        first = [o for o in with_tokens if not self.tracked[o.request_id, o.index].token_ids]
        num_tokens = sum(len(output.new_token_ids) for output in with_tokens)
        assert len(update.first_token_latencies_s) == len(first)
        assert len(update.inter_token_latencies_s) == num_tokens - len(first)
        assert all(x >= 0 for x in update.first_token_latencies_s + update.inter_token_latencies_s)

    def _draw_configs(self) -> tuple[CacheConfig, SchedulerConfig]:
        rng = self.rng
        max_model_len, block_size = rng.randint(8, 40), rng.choice([1, 2, 3, 4])
        cache = CacheConfig(
            num_blocks=1 + int(rng.uniform(0.7, 1.5) * max_model_len / block_size),
            block_size=block_size,
            enable_prefix_caching=rng.random() < 0.85,
            watermark=rng.choice([0.0, 0.01, 0.3]),
        )
        max_num_seqs = rng.randint(1, 8)
        chunked = rng.random() < 0.85
        least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
        scheduler = SchedulerConfig(
            max_model_len=max_model_len,
            max_num_batched_tokens=least + rng.choice([0, 1, 5, 40]),
            max_num_seqs=max_num_seqs,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=rng.choice([0, 0, 3]) if chunked else 0,
            policy=rng.choice(["fcfs", "priority", "cache-aware"]),
            end_token_ids=frozenset(rng.choice([[], [0], [0, 5]])),
            vocab_size=12,
        )
        return cache, scheduler

    def _draw_run_length(self) -> Callable[[int], int]:
        """In some worlds several tokens come at once, as when a grammar forces them."""
        longest = self.rng.choice((1, 1, 2, 5, 40))
        return lambda before: 1 + before % longest

    def _draw_faults(self, seed: int) -> Faults:
        raises = self.rng.choice([0.0, 0.0, 0.05, 0.2])
        fails = self.rng.choice([0.0, 0.0, 0.05])

        def chance(*key: int) -> float:
            return random.Random(str((seed, *key))).random()

        def fails_now(call: int, sequence_id: SequenceId) -> bool:
            return fails > 0 and chance(call, sequence_id) < fails

        return Faults(raises=lambda call: raises > 0 and chance(call) < raises, fails=fails_now)

    def _draw_tokens(self, count: int) -> tuple[TokenId, ...]:
        return tuple(self.rng.randrange(self.config.vocab_size) for _ in range(count))

    def _draw_request(self) -> Request:
        rng = self.rng
        shared = rng.choice(self.prefixes)[: rng.choice([0, 1, 4, 8, 12, 24])]
        length = rng.choice([0, 1, 2, self.cache_config.block_size, 9])
        return Request(
            request_id=RequestId(f"r{len(self.tracked)}-{rng.random()}"),
            prompt_token_ids=(shared + self._draw_tokens(length)) or (1,),
            sampling=self._draw_sampling(),
            identity=CacheIdentity(
                "model", "tokenizer", "float32", salt=rng.choice(["", "", "other"])
            ),
            arrival_time=self.clock(),
            priority=rng.choice([0, 0, 1, -1]),
        )

    def _draw_sampling(self) -> SamplingParams:
        rng = self.rng
        max_tokens = rng.choice([None, None, 0, 1, 2, 5, 12, 20])
        beams = self._branching and rng.random() < 0.2
        n = rng.choice([1, 1, 2, 3, 5]) if self._branching else 1
        return SamplingParams(
            n=n,
            best_of=rng.choice([None, None, n, n + 1]),
            use_beam_search=beams,
            max_tokens=max_tokens,
            min_tokens=min(rng.choice([0, 0, 3]), 3 if max_tokens is None else max_tokens),
            temperature=0.0 if beams else rng.choice([0.0, 1.0]),
            seed=rng.randrange(2**32),
            stop_token_ids=tuple(rng.choice([[], [7], [7, 9]])),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice([None, None, 1]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
