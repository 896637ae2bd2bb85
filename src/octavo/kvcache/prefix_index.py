"""What the KV cache manager needs of a prefix cache, and the kinds there are."""

from collections.abc import Sequence
from typing import Final, Protocol

from octavo.core.ids import BlockId, TokenId
from octavo.core.registry import Registry
from octavo.core.request import CacheIdentity
from octavo.kvcache.flat_cache import FlatCache
from octavo.kvcache.keys import BlockKey
from octavo.kvcache.radix_tree import RadixTree


class PrefixIndex(Protocol):
    """Knows which prefixes of whole blocks are cached, and in which blocks.

    Made with the block size and the digest of keys.
    """

    leaf_first: bool
    """Whether a block can be removed only when none follows it, and no two are equal.

    Then whoever spares the last block of a match spares all of it; if not, none is spared.
    """

    version: int
    """Grows with every change, so that a stale match can be told."""

    def __len__(self) -> int:
        """Return the number of cached blocks."""

    def __contains__(self, block_id: BlockId) -> bool: ...

    def match(
        self, identity: CacheIdentity, tokens: Sequence[TokenId], max_blocks: int
    ) -> tuple[BlockId, ...]:
        """Return the blocks of the longest cached prefix, at most ``max_blocks``. Read-only."""

    def match_inside(
        self, identity: CacheIdentity, parent: BlockId | None, tokens: Sequence[TokenId]
    ) -> tuple[BlockId, int] | None:
        """Return the block after ``parent`` that begins like ``tokens``, and for how many tokens.

        None if there is none, or if this kind of cache finds whole blocks only.
        """

    def insert(
        self,
        identity: CacheIdentity,
        parent: BlockId | None,
        chunk: tuple[TokenId, ...],
        block_id: BlockId,
    ) -> BlockId:
        """Register a full block; return the one that is used from now on: this or an equal one."""

    def remove(self, block_id: BlockId) -> BlockId | None:
        """Forget a block that ``is_leaf``; return one that may be removed only now, if any."""

    def is_leaf(self, block_id: BlockId) -> bool:
        """Whether the block is cached and may be removed."""

    def depth(self, block_id: BlockId) -> int:
        """Return the number of blocks before this one in its prefix."""

    def key(self, block_id: BlockId) -> BlockKey:
        """Return the key of a cached block."""

    def path_keys(self, block_id: BlockId) -> tuple[BlockKey, ...]:
        """Return the keys of the prefix that ends with a cached block, first to last."""


PREFIX_INDEXES: Final[Registry[PrefixIndex]] = Registry(
    "--prefix-cache", ("match",), {"radix": RadixTree, "flat": FlatCache}
)
