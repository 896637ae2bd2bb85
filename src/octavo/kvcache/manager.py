"""The one door to the KV cache: who holds which blocks, and what can be reused."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError, SettingError
from octavo.core.events import CacheUsage, EvictionTotals
from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.plan import BlockCopy
from octavo.core.request import DEFAULT_RETENTION, CacheIdentity, Retention
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.block_table import BlockTable
from octavo.kvcache.contiguous import first_fit, free_runs
from octavo.kvcache.eviction.counters import EvictionStats
from octavo.kvcache.eviction.evictor import Evictor
from octavo.kvcache.eviction.expectation import Waiter
from octavo.kvcache.eviction.pins import PinnedPrefixes
from octavo.kvcache.eviction.policy import EvictionPolicy, PrefixUse
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.kvcache.keys import Digest, blake2b, prefix_keys
from octavo.kvcache.prefix_index import PREFIX_INDEXES, PrefixIndex


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A cached prefix as it was at one moment; admitting with a stale one is an error."""

    identity: CacheIdentity
    block_ids: tuple[BlockId, ...]
    num_tokens: int
    """Those of the whole blocks, and those of ``partial``."""
    version: int
    partial: BlockId | None = None
    """A block whose first tokens continue the hit, to be copied."""


@dataclass(frozen=True, slots=True)
class BlockNeed:
    """What admitting a sequence takes, and what there is."""

    num_new: int
    """Blocks to allocate beyond the hit."""
    num_available: int
    """Free and evictable blocks once the hit is locked; the longest run of free ones where
    sequences are contiguous."""
    num_branches: int = 0
    """Further branches of the request, which take a block each as soon as they diverge."""


@dataclass(frozen=True, slots=True)
class _Admission:
    """What is remembered of a sequence from its admission until it is freed."""

    num_hits: int
    retention: Retention


