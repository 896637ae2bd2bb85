"""The one door to the KV cache: who holds which blocks, and what can be reused."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError
from octavo.core.events import CacheUsage
from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.request import CacheIdentity
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.block_table import BlockTable
from octavo.kvcache.eviction import EVICTION_POLICIES, EvictionCandidate, EvictionPolicy
from octavo.kvcache.keys import Digest, blake2b
from octavo.kvcache.radix_tree import RadixTree


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A cached prefix as it was at one moment; admitting with a stale one is an error."""

    identity: CacheIdentity
    block_ids: tuple[BlockId, ...]
    num_tokens: int
    version: int


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """What admitting a sequence takes, and what there is."""

    num_new: int
    """Blocks to allocate beyond the hit."""
    num_available: int
    """Free and evictable blocks once the hit is locked."""


class KVCacheManager:
    """Block tables, the block pool and the radix tree behind one face.

    Raises:
        SettingError: the eviction policy's name is not known.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        digest: Digest = blake2b,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        """To be read only: the manager alone writes it."""
        self.tree = RadixTree(config.block_size, digest)
        """To be read only, too."""
        self.evictions_total = 0
        self._block_size = config.block_size
        self._eviction = eviction or EVICTION_POLICIES.create(config.eviction_policy)
        self._tables: dict[SequenceId, BlockTable] = {}

    @property
    def tables(self) -> Mapping[SequenceId, BlockTable]:
        """The block table of every admitted sequence, to be read only."""
        return MappingProxyType(self._tables)

    @property
    def num_slots(self) -> int:
        """Tokens whose KV the whole pool can hold."""
        return self.config.num_blocks * self._block_size

    def usage(self) -> CacheUsage:
        """Count the blocks in each state."""
        return self.pool.usage()

    def match(
        self, identity: CacheIdentity, token_ids: Sequence[TokenId], *, read_cache: bool = True
    ) -> CacheHit:
        """Find the longest cached prefix of whole blocks. Changes nothing.

        It never covers the last token: that one is recomputed, or there would be no logits to
        sample from. With ``read_cache`` False (prompt logprobs need every position) or with
        prefix caching off the hit is empty.
        """
        block_ids: tuple[BlockId, ...] = ()
        if read_cache and self.config.enable_prefix_caching:
            max_blocks = (len(token_ids) - 1) // self._block_size
            block_ids = self.tree.match(identity, token_ids, max_blocks)
        num_tokens = len(block_ids) * self._block_size
        return CacheHit(identity, block_ids, num_tokens, self.tree.version)

    def need(self, hit: CacheHit, num_tokens: int) -> BlockNeed:
        """Return what admitting ``num_tokens`` tokens with this hit takes. Changes nothing."""
        locked = sum(map(self.pool.is_cached, hit.block_ids))
        num_new = self._num_blocks(num_tokens) - len(hit.block_ids)
        return BlockNeed(num_new, self.pool.num_available - locked)

    def admit(self, sequence_id: SequenceId, hit: CacheHit, num_tokens: int) -> bool:
        """Give a sequence a table: lock the hit, allocate the rest. All or nothing.

        Returns:
            Whether the blocks were there; if not, nothing changed.

        Raises:
            InvariantError: the sequence has a table, or the tree changed since ``match``.
        """
        if sequence_id in self._tables:
            raise InvariantError(f"sequence {sequence_id} was admitted twice")
        if hit.version != self.tree.version:
            raise InvariantError(f"sequence {sequence_id} was admitted with a stale hit")
        need = self.need(hit, num_tokens)
        if need.num_new > need.num_available:
            return False
        for block_id in hit.block_ids:
            self.pool.acquire(block_id)
        table = BlockTable(hit.identity, hit.block_ids)
        self._tables[sequence_id] = table
        for _ in range(need.num_new):
            table.append(self._allocate())
        return True

    def extend(self, sequence_id: SequenceId, num_tokens: int) -> bool:
        """Make the table cover ``num_tokens`` tokens. All or nothing.

        Returns:
            Whether it covers them now; if not, nothing changed.
        """
        table = self._table(sequence_id)
        num_new = self._num_blocks(num_tokens) - len(table.block_ids)
        if num_new <= 0:
            return True
        if num_new > self.pool.num_available:
            return False
        for _ in range(num_new):
            table.append(self._allocate())
        return True

    def commit(
        self, sequence_id: SequenceId, token_ids: Sequence[TokenId], num_computed: int
    ) -> None:
        """Register the full blocks among the first ``num_computed`` tokens, whose KV is there.

        Where the tree has a block of the same prefix and tokens already (two sequences computed
        it at once), the table names that one from now on and the duplicate is freed. So the
        blocks before a block in use are in use themselves, and only the tree's block is cached.
        """
        table = self._table(sequence_id)
        num_full = num_computed // self._block_size
        if num_full <= table.num_committed or not self.config.enable_prefix_caching:
            return
        for index in range(table.num_committed, num_full):
            chunk = tuple(token_ids[index * self._block_size : (index + 1) * self._block_size])
            parent = table.block_ids[index - 1] if index else None
            own = table.block_ids[index]
            kept = self.tree.insert(table.identity, parent, chunk, own)
            if kept == own:
                self.pool.keep(own)
            else:
                self.pool.acquire(kept)
                self.pool.release(own)
                table.replace(index, kept)
        table.num_committed = num_full

    def take_changes(self, sequence_id: SequenceId) -> tuple[int, tuple[BlockId, ...]]:
        """Return ``(first, block ids from there on)``: what changed since the last call."""
        return self._table(sequence_id).take_changes()

    def free(self, sequence_id: SequenceId) -> None:
        """Release the sequence's blocks, tail first; what was committed stays cached.

        Raises:
            InvariantError: it has none: never admitted, or freed already.
        """
        table = self._table(sequence_id)
        del self._tables[sequence_id]
        for block_id in reversed(table.block_ids):
            self.pool.release(block_id)

    def reset(self) -> bool:
        """Forget every cached prefix.

        Returns:
            False, and nothing changed, if a sequence holds blocks.
        """
        if self._tables:
            return False
        for block in list(self.pool.cached_blocks()):
            self.tree.remove(block.block_id)
            self.pool.forget(block.block_id)
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _table(self, sequence_id: SequenceId) -> BlockTable:
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise InvariantError(f"sequence {sequence_id} holds no blocks") from None

    def _allocate(self) -> BlockId:
        if not self.pool.num_free:
            self._evict()
        return self.pool.allocate()

    def _evict(self) -> None:
        victim = self._eviction.victim(self._candidates())
        self.tree.remove(victim.block_id)
        self.pool.forget(victim.block_id)
        self.evictions_total += 1

    def _candidates(self) -> Iterator[EvictionCandidate]:
        for block in self.pool.cached_blocks():
            if self.tree.is_leaf(block.block_id):
                depth = self.tree.depth(block.block_id)
                yield EvictionCandidate(block.block_id, depth, block.num_uses)
