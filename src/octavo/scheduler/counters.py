"""Running totals of the scheduler."""

from octavo.core.events import SchedulerStats
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.sequence import Sequence


class Counters:
    """Totals that only grow; prefix hits of resumed sequences are kept apart."""

    __slots__ = (
        "_preempted_hits",
        "_preempted_queries",
        "_prefix_hits",
        "_prefix_queries",
        "preemptions_total",
    )

    def __init__(self) -> None:
        self.preemptions_total = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._preempted_queries = 0
        self._preempted_hits = 0

    def count_lookup(self, sequence: Sequence, num_hit: int, *, is_first: bool) -> None:
        """Count one admission that looked for a cached prefix; tokens, not requests."""
        if is_first:
            self._prefix_queries += sequence.num_tokens
            self._prefix_hits += num_hit
        else:
            self._preempted_queries += sequence.num_tokens
            self._preempted_hits += num_hit

    def stats(self, num_running: int, num_waiting: int, cache: KVCacheManager) -> SchedulerStats:
        """Return the totals with the given state."""
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            usage=cache.usage(),
            preemptions_total=self.preemptions_total,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
            preempted_queries_total=self._preempted_queries,
            preempted_hits_total=self._preempted_hits,
            evictions_total=cache.evictions_total,
            eviction=cache.eviction_totals(),
        )
