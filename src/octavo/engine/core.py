"""One step: plan it, compute it, take in what came of it."""

import logging
from typing import Final

from octavo.core.clock import Clock
from octavo.core.errors import GenerationError, InvariantError
from octavo.core.events import Observer, SchedulerStats, StateChanged, StepCompleted
from octavo.core.ids import RequestId
from octavo.core.plan import ModelRunner, SchedulerOutput
from octavo.core.request import Request, RequestStats
from octavo.scheduler.occupancy import KVOccupancy
from octavo.scheduler.outcome import StepUpdate
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

STEP_FAILED: Final = "Computing this request failed on the server, whose log says why."
"""All that a client is told; what broke is the operator's business."""


class EngineCore:
    """The scheduler and the runner, driven from one thread."""

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, clock: Clock, observer: Observer
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._observer = observer

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it can never run; nothing has changed.
        """
        self._scheduler.add(request)
        self._observer.on_event(StateChanged(self._scheduler.stats()))

    def abort(self, request_id: RequestId) -> tuple[RequestStats, ...]:
        """Drop a request at whatever point it is; nothing if it is not (or no longer) here."""
        stats = self._scheduler.abort(request_id, self._clock())
        self._observer.on_event(StateChanged(self._scheduler.stats()))
        return stats

    def finish(self, request_id: RequestId, num_tokens: int, index: int = 0) -> RequestStats | None:
        """End a completion whose text hit a stop string after ``num_tokens`` tokens of output."""
        now = self._clock()
        stats = self._scheduler.finish(request_id, num_tokens=num_tokens, now=now, index=index)
        self._observer.on_event(StateChanged(self._scheduler.stats()))
        return stats

    def set_eviction_policy(self, name: str) -> None:
        """Switch the KV cache to another eviction policy between steps.

        Raises:
            SettingError: the name is not known, or a user's policy fails to take over; the old
                policy stays in force.
        """
        self._scheduler.set_eviction_policy(name)
        self._observer.on_event(StateChanged(self._scheduler.stats()))

    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work()

    def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and totals."""
        return self._scheduler.stats()

    def occupancy(self) -> KVOccupancy:
        """Measure how the KV memory is spent: tokens held, and waste."""
        return self._scheduler.occupancy()

    def step(self) -> StepUpdate:
        """Compute one step.

        Raises:
            InvariantError: a bug in scheduling or in the runner; the engine cannot go on.
        """
        started = self._clock()
        plan = self._scheduler.schedule(started)
        update = self._execute(plan)
        self._report(started, plan, update)
        return update

    def _execute(self, plan: SchedulerOutput) -> StepUpdate:
        try:
            result = self._runner.execute(plan)
        except InvariantError:  # KV may be corrupt: going on could answer with another's text
            raise
        except Exception:  # whatever broke, only this plan's sequences pay for it
            logger.exception("Step %d failed.", plan.step)
            return self._scheduler.fail(plan, GenerationError(STEP_FAILED), self._clock())
        return self._scheduler.update(plan, result, self._clock())

    def _report(self, started: float, plan: SchedulerOutput, update: StepUpdate) -> None:
        now = self._clock()
        self._observer.on_event(
            StepCompleted(
                time=now,
                duration_s=now - started,
                num_prompt_tokens=update.num_prompt_tokens,
                num_generation_tokens=update.num_generation_tokens,
                first_token_latencies_s=update.first_token_latencies_s,
                inter_token_latencies_s=update.inter_token_latencies_s,
                stats=self._scheduler.stats(),
            )
        )
