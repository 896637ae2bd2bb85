"""Keys of cached blocks: chained digests that no two kinds of input can share.

A key covers the parent's key, so equal keys mean equal prefixes. Every field is tagged with its
kind and framed with its length: without the tags an adapter named "x" and a salt "x" would meet
(vLLM #44701), without the lengths ("org_1", "2345") and ("org_12345", "") would.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

from octavo.core.ids import TokenId
from octavo.core.request import CacheIdentity

BlockKey = bytes
Digest = Callable[[bytes], bytes]
"""Maps any bytes to a short digest. Hits compare tokens too, so a weak one is slow, not wrong."""


def blake2b(data: bytes) -> bytes:
    """Return the 256-bit BLAKE2b digest."""
    return hashlib.blake2b(data, digest_size=32).digest()


def _frame(kind: str, value: bytes) -> bytes:
    tag = kind.encode()
    return struct.pack("<II", len(tag), len(value)) + tag + value


def namespace_key(identity: CacheIdentity, digest: Digest = blake2b) -> BlockKey:
    """Return the key that the first block of every prefix of this identity chains to."""
    framed = (
        _frame(field.name, getattr(identity, field.name).encode("utf-8", "surrogatepass"))
        for field in fields(identity)
    )
    return digest(_frame("octavo-namespace", b"".join(framed)))


def block_key(
    parent: BlockKey,
    tokens: Sequence[TokenId],
    digest: Digest = blake2b,
    extras: Iterable[tuple[str, bytes]] = (),
) -> BlockKey:
    """Return the key of a full block.

    Args:
        parent: key of the block before it, or of the namespace.
        tokens: the block's tokens, each 0 to 2**64 - 1.
        extras: (kind, value) of every input besides tokens that changes the block's KV, such as
            the digest of an image; order matters.
    """
    packed = struct.pack(f"<{len(tokens)}Q", *tokens)
    framed = b"".join(_frame(kind, value) for kind, value in extras)
    return digest(_frame("parent", parent) + _frame("tokens", packed) + _frame("extras", framed))


def prefix_keys(
    identity: CacheIdentity,
    token_ids: Sequence[TokenId],
    block_size: int,
    digest: Digest = blake2b,
) -> list[BlockKey]:
    """Return the keys of the whole blocks of a prefix, first to last."""
    keys: list[BlockKey] = []
    parent = namespace_key(identity, digest)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_key(parent, token_ids[start : start + block_size], digest)
        keys.append(parent)
    return keys
