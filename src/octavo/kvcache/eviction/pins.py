"""Prefixes that are never evicted once they are computed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from octavo.core.ids import BlockId, TokenId
from octavo.core.request import CacheIdentity
from octavo.kvcache.keys import BlockKey


@dataclass(frozen=True, slots=True)
class _Pin:
    identity: CacheIdentity
    token_ids: tuple[TokenId, ...]
    """From the start of the prefix to the end of the block."""


class PinnedPrefixes:
    """What is to be pinned, by block, and which blocks hold it.

    A pin is a reference to the block like that of a table, so the block counts as used: no
    policy is offered it, and no admission counts on its room.
    """

    def __init__(self) -> None:
        self._pins: dict[BlockKey, _Pin] = {}
        self._held: dict[BlockKey, BlockId] = {}

    def __len__(self) -> int:
        """Return the number of blocks to be pinned, held or not."""
        return len(self._pins)

    def block_ids(self) -> Iterator[BlockId]:
        """Yield the blocks that are held."""
        return iter(self._held.values())

    def num_new(self, keys: Iterable[BlockKey]) -> int:
        """Return how many of these blocks are not to be pinned so far."""
        return sum(key not in self._pins for key in keys)

    def add(
        self, identity: CacheIdentity, token_ids: Sequence[TokenId], keys: Sequence[BlockKey]
    ) -> None:
        """Pin the prefix of whole blocks with these keys from when it is computed."""
        size = len(token_ids) // len(keys) if keys else 0
        for count, key in enumerate(keys, start=1):
            self._pins.setdefault(key, _Pin(identity, tuple(token_ids[: count * size])))

    def claim(
        self,
        key: BlockKey,
        identity: CacheIdentity,
        token_ids: Sequence[TokenId],
        block_id: BlockId,
    ) -> bool:
        """Hold a block of the tree that ends ``token_ids``, if it is one to be pinned.

        Returns:
            Whether it is held from now on; the caller then takes a reference to it.
        """
        pin = self._pins.get(key)
        if pin is None or key in self._held:
            return False
        if pin.identity != identity or pin.token_ids != tuple(token_ids):
            return False  # a weak digest collides
        self._held[key] = block_id
        return True

    def release_all(self) -> list[BlockId]:
        """Hold nothing, deepest blocks first; the prefixes are pinned again when recomputed."""
        held = sorted(self._held, key=lambda key: len(self._pins[key].token_ids), reverse=True)
        blocks = [self._held[key] for key in held]
        self._held.clear()
        return blocks