class KVCacheManager:
    """Block tables, the block pool and the radix tree behind one face.

    Raises:
        SettingError: the name of the eviction policy or of the prefix cache is not known.
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
        self.tree: PrefixIndex = PREFIX_INDEXES.create(
            config.prefix_cache, config.block_size, digest
        )
        """To be read only, too."""
        self._block_size = config.block_size
        self._digest = digest
        partial = config.min_partial_hit
        self._min_partial = max(1, config.block_size // 8) if partial is None else partial
        self._tables: dict[SequenceId, BlockTable] = {}
        self._admissions: dict[SequenceId, _Admission] = {}
        self._copies: dict[BlockId, BlockId] = {}
        """Source by target, of copies that no plan has taken yet."""
        self._pins = PinnedPrefixes()
        self._now = 0.0
        policy = eviction or EVICTION_POLICIES.create(config.eviction_policy)
        name = config.eviction_policy
        self._evictor = Evictor(self.pool, self.tree, config.block_size, name, policy)

    @property
    def tables(self) -> Mapping[SequenceId, BlockTable]:
        """The block table of every admitted sequence, to be read only."""
        return MappingProxyType(self._tables)

    @property
    def num_slots(self) -> int:
        """Tokens whose KV the pool can hold beside the pinned prefixes."""
        return (self.config.num_blocks - len(self._pins)) * self._block_size

    @property
    def evictions_total(self) -> int:
        """Cached blocks forgotten to make room."""
        return self._evictor.evictions_total

    @property
    def eviction_policy(self) -> str:
        """Name of the policy in force."""
        return self._evictor.policy_name

    def set_eviction_policy(self, name: str) -> None:
        """Switch to another policy while serving; nothing cached is lost.

        Raises:
            SettingError: the name is not known, or a user's policy fails to take over; the old
                policy stays in force.
        """
        self._evictor.switch(name, EVICTION_POLICIES.create(name))

    def eviction_stats(self) -> Mapping[str, EvictionStats]:
        """Return the totals of every policy that was ever in force, by name."""
        return self._evictor.stats()

    def eviction_totals(self) -> tuple[EvictionTotals, ...]:
        """Return the same for observers; cheap enough for every step."""
        return self._evictor.totals()

    def eviction_candidates(self) -> Iterator[BlockId]:
        """Yield the blocks that could be evicted now."""
        return iter(self._evictor.candidates())

    def advance(self, now: float) -> None:
        """Take note of the time, in seconds: retention priorities run out."""
        self._now = now
        self._evictor.advance(now)

    @property
    def looks_ahead(self) -> bool:
        """Whether anything is spared for sequences that wait."""
        return self.config.enable_prefix_caching and self.tree.leaf_first

    def expect(
        self, sequence_id: SequenceId, identity: CacheIdentity, token_ids: Sequence[TokenId]
    ) -> None:
        """Spare what a waiting sequence will hit, until it is admitted or ``unexpect``-ed.

        That is what is cached of its prompt, in whole blocks, and what others compute of it while
        it waits. It is spared as long as anything else can be evicted; of several sequences, the
        one that came first keeps its prefix longest. Its tokens must not change meanwhile.
        """
        if self.looks_ahead:
            hit = self.match(identity, token_ids, whole_blocks=True)
            self._evictor.expect(sequence_id, identity, token_ids, hit.block_ids)

    def unexpect(self, sequence_id: SequenceId) -> None:
        """Spare nothing any more for a sequence (idempotent)."""
        self._evictor.settle(sequence_id)

    def expecting(self) -> Iterable[Waiter]:
        """Return the sequences for which what they will hit is spared, to be read only."""
        return self._evictor.expecting()

    def pin(self, identity: CacheIdentity, token_ids: Sequence[TokenId]) -> int:
        """Never evict the whole blocks of a prefix, from when they are computed.

        To be called before requests are accepted: it takes room from what a request may need.

        Returns:
            How many blocks of the prefix are pinned.

        Raises:
            SettingError: the pinned prefixes would take more than half of the pool, or prefix
                caching is off.
        """
        if not self.config.enable_prefix_caching:
            raise SettingError(
                "--pin-file needs prefix caching: leave out --no-enable-prefix-caching.",
                name="--pin-file",
            )
        num_full = len(token_ids) // self._block_size
        tokens = token_ids[: num_full * self._block_size]
        keys = prefix_keys(identity, tokens, self._block_size, self._digest)
        total = len(self._pins) + self._pins.num_new(keys)
        if 2 * total > self.config.num_blocks:
            raise SettingError(
                f"The pinned prefixes take {total} KV blocks, more than half of the pool's "
                f"{self.config.num_blocks}: pin less or give the cache more memory.",
                name="--pin-file",
            )
        self._pins.add(identity, tokens, keys)
        for index, block_id in enumerate(self.tree.match(identity, tokens, num_full)):
            self._pin_block(identity, token_ids, index, block_id)
        return num_full

    def pinned_blocks(self) -> Iterator[BlockId]:
        """Yield the blocks that are pinned and computed."""
        return self._pins.block_ids()

    def usage(self) -> CacheUsage:
        """Count the blocks in each state."""
        return self.pool.usage()

    def match(
        self,
        identity: CacheIdentity,
        token_ids: Sequence[TokenId],
        *,
        read_cache: bool = True,
        whole_blocks: bool = False,
    ) -> CacheHit:
        """Find the longest cached prefix, to the token. Changes nothing.

        Whole blocks are shared. A block that the prompt diverges in is copied, if it saves enough
        tokens (``CacheConfig.min_partial_hit``) and ``whole_blocks`` is False.

        A hit never covers the last token: that one is recomputed, or there would be no logits to
        sample from. With ``read_cache`` False (prompt logprobs need every position) or with
        prefix caching off the hit is empty.
        """
        if not read_cache or not self.config.enable_prefix_caching:
            return CacheHit(identity, (), 0, self.tree.version)
        last = len(token_ids) - 1
        block_ids = self.tree.match(identity, token_ids, last // self._block_size)
        num_tokens = len(block_ids) * self._block_size
        if self._min_partial and not whole_blocks:
            parent = block_ids[-1] if block_ids else None
            rest = token_ids[num_tokens : min(num_tokens + self._block_size, last)]
            found = self.tree.match_inside(identity, parent, rest)
            if found is not None and found[1] >= self._min_partial:
                partial, num_more = found
                num_tokens += num_more
                return CacheHit(identity, block_ids, num_tokens, self.tree.version, partial)
        return CacheHit(identity, block_ids, num_tokens, self.tree.version)

    def need(self, hit: CacheHit, num_tokens: int, num_branches: int = 0) -> BlockNeed:
        """Return what admitting ``num_tokens`` tokens with this hit takes. Changes nothing."""
        locked = sum(map(self.pool.is_cached, hit.block_ids))
        num_new = self._num_blocks(num_tokens) - len(hit.block_ids)
        if self.config.is_contiguous:
            return BlockNeed(num_new, max(map(len, self._free_runs()), default=0))
        return BlockNeed(num_new, self.pool.num_available - locked, num_branches)

    def admit(
        self,
        sequence_id: SequenceId,
        hit: CacheHit,
        num_tokens: int,
        retention: Retention = DEFAULT_RETENTION,
    ) -> bool:
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
        self._evictor.settle(sequence_id)
        for block_id in hit.block_ids:
            self._acquire(block_id)
        table = BlockTable(hit.identity, hit.block_ids)
        self._tables[sequence_id] = table
        self._admissions[sequence_id] = _Admission(len(hit.block_ids), retention)
        if hit.partial is not None:  # used once more, so not the next to be evicted
            self._acquire(hit.partial)
            self._release(hit.partial)
        for block_id in self._allocate_many(need.num_new):
            table.append(block_id)
        if hit.partial is not None:
            self._copy_partial(table.block_ids[len(hit.block_ids)], hit.partial)
        return True

    @property
    def can_fork(self) -> bool:
        """Whether sequences can share blocks while they run: not if each lies in one run."""
        return not self.config.is_contiguous

    def fork(self, parent: SequenceId, child: SequenceId, num_tokens: int) -> None:
        """Let a new sequence share the blocks of its parent's first ``num_tokens`` tokens.

        It takes no block, so it cannot fail; whoever first writes into a shared one copies it.

        Raises:
            InvariantError: the parent has no table, or the child has one.
        """
        if child in self._tables or not self.can_fork:
            raise InvariantError(f"sequence {child} cannot be forked off {parent}")
        table = self._table(parent).fork(self._num_blocks(num_tokens))
        for block_id in table.block_ids:
            self._acquire(block_id)
        self._tables[child] = table
        retention = self._admissions[parent].retention
        self._admissions[child] = _Admission(table.num_committed, retention)

    def extend(self, sequence_id: SequenceId, num_tokens: int, first_written: int) -> bool:
        """Make the table cover ``num_tokens`` tokens, to be written from ``first_written`` on.

        If others hold the block of the first token that is written, the sequence gets a copy
        (copy-on-write); those after it are its own. All or nothing.

        Returns:
            Whether it covers them now; if not, nothing changed.
        """
        block_ids = self._table(sequence_id).block_ids
        num_held, index = len(block_ids), first_written // self._block_size
        copies = index < num_held and self._is_shared(block_ids[index])
        if not copies and num_tokens <= num_held * self._block_size:
            return True
        return self._grow(sequence_id, num_tokens, index if copies else None)

    def _grow(self, sequence_id: SequenceId, num_tokens: int, copied: int | None) -> bool:
        """Add blocks, and copy the one at index ``copied`` that is shared; all or nothing."""
        table = self._table(sequence_id)
        num_new = max(0, self._num_blocks(num_tokens) - len(table.block_ids))
        if self.config.is_contiguous:
            raise InvariantError(f"sequence {sequence_id} outgrew the run reserved for it")
        if num_new + (copied is not None) > self.pool.num_available:
            return False
        if copied is not None:
            self._copy_on_write(table, copied)
        for _ in range(num_new):
            table.append(self._allocate())
        return True

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Return the copies that the next plan must make before it writes, in their order."""
        copies = tuple(BlockCopy(source, target) for target, source in self._copies.items())
        self._copies.clear()
        return copies

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
        if num_full <= table.num_committed:
            return
        if not (
            self.config.enable_prefix_caching and self._admissions[sequence_id].retention.store
        ):
            return
        for index in range(table.num_committed, num_full):
            chunk = tuple(token_ids[index * self._block_size : (index + 1) * self._block_size])
            parent = table.block_ids[index - 1] if index else None
            own = table.block_ids[index]
            kept = self.tree.insert(table.identity, parent, chunk, own)
            if kept == own:
                self.pool.keep(own)
                self._evictor.computed(table.identity, parent, chunk, own)
            else:
                self._acquire(kept)
                self.pool.release(own)
                table.replace(index, kept)
            if self._pins:
                self._pin_block(table.identity, token_ids, index, kept)
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
        self._record(sequence_id, table)
        del self._tables[sequence_id], self._admissions[sequence_id]
        for block_id in reversed(table.block_ids):
            self._copies.pop(block_id, None)  # nobody else can hold the target of a pending copy
            self._release(block_id)

    def reset(self) -> bool:
        """Forget every cached prefix.

        Returns:
            False, and nothing changed, if a sequence holds blocks.
        """
        if self._tables:
            return False
        for block_id in self._pins.release_all():
            self._release(block_id)
        self._evictor.forget_all()
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _table(self, sequence_id: SequenceId) -> BlockTable:
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise InvariantError(f"sequence {sequence_id} holds no blocks") from None

    def _free_runs(self) -> list[range]:
        return free_runs(self._tables.values(), self.config.num_blocks)

    def _allocate_many(self, num_blocks: int) -> Iterator[BlockId]:
        """Yield blocks that are known to be there, one run of them where that is asked for."""
        if not self.config.is_contiguous:
            yield from (self._allocate() for _ in range(num_blocks))
            return
        run = first_fit(self._free_runs(), num_blocks)
        if run is None:
            raise InvariantError(f"no run of {num_blocks} blocks is free although one was found")
        for index in run:
            self.pool.take(BlockId(index))
            yield BlockId(index)

    def _allocate(self) -> BlockId:
        if not self.pool.num_free:
            self._evictor.evict()
        return self.pool.allocate()

    def _is_shared(self, block_id: BlockId) -> bool:
        return self.pool.block(block_id).references > 1

    def _copy_on_write(self, table: BlockTable, index: int) -> None:
        source, target = table.block_ids[index], self._allocate()
        self._copies[target] = source
        table.replace(index, target)
        self._release(source)

    def _copy_partial(self, target: BlockId, source: BlockId) -> None:
        """Let the next plan copy a hit block before it writes anything.

        So the source need not be held: were it evicted for this very sequence, its KV would still
        be there when the copy is made. If it became the target itself there is nothing to copy.
        """
        if source != target:
            self._copies[target] = source

    def _release(self, block_id: BlockId) -> None:
        self.pool.release(block_id)
        self._evictor.released(block_id)

    def _acquire(self, block_id: BlockId) -> None:
        if self.pool.is_cached(block_id):
            self._evictor.taken(block_id)
        self.pool.acquire(block_id)

    def _record(self, sequence_id: SequenceId, table: BlockTable) -> None:
        """Tell the evictor of a sequence that is about to release its blocks."""
        if not table.num_committed:
            return
        admission = self._admissions[sequence_id]
        block_ids = tuple(table.block_ids[: table.num_committed])
        keys = self.tree.path_keys(block_ids[-1])
        use = PrefixUse(table.identity, block_ids, keys, admission.num_hits)
        self._evictor.record(use, admission.retention, self._now)

    def _pin_block(
        self,
        identity: CacheIdentity,
        token_ids: Sequence[TokenId],
        index: int,
        block_id: BlockId,
    ) -> None:
        """Hold a block of the tree if it is the ``index``-th of a pinned prefix."""
        tokens = token_ids[: (index + 1) * self._block_size]
        if self._pins.claim(self.tree.key(block_id), identity, tokens, block_id):
            self._acquire(block_id)
