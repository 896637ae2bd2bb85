"""A flat hash-chain prefix cache, as in vLLM V1: what the radix tree is compared with."""

from collections.abc import Iterator, Sequence

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, TokenId
from octavo.core.request import CacheIdentity
from octavo.kvcache.keys import BlockKey, Digest, blake2b, block_key, namespace_key

Chunk = tuple[TokenId, ...]
"""The tokens of one full block."""


class Prefix:
    """What one key stands for: a block's tokens after all those before it."""

    __slots__ = ("block_ids", "chunk", "depth", "identity", "key", "num_children", "parent")

    def __init__(
        self, identity: CacheIdentity, parent: "Prefix | None", chunk: Chunk, key: BlockKey
    ) -> None:
        self.identity = identity
        self.parent = parent
        self.chunk = chunk
        self.key = key
        self.depth: int = parent.depth + 1 if parent else 0
        """Blocks before it."""
        self.block_ids: list[BlockId] = []
        """Blocks that hold it: several where sequences computed it at once, none where it was
        evicted before what follows it."""
        self.num_children = 0
        """Prefixes that are one block longer."""


class FlatCache:
    """A map from the chained key of each prefix to the blocks that hold its last chunk.

    It has the face of ``RadixTree`` and differs from it as vLLM's cache does:

    * Every block is looked up by its own key, so a match hashes the whole prefix.
    * Nothing is deduplicated: block tables are append-only, so two sequences that compute the
      same block at once keep both, and the cache holds both until they are evicted.
    * Only whole blocks are reused.
    * Any unused block may be evicted, also one that others follow; those are then out of reach
      until it is computed again. Order alone (tables are freed tail first) keeps this rare.
    * Nothing is spared for requests that wait.

    Unlike in vLLM a hit is verified: each entry knows its tokens and the prefix before it, so a
    colliding digest costs time and never gives a wrong hit.
    """

    leaf_first = False

    def __init__(self, block_size: int, digest: Digest = blake2b) -> None:
        self._block_size = block_size
        self._digest = digest
        self._prefixes: dict[BlockKey, list[Prefix]] = {}
        self._of_block: dict[BlockId, Prefix] = {}
        self.version = 0
        """Grows with every change, so that a stale match can be told."""

    def __len__(self) -> int:
        """Return the number of cached blocks, duplicates included."""
        return len(self._of_block)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._of_block

    def match(
        self, identity: CacheIdentity, tokens: Sequence[TokenId], max_blocks: int
    ) -> tuple[BlockId, ...]:
        """Return the blocks of the longest cached prefix, at most ``max_blocks``. Read-only."""
        found: list[BlockId] = []
        parent: Prefix | None = None
        key = namespace_key(identity, self._digest)
        size = self._block_size
        while len(found) < max_blocks:
            chunk = tuple(tokens[len(found) * size : (len(found) + 1) * size])
            key = block_key(key, chunk, self._digest)
            parent = self._find(identity, parent, chunk, key)
            if parent is None or not parent.block_ids:
                break
            found.append(parent.block_ids[0])
        return tuple(found)

    def match_inside(
        self, identity: CacheIdentity, parent: BlockId | None, tokens: Sequence[TokenId]
    ) -> tuple[BlockId, int] | None:
        """Return None: a key stands for a whole block, so parts of one are never found."""
        return None

    def insert(
        self, identity: CacheIdentity, parent: BlockId | None, chunk: Chunk, block_id: BlockId
    ) -> BlockId:
        """Register ``block_id`` as a block that follows ``parent`` (None: the first).

        Returns:
            ``block_id``, also where the same prefix is cached in another block already.

        Raises:
            InvariantError: ``parent`` is not cached here, or ``block_id`` is.
        """
        if block_id in self._of_block:
            raise InvariantError(f"block {block_id} is in the cache already")
        before = None if parent is None else self._of_block.get(parent)
        if parent is not None and (before is None or before.identity != identity):
            raise InvariantError(f"block {parent} is not a cached block of this namespace")
        self.version += 1
        start = before.key if before else namespace_key(identity, self._digest)
        key = block_key(start, chunk, self._digest)
        prefix = self._find(identity, before, chunk, key)
        if prefix is None:
            prefix = Prefix(identity, before, chunk, key)
            self._prefixes.setdefault(key, []).append(prefix)
            if before is not None:
                before.num_children += 1
        prefix.block_ids.append(block_id)
        self._of_block[block_id] = prefix
        return block_id

    def remove(self, block_id: BlockId) -> None:
        """Forget a block, whether or not others follow it.

        Returns:
            None: unlike in a tree, no other block becomes evictable by this.

        Raises:
            InvariantError: the block is not cached.
        """
        prefix = self._of_block.pop(block_id, None)
        if prefix is None:
            raise InvariantError(f"block {block_id} was removed from the cache but is not in it")
        self.version += 1
        prefix.block_ids.remove(block_id)
        self._drop_unused(prefix)

    def is_leaf(self, block_id: BlockId) -> bool:
        """Whether the block may be removed: any cached one."""
        return block_id in self._of_block

    def depth(self, block_id: BlockId) -> int:
        """Return the number of blocks before this one in its prefix."""
        return self._of_block[block_id].depth

    def key(self, block_id: BlockId) -> BlockKey:
        """Return the key of a cached block."""
        return self._of_block[block_id].key

    def path_keys(self, block_id: BlockId) -> tuple[BlockKey, ...]:
        """Return the keys of the prefix that ends with a cached block, first to last."""
        keys: list[BlockKey] = []
        prefix: Prefix | None = self._of_block[block_id]
        while prefix is not None:
            keys.append(prefix.key)
            prefix = prefix.parent
        return tuple(reversed(keys))

    def prefixes(self) -> Iterator[Prefix]:
        """Yield every prefix that is cached or that a cached one follows; to be read only."""
        for bucket in self._prefixes.values():
            yield from bucket

    def _find(
        self, identity: CacheIdentity, parent: Prefix | None, chunk: Chunk, key: BlockKey
    ) -> Prefix | None:
        """Return the entry of exactly this prefix: same namespace, same parent, same tokens."""
        for prefix in self._prefixes.get(key, ()):
            if (
                prefix.parent is parent
                and prefix.chunk == chunk
                and (parent is not None or prefix.identity == identity)
            ):
                return prefix
        return None

    def _drop_unused(self, prefix: Prefix | None) -> None:
        """Forget entries that hold no block and that nothing follows, from here upwards."""
        while prefix is not None and not prefix.block_ids and not prefix.num_children:
            bucket = self._prefixes[prefix.key]
            bucket.remove(prefix)
            if not bucket:
                del self._prefixes[prefix.key]
            prefix = prefix.parent
            if prefix is not None:
                prefix.num_children -= 1


def check_flat_cache(cache: FlatCache, block_size: int) -> None:
    """Entries are full, chained to their parents, needed, and name each block once.

    Raises:
        InvariantError: at the first breach.
    """
    prefixes = list(cache.prefixes())
    children = [prefix.parent for prefix in prefixes if prefix.parent is not None]
    seen: list[BlockId] = []
    for prefix in prefixes:
        parent = prefix.parent
        seen += prefix.block_ids
        laws = {
            "is not full": len(prefix.chunk) == block_size,
            "is at a wrong depth": prefix.depth == (parent.depth + 1 if parent else 0),
            "is in another namespace": parent is None or parent.identity == prefix.identity,
            "miscounts what follows it": prefix.num_children
            == sum(other is prefix for other in children),
            "is of no use": bool(prefix.block_ids or prefix.num_children),
            "is not found by its block": all(
                cache.path_keys(block_id)[-1] == prefix.key for block_id in prefix.block_ids
            ),
        }
        for breach, holds in laws.items():
            if not holds:
                raise InvariantError(f"the cached prefix of blocks {prefix.block_ids} {breach}")
    if len(set(seen)) != len(seen) or len(seen) != len(cache):
        raise InvariantError("the cache counts other blocks than its prefixes hold")
