"""A cold prefix shared by several requests is computed once: the others wait for it."""

from collections.abc import Iterable, Mapping

from octavo.core.ids import SequenceId
from octavo.scheduler.sequence import Sequence


class PrefixWait:
    """Holds a waiting sequence back while a running one computes the next block it needs.

    It waits until that leader has computed all whole blocks that the two share, or is no longer
    running, or was preempted; requests behind it in the queue may start meanwhile. The wait is
    bounded: a running leader gets tokens in every step, and a sequence waits again only for a
    longer prefix than before (TensorRT-LLM's prefix-aware scheduling is the model).
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def is_held(self, sequence: Sequence, running: Mapping[SequenceId, Sequence]) -> bool:
        """Whether the wait that the sequence began goes on; ends it if not."""
        if sequence.leader is None:
            return False
        leader_id, num_preemptions = sequence.leader
        leader = running.get(leader_id)
        if (
            leader is not None
            and leader.num_preemptions == num_preemptions
            and leader.num_computed < sequence.wait_target
        ):
            return True
        sequence.leader = None
        return False

    def hold(self, sequence: Sequence, num_cached: int, prefilling: Iterable[Sequence]) -> bool:
        """Begin to wait if a running prefill computes the block after ``num_cached`` tokens."""
        target, leader = 0, None
        for candidate in prefilling:
            shared = self._num_shared(sequence, num_cached, candidate)
            if shared > max(target, sequence.wait_target):
                target, leader = shared, candidate
        if leader is None:
            return False
        sequence.leader = (leader.sequence_id, leader.num_preemptions)
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
        ):
            return 0
        while end + size <= usable and mine[end : end + size] == theirs[end : end + size]:
            end += size
        return end
