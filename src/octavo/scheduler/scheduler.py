"""Decides, step by step, which tokens of which sequences are computed."""

from collections.abc import Mapping
from itertools import chain, islice
from types import MappingProxyType

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvalidRequestError, InvariantError
from octavo.core.events import SchedulerStats
from octavo.core.ids import RequestId, SequenceId
from octavo.core.plan import ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from octavo.core.request import FinishReason, Request, RequestStats
from octavo.kvcache.manager import CacheHit, KVCacheManager
from octavo.scheduler.admission import AdmissionPolicy, Watermark
from octavo.scheduler.chunking import Chunking
from octavo.scheduler.counters import Counters
from octavo.scheduler.draft import StepDraft
from octavo.scheduler.intake import Intake
from octavo.scheduler.invariants import check_plan, check_scheduler
from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.outcome import StepOutcome, StepUpdate
from octavo.scheduler.policies import QUEUE_POLICIES, QueuePolicy
from octavo.scheduler.preemption import WorstRankedLast
from octavo.scheduler.prefix_wait import PrefixWait
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.sequence import Sequence


class Scheduler:
    """Continuous batching without phases: ``num_computed`` catches up with ``num_tokens``.

    A step spends one token budget: decodes first, then prefills under way, then preempted and new
    sequences. ``schedule`` and ``update`` (or ``fail``) alternate; ``add``, ``abort`` and
    ``finish`` may come between any two calls, also while a plan is being executed: the results of
    sequences that left meanwhile are dropped.

    Args:
        config: limits and the queue policy's name.
        cache: the door to the KV cache; this scheduler is its only user.
        policy: a queue policy in place of the named one.
        admission: an admission policy in place of the watermark of the cache's settings.
        debug: check all invariants after each step.

    Raises:
        SettingError: the policy's name is not known.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: KVCacheManager,
        *,
        policy: QueuePolicy | None = None,
        admission: AdmissionPolicy | None = None,
        debug: bool = False,
    ) -> None:
        policy = policy or QUEUE_POLICIES.create(config.policy)
        num_reserved = int(cache.config.watermark * cache.config.num_blocks)
        self._config = config
        self._cache = cache
        self._debug = debug
        self._intake = Intake(config, cache.num_slots)
        self._admission = admission or Watermark(num_reserved)
        self._preemption = WorstRankedLast(policy)
        self._chunking = Chunking(config)
        self._prefix_wait = PrefixWait(cache.config.block_size)
        self._waiting = WaitingQueue(policy)
        self._running: dict[SequenceId, Sequence] = {}
        self._live: dict[RequestId, Sequence] = {}
        self._released: list[SequenceId] = []
        self._in_flight: SchedulerOutput | None = None
        self._counters = Counters()
        self._next_id = 0
        self._step = 0

    @property
    def running(self) -> Mapping[SequenceId, Sequence]:
        """All and only sequences with status RUNNING, in order of start; to be read only."""
        return MappingProxyType(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """All and only sequences that wait or are preempted, in queue order; to be read only."""
        return tuple(self._waiting)

    @property
    def live(self) -> Mapping[RequestId, Sequence]:
        """All sequences that have not ended; to be read only."""
        return MappingProxyType(self._live)

    @property
    def cache(self) -> KVCacheManager:
        """The KV cache, to be read only."""
        return self._cache

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthError: it can never fit the context or the KV cache.
            InvalidRequestError: a parameter is wrong, or its id is that of a live request.
        """
        if request.request_id in self._live:
            raise InvalidRequestError(
                f"Request id {request.request_id!r} is in use by a request that has not ended.",
                param="request_id",
            )
        max_tokens = self._intake.resolve_max_tokens(request)
        ending = self._intake.ending_token_ids(request)
        sequence = Sequence(SequenceId(self._next_id), request, max_tokens, ending)
        self._next_id += 1
        self._live[request.request_id] = sequence
        self._waiting.push(sequence)

    def abort(self, request_id: RequestId, now: float) -> RequestStats | None:
        """End a request whose client gave up; None if it is not live (idempotent)."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        return self._end(sequence, FinishReason.ABORT, now, sequence.num_output_tokens)

    def finish(self, request_id: RequestId, *, num_tokens: int, now: float) -> RequestStats | None:
        """End a request whose front end found a stop string; None if it is not live.

        Args:
            num_tokens: output tokens that the client got.
            now: seconds on the engine's clock.
        """
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        return self._end(sequence, FinishReason.STOP, now, num_tokens)

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step.

        Raises:
            InvariantError: the last plan was neither updated nor failed.
        """
        if self._in_flight is not None:
            raise InvariantError(f"step {self._step} was not taken in before the next was planned")
        draft = StepDraft(self._config.max_num_batched_tokens)
        decodes, prefills = self._split_running()
        for sequence in decodes:
            self._continue(sequence, 1, draft)
        self._continue_prefills(prefills, draft)
        if not draft.has_preempted:
            self._start_waiting(prefills, draft, now)
        self._top_up(prefills, draft)
        return self._make_plan(draft)

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Take in what the runner computed for ``plan``.

        Raises:
            InvariantError: ``plan`` is not the one under way, or the result lacks a part.
        """
        self._take_in_flight(plan)
        outcome = StepOutcome(now)
        for item in plan.scheduled:
            sequence = self._running.get(item.sequence_id)
            if sequence is None:  # it left while the plan was executed
                continue
            error = result.failed.get(item.sequence_id)
            if error is None:
                self._advance(sequence, item, result, outcome, now)
            else:
                self._fail(sequence, error, outcome, now)
        if self._debug:
            check_scheduler(self)
        return outcome.build()

    def fail(self, plan: SchedulerOutput, message: str, now: float) -> StepUpdate:
        """End every sequence of a plan whose execution raised, and nobody else.

        What the step should have computed is not cached.

        Raises:
            InvariantError: ``plan`` is not the one under way.
        """
        self._take_in_flight(plan)
        outcome = StepOutcome(now)
        for item in plan.scheduled:
            sequence = self._running.get(item.sequence_id)
            if sequence is not None:
                self._fail(sequence, message, outcome, now)
        if self._debug:
            check_scheduler(self)
        return outcome.build()

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._live)

    def stats(self) -> SchedulerStats:
        """Return the state and the running totals."""
        return self._counters.stats(len(self._running), len(self._waiting), self._cache)

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running.values():
            is_decode = len(sequence.token_ids) - sequence.num_computed == 1
            (decodes if is_decode else prefills).append(sequence)
        return decodes, prefills

    def _continue(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> None:
        """Place a running sequence, preempting others, or in the end itself, for its blocks."""
        if sequence.status is not SequenceStatus.RUNNING:  # preempted for one before it
            return
        while not self._cache.extend(sequence.sequence_id, sequence.num_computed + num_tokens):
            victim = self._preemption.victim(self._running.values())
            self._preempt(victim, draft)
            if victim is sequence:
                return
        draft.place(sequence, num_tokens)

    def _continue_prefills(self, prefills: list[Sequence], draft: StepDraft) -> None:
        can_start = bool(self._waiting) and len(self._running) < self._config.max_num_seqs
        for index, sequence in enumerate(prefills, start=1):
            size = self._chunking.first(
                sequence.num_uncomputed,
                draft.budget.left,
                others_behind=can_start or index < len(prefills),
            )
            if size:
                self._continue(sequence, size, draft)

    def _top_up(self, prefills: list[Sequence], draft: StepDraft) -> None:
        """Give prefills what nobody behind them used; never at the price of a preemption."""
        for sequence in prefills:
            if not draft.budget.left:
                return
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            placed = draft.counts.get(sequence.sequence_id, 0)
            size = self._chunking.more(sequence.num_uncomputed, placed, draft.budget.left)
            target = sequence.num_computed + placed + size
            if size > 0 and self._cache.extend(sequence.sequence_id, target):
                draft.place(sequence, size)

    def _start_waiting(self, prefills: list[Sequence], draft: StepDraft, now: float) -> None:
        """Start waiting sequences in order until one does not fit.

        Those that wait for a prefix are passed over; how many are looked at is bounded.
        """
        for sequence in islice(self._waiting, 2 * self._config.max_num_seqs):
            if not draft.budget.left or len(self._running) >= self._config.max_num_seqs:
                return
            if self._prefix_wait.is_held(sequence):
                continue
            hit = self._look_up(sequence)
            if self._may_share(sequence) and self._prefix_wait.hold(
                sequence, hit.num_tokens, chain(prefills, draft.started)
            ):
                continue
            size = self._chunking.first(
                sequence.num_tokens - hit.num_tokens, draft.budget.left, others_behind=False
            )
            if not size or not self._admit(sequence, hit):
                return
            self._start(sequence, hit, now)
            draft.start(sequence, size)

    def _may_share(self, sequence: Sequence) -> bool:
        """Whether it may read the cache: prompt logprobs need every position computed."""
        return self._cache.config.enable_prefix_caching and not sequence.wants_prompt_logprobs

    def _look_up(self, sequence: Sequence) -> CacheHit:
        return self._cache.match(
            sequence.request.identity,
            sequence.token_ids,
            read_cache=not sequence.wants_prompt_logprobs,
        )

    def _admit(self, sequence: Sequence, hit: CacheHit) -> bool:
        """Take blocks for all tokens that it has, so that no prefill stops half way for room."""
        need = self._cache.need(hit, sequence.num_tokens)
        if self._admission.may_admit(need, len(self._running)) and self._cache.admit(
            sequence.sequence_id, hit, sequence.num_tokens
        ):
            return True
        if not self._running:
            raise InvariantError("a sequence does not fit an idle cache", story=sequence.tell())
        return False

    def _start(self, sequence: Sequence, hit: CacheHit, now: float) -> None:
        self._waiting.remove(sequence)
        is_first = sequence.first_scheduled_time is None
        sequence.move(SequenceStatus.RUNNING, f"step {self._step + 1}, {hit.num_tokens} cached")
        sequence.num_computed = hit.num_tokens
        if is_first:
            sequence.first_scheduled_time = now
            sequence.num_cached_tokens = hit.num_tokens
        if self._may_share(sequence):
            self._counters.count_lookup(sequence, hit.num_tokens, is_first=is_first)
        self._running[sequence.sequence_id] = sequence

    def _preempt(self, victim: Sequence, draft: StepDraft) -> None:
        if len(self._running) == 1:
            raise InvariantError("a sequence alone ran out of blocks", story=victim.tell())
        victim.move(SequenceStatus.PREEMPTED, f"step {self._step + 1}")
        victim.num_computed = 0
        victim.num_preemptions += 1
        self._counters.preemptions_total += 1
        draft.withdraw(victim)
        self._drop(victim)
        self._waiting.push(victim)

    def _drop(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and its row in the runner."""
        self._cache.free(sequence.sequence_id)
        del self._running[sequence.sequence_id]
        self._released.append(sequence.sequence_id)

    def _make_plan(self, draft: StepDraft) -> SchedulerOutput:
        self._step += 1
        scheduled = []
        for sequence_id, num_tokens in draft.counts.items():
            sequence = self._running[sequence_id]
            start, end = sequence.num_computed, sequence.num_computed + num_tokens
            first_block, block_ids = self._cache.take_changes(sequence_id)
            samples = end == len(sequence.token_ids) and sequence.max_tokens > 0
            scheduled.append(
                ScheduledSequence(
                    sequence_id,
                    tuple(sequence.token_ids[start:end]),
                    start,
                    first_block,
                    block_ids,
                    samples,
                )
            )
        plan = SchedulerOutput(
            step=self._step,
            new=draft.new_sequences(),
            scheduled=tuple(scheduled),
            released=tuple(self._released),
        )
        self._released.clear()
        self._in_flight = plan if plan.scheduled else None
        if self._debug:
            check_plan(plan, self._config, self)
            check_scheduler(self)
        return plan

    def _take_in_flight(self, plan: SchedulerOutput) -> None:
        if plan.scheduled and plan is not self._in_flight:
            raise InvariantError(f"plan {plan.step} is not the one under way")
        self._in_flight = None

    def _advance(
        self,
        sequence: Sequence,
        item: ScheduledSequence,
        result: ModelRunnerOutput,
        outcome: StepOutcome,
        now: float,
    ) -> None:
        """Record that the planned tokens are computed, and what was sampled after them."""
        outcome.count_computed(sequence, item)
        sequence.num_computed += len(item.token_ids)
        self._cache.commit(sequence.sequence_id, sequence.token_ids, sequence.num_computed)
        if sequence.wants_prompt_logprobs:
            entries = result.prompt_logprobs.get(item.sequence_id, ())
            sequence.record_prompt_logprobs(item.start, entries)
        reason = None
        if item.samples:
            reason = outcome.add_tokens(sequence, result)
        elif sequence.num_computed == len(sequence.token_ids):
            reason = outcome.add_scored_prompt(sequence)
        if reason is not None:
            stats = self._end(sequence, reason, now, sequence.num_output_tokens)
            outcome.add_finished(stats)

    def _fail(self, sequence: Sequence, error: str, outcome: StepOutcome, now: float) -> None:
        outcome.add_error(sequence, error)
        num_tokens = sequence.num_output_tokens
        outcome.add_finished(self._end(sequence, FinishReason.ERROR, now, num_tokens))

    def _end(
        self, sequence: Sequence, reason: FinishReason, now: float, num_tokens: int
    ) -> RequestStats:
        if sequence.status is SequenceStatus.RUNNING:
            self._drop(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move(SequenceStatus.FINISHED, reason.value)
        del self._live[sequence.request_id]
        return sequence.final_stats(reason, now, num_tokens)
