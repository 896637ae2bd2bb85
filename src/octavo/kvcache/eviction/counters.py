"""What an eviction policy achieved while it was the one in force."""

from dataclasses import dataclass
from typing import Final

_NUM_AGES: Final = 24


@dataclass(frozen=True, slots=True)
class EvictionStats:
    """Running totals of one policy, in blocks."""

    evictions_total: int
    unused_evictions_total: int
    """Of them, those that no sequence had taken from the cache: kept for nothing."""
    expected_evictions_total: int
    """Of them, those that a waiting request would have hit: nothing else was left."""
    hits_total: int
    hits_by_age: tuple[int, ...]
    """Hits by the age of the block: entry i counts ages from 2**(i - 1) to below 2**i, in blocks
    released since its own last release; the last entry counts all above, too."""


class EvictionCounters:
    """Counts for one policy."""

    __slots__ = ("_evictions", "_expected", "_hits", "_unused", "switches_total")

    def __init__(self) -> None:
        self._evictions = self._unused = self._expected = 0
        self._hits = [0] * _NUM_AGES
        self.switches_total = 0
        """Times that the policy was put in force while serving."""

    def count_eviction(self, *, num_uses: int, expected: bool) -> None:
        """Count a block that was forgotten."""
        self._evictions += 1
        self._unused += num_uses == 1
        self._expected += expected

    def count_hit(self, age: int) -> None:
        """Count a cached block that a sequence took."""
        self._hits[min(age.bit_length(), _NUM_AGES - 1)] += 1

    def stats(self) -> EvictionStats:
        """Return the totals."""
        hits = tuple(self._hits)
        return EvictionStats(self._evictions, self._unused, self._expected, sum(hits), hits)
