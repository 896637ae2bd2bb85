"""Queue policies: who runs first and who is preempted last, chosen by name."""

from typing import Final, Protocol, runtime_checkable

from octavo.core.registry import Registry
from octavo.scheduler.sequence import SequenceView


class QueuePolicy(Protocol):
    """Sorts sequences into ranks."""

    def rank(self, sequence: SequenceView) -> tuple[float, ...]:
        """Return the sequence's rank; a lower one runs first and is preempted last.

        It must not change while the sequence lives, and all ranks must compare. Within a rank,
        preempted sequences run first, then who arrived earlier: the scheduler sees to that, so
        no policy can starve or livelock a rank.
        """


@runtime_checkable
class CacheAwarePolicy(QueuePolicy, Protocol):
    """Also orders the head of the queue by what the cache holds at the moment."""

    def urgency(
        self, sequence: SequenceView, num_cached: int, num_passed: int
    ) -> tuple[float, ...]:
        """Return how urgent it is to start a sequence; the lowest is tried first.

        Args:
            sequence: one of the first of its rank that never ran.
            num_cached: leading tokens whose KV is cached now.
            num_passed: sequences behind it in the queue that started before it. Whoever ignores
                this can starve it.
        """


class FirstComeFirstServed:
    """Everyone has the same rank, so the order is that of arrival."""

    def rank(self, sequence: SequenceView) -> tuple[float, ...]:
        """Return an empty rank."""
        return ()


class ByPriority:
    """The request's priority is its rank (vLLM's ``priority``: lower runs first)."""

    def rank(self, sequence: SequenceView) -> tuple[float, ...]:
        """Return the priority."""
        return (sequence.priority,)


MAX_PASSES: Final = 8
"""Starts of others behind it after which a sequence comes first, whatever is cached."""


class LongestMatchFirst:
    """Start first what the cache holds most of, in tokens (``lpm`` in SGLang).

    What is cached is used before it is evicted, and requests with a common prefix run together.
    The bound on fairness: a sequence at the head of the queue is passed over ``MAX_PASSES`` times
    at most, then it is tried before all that are not as far behind; who was passed over so often
    goes in order of arrival. SGLang has no such bound, but gives up the order when the queue is
    long.
    """

    def rank(self, sequence: SequenceView) -> tuple[float, ...]:
        """Return an empty rank: victims are chosen as with ``fcfs``."""
        return ()

    def urgency(
        self, sequence: SequenceView, num_cached: int, num_passed: int
    ) -> tuple[float, ...]:
        """Return the overdue first, then the longest match."""
        return (0,) if num_passed >= MAX_PASSES else (1, -num_cached)


QUEUE_POLICIES: Final[Registry[QueuePolicy]] = Registry(
    "--scheduling-policy",
    ("rank",),
    {
        "fcfs": FirstComeFirstServed,
        "priority": ByPriority,
        "cache-aware": LongestMatchFirst,
    },
)
