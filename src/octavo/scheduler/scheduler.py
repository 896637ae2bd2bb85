"""Decides, step by step, which tokens of which sequences are computed."""

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvalidRequestError, InvariantError, RequestError
from octavo.core.events import SchedulerStats
from octavo.core.ids import RequestId, SequenceId
from octavo.core.plan import ModelRunnerOutput, SchedulerOutput
from octavo.core.request import FinishReason, Request, RequestStats
from octavo.kvcache.manager import CacheHit, KVCacheManager
from octavo.scheduler.admission import AdmissionPolicy, Watermark
from octavo.scheduler.batching import BATCHING_POLICIES
from octavo.scheduler.chunking import Chunking
from octavo.scheduler.counters import Counters
from octavo.scheduler.draft import StepDraft
from octavo.scheduler.group import SequenceGroup, make_group
from octavo.scheduler.intake import Intake
from octavo.scheduler.invariants import check_plan, check_scheduler
from octavo.scheduler.occupancy import KVOccupancy, measure_occupancy
from octavo.scheduler.outcome import StepUpdate
from octavo.scheduler.policies import QUEUE_POLICIES, QueuePolicy
from octavo.scheduler.preemption import WorstRankedLast
from octavo.scheduler.prefix_wait import PrefixWait
from octavo.scheduler.reservation import KV_RESERVATIONS
from octavo.scheduler.roster import Roster
from octavo.scheduler.sequence import Sequence
from octavo.scheduler.try_order import TryOrder
from octavo.scheduler.updater import StepUpdater

