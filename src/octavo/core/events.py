"""What the engine tells whoever observes it: facts with times, no judgement.

Nobody changes them. Those that every step makes are not frozen, as a frozen dataclass takes about
four times as long to make.
"""

from dataclasses import dataclass
from typing import Protocol

from octavo.core.request import RequestStats


@dataclass(slots=True)
class CacheUsage:
    """Every block is in exactly one of these states."""

    num_total: int
    num_free: int
    """Holding nothing."""
    num_cached: int
    """Holding a cached prefix that nobody uses: can be evicted."""
    num_used: int
    """In a block table."""

    @property
    def used_ratio(self) -> float:
        """Share of the pool that running sequences hold, 0 to 1."""
        return self.num_used / self.num_total


@dataclass(frozen=True, slots=True)
class EvictionTotals:
    """What one eviction policy achieved while it was the one in force; blocks, running totals."""

    policy: str
    """Its name, or ``module:Class``."""
    is_in_force: bool
    switches_total: int
    """Times that it was put in force while serving."""
    evictions_total: int
    unused_evictions_total: int
    """Of them, those that no sequence had taken from the cache: kept for nothing."""
    expected_evictions_total: int
    """Of them, those that a waiting request would have hit: nothing else was left."""
    hits_total: int
    """Blocks that sequences took although nobody was using them: what keeping them earned."""
    saved_tokens_total: int
    """Tokens in those."""


@dataclass(slots=True)
class SchedulerStats:
    """State and running totals of the scheduler after a step."""

    num_running: int
    num_waiting: int
    """In the queue, and branches of running requests whose prompt is not computed yet."""
    usage: CacheUsage
    preemptions_total: int
    prefix_queries_total: int
    """Prompt tokens of first admissions that looked for a cached prefix."""
    prefix_hits_total: int
    """Those of them that were found. Recompute after preemption counts in neither."""
    preempted_queries_total: int
    """The same two for resumed sequences, apart, so that they cannot flatter the hit ratio."""
    preempted_hits_total: int
    evictions_total: int
    """Cached blocks forgotten to make room."""
    eviction: tuple[EvictionTotals, ...] = ()
    """One entry for each policy that was ever in force."""


@dataclass(slots=True)
class StepCompleted:
    """One step of the engine."""

    time: float
    duration_s: float
    num_prompt_tokens: int
    """Prompt tokens computed (recompute included)."""
    num_generation_tokens: int
    """Tokens sampled."""
    first_token_latencies_s: tuple[float, ...]
    """TTFT of each request whose first token came in this step: arrival to first token."""
    inter_token_latencies_s: tuple[float, ...]
    """Gap before each other token of this step."""
    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class StateChanged:
    """Requests came or went between steps; the gauges are these now."""

    stats: SchedulerStats


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A request left the engine, for whatever reason."""

    stats: RequestStats


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """A request was refused before it was accepted (counted apart from finished ones)."""

    status: int


Event = StepCompleted | StateChanged | RequestFinished | RequestRejected


class Observer(Protocol):
    """Receives events on the thread where they happen; must be quick and must not raise."""

    def on_event(self, event: Event) -> None:
        """Take in one event."""


class NullObserver:
    """Observes nothing."""

    def on_event(self, event: Event) -> None:
        """Ignore the event."""
