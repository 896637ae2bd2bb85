"""The waiting queue: never-started and preempted sequences, in the order they will be tried."""

from bisect import bisect_left
from collections.abc import Iterator

from octavo.core.errors import InvariantError
from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.policies import QueuePolicy
from octavo.scheduler.sequence import Sequence

_Key = tuple[tuple[float, ...], bool, float, int, int]


class WaitingQueue:
    """A sorted list: by rank, then preempted ones first, then by arrival.

    Adding and removing costs O(log n) comparisons and one move of memory.
    """

    def __init__(self, policy: QueuePolicy) -> None:
        self._policy = policy
        self._entries: list[tuple[_Key, Sequence]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        """Yield in order; the sequence just yielded may be removed meanwhile, no other."""
        index = 0
        while index < len(self._entries):
            entry = self._entries[index]
            yield entry[1]
            if index < len(self._entries) and self._entries[index] is entry:
                index += 1

    def push(self, sequence: Sequence) -> None:
        """Add a waiting or preempted sequence at its place."""
        key = self._key(sequence)
        index = bisect_left(self._entries, key, key=_key_of)
        self._entries.insert(index, (key, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whose status has not changed since it was pushed.

        Raises:
            InvariantError: it is not in the queue.
        """
        index = bisect_left(self._entries, self._key(sequence), key=_key_of)
        if index == len(self._entries) or self._entries[index][1] is not sequence:
            raise InvariantError("a sequence left a queue it is not in", story=sequence.tell())
        del self._entries[index]

    def _key(self, sequence: Sequence) -> _Key:
        never_ran = sequence.status is not SequenceStatus.PREEMPTED
        rank = self._policy.rank(sequence)
        return rank, never_ran, sequence.arrival_time, sequence.place, sequence.sequence_id


def _key_of(entry: tuple[_Key, Sequence]) -> _Key:
    return entry[0]
