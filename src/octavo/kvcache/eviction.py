"""Which cached block is forgotten first: one small policy object, chosen by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from octavo.core.ids import BlockId
from octavo.core.registry import Registry


@dataclass(frozen=True, slots=True)
class EvictionCandidate:
    """A cached block that nobody uses and that no cached block follows."""

    block_id: BlockId
    depth: int
    """Blocks before it in its prefix."""
    num_uses: int
    """Times a sequence took it since it was filled; at least 1."""


class EvictionPolicy(Protocol):
    """Chooses what to forget when a block is needed and none is free."""

    def victim(self, candidates: Iterator[EvictionCandidate]) -> EvictionCandidate:
        """Return one of ``candidates``.

        They come lazily, least recently used first, at least one; a policy looks at as many as it
        likes, so its cost is its own choice.
        """


class LeastRecentlyUsed:
    """Forget what was released longest ago, of one prefix the deepest block first (vLLM V1)."""

    def victim(self, candidates: Iterator[EvictionCandidate]) -> EvictionCandidate:
        """Return the first candidate: O(1)."""
        return next(candidates)


EVICTION_POLICIES: Final[Registry[EvictionPolicy]] = Registry(
    "--eviction-policy", "victim", {"lru": LeastRecentlyUsed}
)