MAX_DECODE_TOKENS: Final = 16
"""Most tokens of a decode that go before prefills; of a longer forced run the rest waits."""


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
        SettingError: a policy's name is not known.
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
        self._config = config
        self._cache = cache
        self._debug = debug
        self._intake = Intake(config, cache.num_slots, cache.config)
        self._admission = admission or Watermark(cache.config.num_blocks, cache.config.watermark)
        self._preemption = WorstRankedLast(policy)
        self._chunking = Chunking(config)
        self._batching = BATCHING_POLICIES.create(config.batching_policy)
        self._reservation = KV_RESERVATIONS.create(cache.config.kv_reservation)
        self._prefix_wait = PrefixWait(cache.config.block_size)
        self._roster = Roster(cache, policy, config.max_num_seqs)
        self._order = TryOrder(policy, lambda sequence: self._look_up(sequence).num_tokens)
        self._in_flight: SchedulerOutput | None = None
        self._counters = Counters()
        self._step = 0

    @property
    def running(self) -> Mapping[SequenceId, Sequence]:
        """All and only sequences with status RUNNING, in order of start; to be read only."""
        return self._roster.running

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """All sequences that wait or are preempted, in queue order; to be read only.

        Branches that are pending until their prompt is computed are in no queue.
        """
        return tuple(self._roster.queue)

    @property
    def live(self) -> Mapping[RequestId, SequenceGroup]:
        """All requests that have not ended; to be read only."""
        return self._roster.groups

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
        if request.request_id in self._roster.groups:
            raise InvalidRequestError(
                f"Request id {request.request_id!r} is in use by a request that has not ended.",
                param="request_id",
            )
        max_tokens = self._intake.resolve_max_tokens(request)
        ending = self._intake.ending_token_ids(request)
        first_id, places = self._roster.next_id, self._config.max_num_seqs
        self._roster.add(make_group(request, max_tokens, ending, first_id, places))

    def abort(self, request_id: RequestId, now: float) -> tuple[RequestStats, ...]:
        """End a request whose client gave up, with all its completions that have not ended.

        Returns:
            One entry per completion; none if the request is not live (idempotent).
        """
        group = self._roster.groups.get(request_id)
        if group is None:
            return ()
        if group.beam is not None:
            views = group.results()
            self._roster.end_group(group, FinishReason.ABORT.value)
            return tuple(view.final_stats(FinishReason.ABORT, now, 0) for view in views)
        ended = [  # pending ones first, so that none of them is made to compute the prompt
            self._roster.end(branch, FinishReason.ABORT, now, branch.num_output_tokens)
            for branch in reversed(tuple(group.branches))
        ]
        return tuple(reversed(ended))

    def finish(
        self, request_id: RequestId, *, num_tokens: int, now: float, index: int = 0
    ) -> RequestStats | None:
        """End a completion whose front end found a stop string; None if it is not live.

        Args:
            request_id: the request.
            num_tokens: output tokens that the client got.
            now: seconds on the engine's clock.
            index: which of the request's completions.
        """
        group = self._roster.groups.get(request_id)
        branch = None if group is None else group.branch(index)
        if branch is None:
            return None
        return self._roster.end(branch, FinishReason.STOP, now, num_tokens)

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step.

        Raises:
            InvariantError: the last plan was neither updated nor failed.
        """
        if self._in_flight is not None:
            raise InvariantError(f"step {self._step} was not taken in before the next was planned")
        self._cache.advance(now)
        draft = self._draft(now)
        while not draft.counts and self._can_unblock(draft):
            draft = self._draft(now)
        return self._make_plan(draft)

    def update(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Take in what the runner computed for ``plan``.

        Raises:
            InvariantError: ``plan`` is not the one under way, or the result lacks a part.
        """
        self._take_in_flight(plan)
        updater = StepUpdater(self._roster, self._cache, result, now)
        running = self._roster.running
        for item in plan.scheduled:
            sequence = running.get(item.sequence_id)
            if sequence is not None:  # else it left while the plan was executed
                updater.advance(sequence, item)
        return self._finish_step(updater)

    def fail(self, plan: SchedulerOutput, error: RequestError, now: float) -> StepUpdate:
        """End every sequence of a plan whose execution raised, and nobody else.

        What the step should have computed is not cached.

        Raises:
            InvariantError: ``plan`` is not the one under way.
        """
        self._take_in_flight(plan)
        updater = StepUpdater(self._roster, self._cache, ModelRunnerOutput(), now)
        for item in plan.scheduled:
            sequence = self._roster.running.get(item.sequence_id)
            if sequence is not None:
                updater.fail(sequence, item, error)
        return self._finish_step(updater)

    def set_eviction_policy(self, name: str) -> None:
        """Switch the KV cache to another eviction policy; nothing cached is lost.

        Raises:
            SettingError: the name is not known, or a user's policy fails to take over; the old
                policy stays in force.
        """
        self._cache.set_eviction_policy(name)

    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._roster.groups)

    def stats(self) -> SchedulerStats:
        """Return the state and the running totals."""
        roster = self._roster
        return self._counters.stats(len(roster.running), roster.num_waiting, self._cache)

    def occupancy(self) -> KVOccupancy:
        """Measure how the KV memory is spent; not for every step of a server (see there)."""
        next_in_line = next(iter(self._roster.queue), None)
        wanted = 0 if next_in_line is None else self._num_slots(next_in_line)
        return measure_occupancy(self._roster.running.values(), self._cache, wanted)

    def _draft(self, now: float) -> StepDraft:
        draft = StepDraft(self._config.max_num_batched_tokens)
        self._roster.level_beams()
        decodes, prefills = self._split_running()
        cut = self._continue_decodes(decodes, draft)
        self._continue_prefills(prefills, draft)
        if self._roster.queue and not draft.has_preempted and self._may_start():
            self._start_waiting(prefills, draft, now)
        self._top_up(chain(prefills, cut), draft)
        return draft

    def _may_start(self) -> bool:
        """Whether sequences may join; beams that wait for others of their search do not count."""
        running = self._roster.running.values()
        return self._batching.may_start(sum(not sequence.holds_last for sequence in running))

    def _can_unblock(self, draft: StepDraft) -> bool:
        """Make another draft worthwhile after an empty one.

        Beams that resume wait for each other. Those of several searches may hold all the room
        that any of them needs to become complete: then the one of the worst rank starts over.
        """
        if draft.started or draft.has_preempted:
            return True
        stalled = [beam for beam in self._roster.running.values() if beam.holds_last]
        if stalled:
            self._preempt(self._preemption.victim(stalled), draft)
        return bool(stalled)

    def _split_running(self) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Return the decodes, with the tokens that are due in each, and the prefills."""
        decodes: list[tuple[Sequence, int]] = []
        prefills: list[Sequence] = []
        for sequence in self._roster.running.values():
            due = sequence.num_due
            if due == 1 or (due and sequence.num_computed >= sequence.prefill_end):
                decodes.append((sequence, due))
            elif due:
                prefills.append(sequence)
        return decodes, prefills

    def _continue_decodes(
        self, decodes: list[tuple[Sequence, int]], draft: StepDraft
    ) -> list[Sequence]:
        """Place decodes: one token each, or several where a grammar forced them.

        As ``max_num_seqs`` tokens fit the budget, each gets at least one.

        Returns:
            Those that have more tokens due than they got.
        """
        num_behind = len(decodes)
        cut: list[Sequence] = []
        for sequence, due in decodes:
            num_behind -= 1
            size = due
            if due > 1:
                size = min(due, MAX_DECODE_TOKENS, draft.budget.left - num_behind)
                if size < due:
                    cut.append(sequence)
            self._continue(sequence, size, draft)
        return cut

    def _continue(self, sequence: Sequence, num_tokens: int, draft: StepDraft) -> None:
        """Place a running sequence, preempting others, or in the end itself, for its blocks."""
        start = sequence.num_computed
        while sequence.is_running:  # else it was preempted, now or for one before it
            if self._cache.extend(sequence.sequence_id, start + num_tokens, start):
                draft.place(sequence, num_tokens)
                return
            self._preempt(self._preemption.victim(self._roster.running.values()), draft)

    def _continue_prefills(self, prefills: list[Sequence], draft: StepDraft) -> None:
        waiting, places = self._roster.queue, self._config.max_num_seqs
        can_start = bool(waiting) and self._roster.num_taken < places
        for index, sequence in enumerate(prefills, start=1):
            size = self._chunking.first(
                sequence.num_due,
                draft.budget.left,
                others_behind=can_start or index < len(prefills),
            )
            if size:
                self._continue(sequence, size, draft)

    def _top_up(self, running: Iterable[Sequence], draft: StepDraft) -> None:
        """Give those that lag what nobody behind them used; never at the price of a preemption."""
        for sequence in running:
            if not draft.budget.left:
                return
            if not sequence.is_running:
                continue
            placed = draft.counts.get(sequence.sequence_id, 0)
            size = self._chunking.more(sequence.num_due, placed, draft.budget.left)
            start = sequence.num_computed
            if size > 0 and self._cache.extend(sequence.sequence_id, start + placed + size, start):
                draft.place(sequence, size)

    def _start_waiting(self, prefills: list[Sequence], draft: StepDraft, now: float) -> None:
        """Start waiting sequences in order until one does not fit.

        Those that wait for a prefix are passed over; how many are looked at is bounded.
        """
        places = self._config.max_num_seqs
        if not draft.budget.left or self._roster.num_taken >= places:
            return
        for sequence in self._order.candidates(self._roster.queue, 2 * places):
            if not draft.budget.left or self._roster.num_taken + sequence.num_reserved >= places:
                return
            if self._prefix_wait.is_held(sequence):
                continue
            hit = self._look_up(sequence)
            if self._may_share(sequence) and self._prefix_wait.hold(
                sequence, hit.num_tokens, chain(prefills, draft.started)
            ):
                continue
            lag = sequence.num_due - hit.num_tokens
            size = self._chunking.first(lag, draft.budget.left, others_behind=False)
            if (lag and not size) or not self._admit(sequence, hit):
                return
            self._start(sequence, hit, now)
            self._order.started(sequence)
            draft.start(sequence, size)

    def _may_share(self, sequence: Sequence) -> bool:
        """Whether it may read the cache."""
        return self._cache.config.enable_prefix_caching and sequence.may_read_cache

    def _look_up(self, sequence: Sequence) -> CacheHit:
        return self._cache.match(
            sequence.request.identity,
            sequence.token_ids,
            read_cache=sequence.may_read_cache,
            whole_blocks=sequence.holds_last,  # it may not be in the plan that would copy
        )

    def _admit(self, sequence: Sequence, hit: CacheHit) -> bool:
        """Take blocks for all tokens that it has, so that no prefill stops half way for room."""
        num_slots = self._num_slots(sequence)
        need = self._cache.need(hit, num_slots, sequence.num_reserved)
        num_others = len(self._roster.running)
        if sequence.holds_last:  # those of its search that run wait for it
            num_others = self._roster.num_outside(self._roster.group(sequence))
        if self._admission.may_admit(need, num_others) and self._cache.admit(
            sequence.sequence_id, hit, num_slots, sequence.request.retention
        ):
            return True
        if not self._roster.running:
            raise InvariantError("a sequence does not fit an idle cache", story=sequence.tell())
        return False

    def _num_slots(self, sequence: Sequence) -> int:
        """Return the room to take at its start: at least for its tokens, at most the pool."""
        asked = self._reservation.num_slots(sequence, self._config.max_model_len)
        return max(sequence.num_tokens, min(asked, self._cache.num_slots))

    def _start(self, sequence: Sequence, hit: CacheHit, now: float) -> None:
        is_first = sequence.first_scheduled_time is None
        self._roster.start(sequence, hit, f"step {self._step + 1}, {hit.num_tokens} cached")
        if is_first:
            sequence.first_scheduled_time = now
            sequence.num_cached_tokens = hit.num_tokens
        else:
            sequence.prefill_end = max(sequence.num_prompt_tokens, sequence.num_tokens - 1)
        if self._may_share(sequence):
            self._counters.count_lookup(sequence, hit.num_tokens, is_first=is_first)

    def _preempt(self, victim: Sequence, draft: StepDraft) -> None:
        """Preempt a sequence, or all running beams of a search: one alone would hold them up."""
        victims = [victim]
        if victim.in_beam:
            victims = [beam for beam in self._roster.group(victim).branches if beam.is_running]
        if len(victims) == len(self._roster.running):
            raise InvariantError("a request alone ran out of blocks", story=victim.tell())
        for sequence in reversed(victims):
            draft.withdraw(sequence)
            self._roster.preempt(sequence, f"step {self._step + 1}")
            self._counters.preemptions_total += 1

    def _make_plan(self, draft: StepDraft) -> SchedulerOutput:
        self._step += 1
        plan = draft.build(self._step, self._roster, self._cache)
        self._in_flight = plan if plan.scheduled else None
        if self._debug:
            check_plan(plan, self._config, self)
            check_scheduler(self)
        return plan

    def _take_in_flight(self, plan: SchedulerOutput) -> None:
        if plan.scheduled and plan is not self._in_flight:
            raise InvariantError(f"plan {plan.step} is not the one under way")
        self._in_flight = None

    def _finish_step(self, updater: StepUpdater) -> StepUpdate:
        update = updater.build()
        if self._debug:
            check_scheduler(self)
        return update
