"""Queue policies: who runs first and who is preempted last, chosen by name."""

from typing import Final, Protocol

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


QUEUE_POLICIES: Final[Registry[QueuePolicy]] = Registry(
    "--scheduling-policy", "rank", {"fcfs": FirstComeFirstServed, "priority": ByPriority}
)
