"""A cold prefix shared by several requests is computed once: the others wait for it."""

from collections.abc import Iterable

from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.sequence import Sequence


class PrefixWait:
    """Holds a waiting sequence back while a running one computes the next block it needs.

    It waits until that leader has computed all whole blocks that the two share, or has ended or
    been preempted; requests behind it in the queue may start meanwhile. The idea is TensorRT-LLM's
    prefix-aware scheduling.

    The wait is bounded. A running leader gets tokens in every step. After a wait the sequence is
    the first of its kind to be tried, and it waits again only for a longer prefix than before, or
    if the leader ended and one before it in the queue took its place.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def is_held(self, sequence: Sequence) -> bool:
        """Whether the wait that the sequence began goes on; ends it if not."""
        leader = sequence.leader
        if leader is None:
            return False
        if (
            leader.status is SequenceStatus.RUNNING
            and leader.num_preemptions == sequence.leader_preemptions
            and leader.num_computed < sequence.wait_target
        ):
            return True
        if leader.status is SequenceStatus.FINISHED:
            sequence.wait_target = 0
        sequence.leader = None
        return False

    def hold(self, sequence: Sequence, num_cached: int, prefilling: Iterable[Sequence]) -> bool:
        """Begin to wait if a running prefill computes the block after ``num_cached`` tokens."""
        num_cached -= num_cached % self._block_size
        target, leader = 0, None
        for candidate in prefilling:
            shared = self._num_shared(sequence, num_cached, candidate)
            if shared > max(target, sequence.wait_target):
                target, leader = shared, candidate
        if leader is None:
            return False
        sequence.leader = leader
        sequence.leader_preemptions = leader.num_preemptions
        sequence.wait_target = target
        return True

    def _num_shared(self, sequence: Sequence, num_cached: int, other: Sequence) -> int:
        """Return the tokens of whole blocks to gain by waiting for ``other``, or 0."""
        size = self._block_size
        usable = (sequence.num_tokens - 1) // size * size
        end = num_cached + size
        mine, theirs = sequence.token_ids, other.token_ids
        if (
            end > usable
            or other.num_computed >= end
            or mine[num_cached:end] != theirs[num_cached:end]
            or mine[:num_cached] != theirs[:num_cached]
            or sequence.request.identity != other.request.identity
            or not other.request.retention.store
        ):
            return 0
        while end + size <= usable and mine[end : end + size] == theirs[end : end + size]:
            end += size
        return end
