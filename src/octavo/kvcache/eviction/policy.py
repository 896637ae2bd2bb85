"""What an eviction policy is told, and what it answers."""

from dataclasses import dataclass
from typing import Protocol

from octavo.core.ids import BlockId
from octavo.core.request import CacheIdentity
from octavo.kvcache.keys import BlockKey


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A candidate: a cached block that nobody uses and that no cached block follows."""

    block_id: BlockId
    key: BlockKey
    """Names its prefix; equal keys mean equal prefixes."""
    depth: int
    """Blocks before it in its prefix."""
    num_uses: int
    """Times a sequence took it since it was filled; at least 1."""
    last_use: int
    """When its last user released it, in releases of blocks: later is larger."""


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """A sequence that is about to release its blocks; only those the tree holds are named."""

    identity: CacheIdentity
    block_ids: tuple[BlockId, ...]
    """From the start of the prefix on."""
    keys: tuple[BlockKey, ...]
    """One per block."""
    num_hits: int
    """Leading blocks that were cached when the sequence was admitted."""


class EvictionPolicy(Protocol):
    """Orders the candidates. Each method should cost O(log n) or less, amortised.

    Whoever writes one need not know the tree: a block becomes a candidate when it is released or
    when the last block after it is forgotten, so leaves always go first.
    """

    def attach(self, num_blocks: int) -> None:
        """Learn the size of the pool; called once, before anything else."""

    def record(self, use: PrefixUse) -> None:
        """Take note of a use; called before its blocks are released."""

    def add(self, block: CachedBlock) -> None:
        """Take in a candidate."""

    def remove(self, block_id: BlockId) -> None:
        """Drop a candidate: a sequence took it, or it was forgotten."""

    def victim(self) -> BlockId:
        """Return the candidate to forget next; there is at least one. The caller removes it."""
