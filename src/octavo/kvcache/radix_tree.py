"""A compressed radix tree over full blocks: which prefixes are cached, and in which blocks."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, TokenId
from octavo.core.request import CacheIdentity
from octavo.kvcache.keys import BlockKey, Digest, blake2b, block_key, namespace_key

Chunk = tuple[TokenId, ...]
"""The tokens of one full block."""


class Node:
    """A run of whole blocks that nothing branches off from within.

    ``chunks``, ``block_ids`` and ``keys`` have one entry per block. A root has none. Any other
    node has at least one block, and no child or at least two.
    """

    __slots__ = (
        "block_ids",
        "children",
        "chunks",
        "firsts",
        "identity",
        "key_before",
        "keys",
        "parent",
        "start",
    )

    def __init__(
        self, identity: CacheIdentity, parent: "Node | None", start: int, key_before: BlockKey
    ) -> None:
        self.identity = identity
        self.parent = parent
        self.start = start
        """Blocks before the run in its prefix."""
        self.key_before = key_before
        """Key of the block before the run, or of the namespace."""
        self.chunks: list[Chunk] = []
        self.block_ids: list[BlockId] = []
        self.keys: list[BlockKey] = []
        self.children: dict[BlockKey, list[Node]] = {}
        """By the key of their first block; a list, since a weak digest may collide."""
        self.firsts: list[Chunk] = []
        """First chunks of the children, sorted: what shares most tokens is a neighbour there."""

    @property
    def end_key(self) -> BlockKey:
        """Key that the next block chains to."""
        return self.keys[-1] if self.keys else self.key_before

    def only_child(self) -> "Node | None":
        """Return the child if there is exactly one."""
        if len(self.children) != 1:
            return None
        (bucket,) = self.children.values()
        return bucket[0] if len(bucket) == 1 else None

    def attach(self, child: "Node") -> None:
        """Add a child, whose first block is set already."""
        child.parent = self
        self.children.setdefault(child.keys[0], []).append(child)
        insort(self.firsts, child.chunks[0])

    def detach(self, child: "Node", first_key: BlockKey, first_chunk: Chunk) -> None:
        """Remove a child that is known by its first block."""
        del self.firsts[bisect_left(self.firsts, first_chunk)]
        bucket = self.children[first_key]
        bucket.remove(child)
        if not bucket:
            del self.children[first_key]


class RadixTree:
    """Cached prefixes, one namespace per cache identity.

    A child is found by the chained key of its first block and then verified token by token, so a
    digest that collides costs time and never gives a wrong hit. The tree knows nothing of
    references: its owner says which block may be removed.
    """

    leaf_first = True

    def __init__(self, block_size: int, digest: Digest = blake2b) -> None:
        self._block_size = block_size
        self._digest = digest
        self._roots: dict[CacheIdentity, Node] = {}
        self._nodes: dict[BlockId, Node] = {}
        self._depths: dict[BlockId, int] = {}
        self.version = 0
        """Grows with every change, so that a stale match can be told."""

    def __len__(self) -> int:
        """Return the number of blocks in the tree."""
        return len(self._nodes)

    def __contains__(self, block_id: BlockId) -> bool:
        return block_id in self._nodes

    def match(
        self, identity: CacheIdentity, tokens: Sequence[TokenId], max_blocks: int
    ) -> tuple[BlockId, ...]:
        """Return the blocks of the longest cached prefix, at most ``max_blocks``. Read-only."""
        found: list[BlockId] = []
        node = self._roots.get(identity)
        while node is not None and len(found) < max_blocks:
            node = self._child(node, self._chunk(tokens, len(found)))
            if node is None:
                break
            length = self._match_run(node, tokens, max_blocks)
            found.extend(node.block_ids[:length])
            if length < len(node.block_ids):
                break
        return tuple(found)

    def match_inside(
        self, identity: CacheIdentity, parent: BlockId | None, tokens: Sequence[TokenId]
    ) -> tuple[BlockId, int] | None:
        """Return the block after ``parent`` that begins like ``tokens``, and for how many tokens.

        ``parent`` is the last block of a match, None if nothing matched. Of several blocks it is
        the one that shares most; None if none shares the first token. Read-only.
        """
        wanted = tuple(tokens)
        node = self._roots.get(identity) if parent is None else self._nodes[parent]
        if node is None:
            return None
        length = 0 if parent is None else self._depths[parent] - node.start + 1
        if length < len(node.block_ids):
            shared = _num_shared(node.chunks[length], wanted)
            return (node.block_ids[length], shared) if shared else None
        place = bisect_left(node.firsts, wanted)
        neighbours = node.firsts[max(0, place - 1) : place + 1]
        if not neighbours:
            return None
        best = max(neighbours, key=lambda chunk: _num_shared(chunk, wanted))
        shared = _num_shared(best, wanted)
        child = self._child(node, best) if shared else None
        return None if child is None else (child.block_ids[0], shared)

    def insert(
        self, identity: CacheIdentity, parent: BlockId | None, chunk: Chunk, block_id: BlockId
    ) -> BlockId:
        """Register ``block_id`` as the block that follows ``parent`` (None: the first).

        Returns:
            The block of the tree that holds ``chunk`` there: ``block_id`` itself, or the one that
            was there already; the tree then does not take ``block_id``.

        Raises:
            InvariantError: ``parent`` is not in the tree, or ``block_id`` is.
        """
        if block_id in self._nodes:
            raise InvariantError(f"block {block_id} is in the tree already")
        node, length = self._locate(identity, parent)
        if length < len(node.block_ids):
            if node.chunks[length] == chunk:
                return node.block_ids[length]
            self._split(node, length)
        child = self._child(node, chunk)
        if child is not None:
            return child.block_ids[0]
        self.version += 1
        key = block_key(node.end_key, chunk, self._digest)
        if node.parent is None or node.children:
            target = Node(identity, node, node.start + len(node.block_ids), node.end_key)
            self._append(target, chunk, block_id, key)
            node.attach(target)
        else:
            self._append(node, chunk, block_id, key)
        return block_id

    def remove(self, block_id: BlockId) -> BlockId | None:
        """Forget a block that ends a run without children.

        Returns:
            The block before it; None if it was the first of its prefix.

        Raises:
            InvariantError: the block is not in the tree, or another follows it.
        """
        if not self.is_leaf(block_id):
            raise InvariantError(f"block {block_id} was removed from the tree but is no leaf")
        self.version += 1
        node = self._nodes.pop(block_id)
        del self._depths[block_id]
        first_key, first_chunk = node.keys[0], node.chunks[0]
        node.chunks.pop()
        node.block_ids.pop()
        node.keys.pop()
        parent = node.parent
        if node.block_ids or parent is None:
            return node.block_ids[-1]
        before = parent.block_ids[-1] if parent.block_ids else None
        parent.detach(node, first_key, first_chunk)
        if parent.parent is not None:
            self._merge_only_child(parent)
        elif not parent.children:
            del self._roots[parent.identity]
        return before

    def is_leaf(self, block_id: BlockId) -> bool:
        """Whether no block of the tree follows this one."""
        node = self._nodes.get(block_id)
        return node is not None and node.block_ids[-1] == block_id and not node.children

    def depth(self, block_id: BlockId) -> int:
        """Return the number of blocks before this one in its prefix."""
        return self._depths[block_id]

    def key(self, block_id: BlockId) -> BlockKey:
        """Return the key of a block of the tree."""
        node = self._nodes[block_id]
        return node.keys[self._depths[block_id] - node.start]

    def path_keys(self, block_id: BlockId) -> tuple[BlockKey, ...]:
        """Return the keys of the prefix that ends with a block of the tree, first to last."""
        node: Node | None = self._nodes[block_id]
        runs: list[list[BlockKey]] = []
        while node is not None:
            runs.append(node.keys)
            node = node.parent
        keys = tuple(key for run in reversed(runs) for key in run)
        return keys[: self._depths[block_id] + 1]

    def nodes(self) -> Iterator[Node]:
        """Yield every node, roots included, parents first; to be read only."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield node
            pending.extend(child for bucket in node.children.values() for child in bucket)

    def _chunk(self, tokens: Sequence[TokenId], index: int) -> Chunk:
        return tuple(tokens[index * self._block_size : (index + 1) * self._block_size])

    def _child(self, node: Node, chunk: Chunk) -> Node | None:
        if not node.children:
            return None
        for child in node.children.get(block_key(node.end_key, chunk, self._digest), ()):
            if child.chunks[0] == chunk:
                return child
        return None

    def _match_run(self, node: Node, tokens: Sequence[TokenId], max_blocks: int) -> int:
        """Return how many blocks of the run match; the first is known to."""
        limit = min(len(node.block_ids), max_blocks - node.start)
        for length in range(1, limit):
            if node.chunks[length] != self._chunk(tokens, node.start + length):
                return length
        return limit

    def _locate(self, identity: CacheIdentity, parent: BlockId | None) -> tuple[Node, int]:
        """Return the node to continue at, and the length of its run up to the parent."""
        if parent is None:
            root = self._roots.get(identity)
            if root is None:
                root = Node(identity, None, 0, namespace_key(identity, self._digest))
                self._roots[identity] = root
            return root, 0
        node = self._nodes.get(parent)
        if node is None or node.identity != identity:
            raise InvariantError(f"block {parent} is not a cached block of this namespace")
        return node, self.depth(parent) - node.start + 1

    def _append(self, node: Node, chunk: Chunk, block_id: BlockId, key: BlockKey) -> None:
        node.chunks.append(chunk)
        node.block_ids.append(block_id)
        node.keys.append(key)
        self._nodes[block_id] = node
        self._depths[block_id] = node.start + len(node.block_ids) - 1

    def _split(self, node: Node, length: int) -> None:
        """Keep ``length`` blocks in ``node`` and move the rest into a child."""
        lower = Node(node.identity, node, node.start + length, node.keys[length - 1])
        lower.chunks, node.chunks = node.chunks[length:], node.chunks[:length]
        lower.block_ids, node.block_ids = node.block_ids[length:], node.block_ids[:length]
        lower.keys, node.keys = node.keys[length:], node.keys[:length]
        self._adopt_children(lower, node)
        node.children, node.firsts = {}, []
        node.attach(lower)
        self._nodes.update(dict.fromkeys(lower.block_ids, lower))

    def _merge_only_child(self, node: Node) -> None:
        child = node.only_child()
        if child is None:
            return
        node.chunks += child.chunks
        node.block_ids += child.block_ids
        node.keys += child.keys
        self._adopt_children(node, child)
        self._nodes.update(dict.fromkeys(child.block_ids, node))

    @staticmethod
    def _adopt_children(to: Node, of: Node) -> None:
        to.children, to.firsts = of.children, of.firsts
        for bucket in to.children.values():
            for child in bucket:
                child.parent = to


def _num_shared(one: Chunk, other: Chunk) -> int:
    """Return how many tokens both begin with."""
    limit = min(len(one), len(other))
    return next((i for i in range(limit) if one[i] != other[i]), limit)
