"""In which order waiting sequences are tried: that of the queue, or by what is cached of them."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.policies import CacheAwarePolicy, QueuePolicy
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.sequence import Sequence

WINDOW: Final = 32
"""Sequences at the head of the queue that a cache-aware policy chooses among; bounds its cost."""


class TryOrder:
    """Yields candidates to start, and counts who was passed over.

    Preempted sequences go first, and a rank is never left for another. Within a rank a cache-aware
    policy may reorder the head of the queue by its ``urgency``.
    """

    def __init__(self, policy: QueuePolicy, num_cached: Callable[[Sequence], int]) -> None:
        self._policy = policy
        self._num_cached = num_cached
        self._window: list[Sequence] = []

    def candidates(self, queue: WaitingQueue, limit: int) -> Iterable[Sequence]:
        """Return the first ``limit`` of the queue, or a cache-aware policy's ``WINDOW`` of them.

        The one that was just taken may leave the queue meanwhile.
        """
        if not isinstance(self._policy, CacheAwarePolicy):
            return islice(queue, limit)
        self._window = list(islice(queue, WINDOW))
        if len(self._window) < 2:
            return tuple(self._window)
        return sorted(self._window, key=self._key)  # stable: ties stay in queue order

    def started(self, sequence: Sequence) -> None:
        """Note that a sequence starts before those that were ahead of it in the queue."""
        for other in self._window:
            if other is sequence:
                return
            if other.status is SequenceStatus.WAITING:
                other.num_passed += 1

    def _key(self, sequence: Sequence) -> tuple[tuple[float, ...], bool, tuple[float, ...]]:
        rank = self._policy.rank(sequence)
        if sequence.status is SequenceStatus.PREEMPTED:
            return rank, False, ()
        assert isinstance(self._policy, CacheAwarePolicy)
        num_cached = self._num_cached(sequence)
        return rank, True, self._policy.urgency(sequence, num_cached, sequence.num_passed)
