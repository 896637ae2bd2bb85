"""Who gives up its blocks when a running sequence needs one and none can be had."""

from collections.abc import Iterable
from typing import TypeVar

from octavo.scheduler.policies import QueuePolicy
from octavo.scheduler.sequence import SequenceView

ViewT = TypeVar("ViewT", bound=SequenceView)


class WorstRankedLast:
    """The victim has the worst rank; among equals it arrived last.

    The order is total and does not change, so the best running sequence is never the victim while
    another runs: it keeps its blocks until it finishes, then the next one does, and so on. That
    is the guarantee of progress.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy

    def victim(self, running: Iterable[ViewT]) -> ViewT:
        """Return the one of ``running``, which is not empty, to preempt."""
        return max(running, key=self._key)

    def _key(self, view: SequenceView) -> tuple[tuple[float, ...], float, int, int]:
        return self._policy.rank(view), view.arrival_time, view.place, view.sequence_id
