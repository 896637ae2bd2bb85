"""The laws of the KV cache as functions; each raises InvariantError at the first breach."""

from collections import Counter
from itertools import pairwise

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId
from octavo.kvcache.block import BlockState
from octavo.kvcache.block_pool import BlockPool
from octavo.kvcache.contiguous import check_contiguous
from octavo.kvcache.flat_cache import FlatCache, check_flat_cache
from octavo.kvcache.manager import KVCacheManager
from octavo.kvcache.radix_tree import Node, RadixTree


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


def check_pool(pool: BlockPool) -> None:
    """Every block is in exactly one state and in the list of that state, once."""
    free = [block.block_id for block in pool.free_blocks()]
    cached = [block.block_id for block in pool.cached_blocks()]
    _require(len(set(free)) == len(free), "the free list has duplicates")
    _require(len(set(cached)) == len(cached), "the LRU list has duplicates")
    _require((len(free), len(cached)) == (pool.num_free, pool.num_cached), "list lengths differ")
    lists = dict.fromkeys(free, BlockState.FREE) | dict.fromkeys(cached, BlockState.CACHED)
    for block in pool.blocks():
        expected = lists.get(block.block_id, BlockState.USED)
        _require(
            block.state is expected,
            f"block {block.block_id} is {block.state.value} but linked as {expected.value}",
        )
    usage = pool.usage()
    total = usage.num_free + usage.num_cached + usage.num_used
    _require(total == usage.num_total, "free + cached + used differs from the total")


def check_tree(tree: RadixTree, block_size: int) -> None:
    """Nodes are compressed, runs consistent, chunks full, keys unique to their place."""
    seen: Counter[BlockId] = Counter()
    for node in tree.nodes():
        _check_node(node, block_size)
        seen.update(node.block_ids)
    _require(len(seen) == len(tree), "the tree counts other blocks than its nodes hold")
    _require(all(count == 1 for count in seen.values()), "a block is in the tree twice")
    _require(all(block_id in tree for block_id in seen), "the tree does not find its own block")


def _check_node(node: Node, block_size: int) -> None:
    lengths = {len(node.chunks), len(node.block_ids), len(node.keys)}
    _require(len(lengths) == 1, "a run has unequal numbers of chunks, blocks and keys")
    _require(all(len(chunk) == block_size for chunk in node.chunks), "a cached block is not full")
    children = [child for bucket in node.children.values() for child in bucket]
    if node.parent is None:
        _require(bool(children) and not node.block_ids, "a root is empty or holds blocks")
    else:
        _require(bool(node.block_ids), "a node holds no block")
        _require(len(children) != 1, "a node and its only child were not merged")
    firsts = {child.chunks[0] for child in children}
    _require(len(firsts) == len(children), "two children start with the same block")
    _require(node.firsts == sorted(firsts), "the sorted first blocks are not those of the children")
    for child in children:
        _require(child.parent is node, "a child names another parent")
        _require(child.start == node.start + len(node.block_ids), "a child starts elsewhere")
        _require(child.key_before == node.end_key, "a child chains to another key")
        _require(child.identity == node.identity, "a child belongs to another namespace")


def check_cache(manager: KVCacheManager) -> None:
    """References add up, nothing in use can be evicted, and the LRU order is leaf first."""
    check_pool(manager.pool)
    _check_index(manager)
    _check_references(manager)
    for sequence_id, table in manager.tables.items():
        committed = table.block_ids[: table.num_committed]
        _require(
            all(block_id in manager.tree for block_id in committed),
            f"sequence {sequence_id} committed a block that the tree does not hold",
        )
        depths = [manager.tree.depth(block_id) for block_id in committed]
        _require(
            depths == list(range(len(depths))), f"sequence {sequence_id} is out of the tree's order"
        )
        own = table.block_ids[table.num_committed :]
        _require(
            not any(block_id in manager.tree for block_id in own),
            f"sequence {sequence_id} may write a block that the tree holds",
        )
    _check_candidates(manager)
    _check_expectations(manager)
    if manager.config.is_contiguous:
        check_contiguous(manager.tables.values(), manager.config.num_blocks)


def _check_index(manager: KVCacheManager) -> None:
    """Only a tree promises leaf-first order; a user's own kind of index has no laws here."""
    if isinstance(manager.tree, RadixTree):
        check_tree(manager.tree, manager.config.block_size)
        _check_eviction_order(manager, manager.tree)
    elif isinstance(manager.tree, FlatCache):
        check_flat_cache(manager.tree, manager.config.block_size)


def _check_references(manager: KVCacheManager) -> None:
    entries = Counter(block_id for table in manager.tables.values() for block_id in table.block_ids)
    entries.update(manager.pinned_blocks())
    for block in manager.pool.blocks():
        in_tree = block.block_id in manager.tree
        _require(block.in_tree == in_tree, f"block {block.block_id}: pool and tree disagree")
        expected = entries[block.block_id] + in_tree
        _require(
            block.references == expected,
            f"block {block.block_id} has {block.references} references, not {expected}",
        )
    _check_shared(manager)


def _check_shared(manager: KVCacheManager) -> None:
    """Whoever shares a block shares all those before it: tables are paths that part for good.

    (A flat cache may know two equal blocks, so there only the depth must be the same.)
    """
    are_paths = isinstance(manager.tree, RadixTree)
    places: dict[BlockId, tuple[int, BlockId | None]] = {}
    for table in manager.tables.values():
        parent: BlockId | None = None
        for index, block_id in enumerate(table.block_ids):
            found = places.setdefault(block_id, (index, parent))
            _require(found[0] == index, f"block {block_id} is at two places of a prefix")
            _require(
                found[1] == parent or not are_paths, f"block {block_id} follows different blocks"
            )
            parent = block_id


def _check_eviction_order(manager: KVCacheManager, tree: RadixTree) -> None:
    position = {block.block_id: rank for rank, block in enumerate(manager.pool.cached_blocks())}
    for node in tree.nodes():
        above = node.parent.block_ids[-1:] if node.parent else []
        path = above + node.block_ids
        for parent, child in pairwise(path):
            if parent in position:
                _require(
                    child in position, f"block {child} is in use but {parent} before it is not"
                )
                _require(
                    position[child] < position[parent],
                    f"block {parent} would be evicted before {child}, which follows it",
                )


def _check_candidates(manager: KVCacheManager) -> None:
    """The evictor knows exactly the blocks that can be evicted: cached leaves."""
    leaves = {
        block.block_id
        for block in manager.pool.cached_blocks()
        if manager.tree.is_leaf(block.block_id)
    }
    found = set(manager.eviction_candidates())
    _require(found == leaves, f"candidates {sorted(found)} are not the leaves {sorted(leaves)}")


def _check_expectations(manager: KVCacheManager) -> None:
    """What is spared for a waiting sequence is what it would hit, to the last whole block."""
    for waiter in manager.expecting():
        hit = manager.match(waiter.identity, waiter.token_ids, whole_blocks=True)
        found = hit.block_ids[-1] if hit.block_ids else None
        _require(
            waiter.block_id == found,
            f"block {waiter.block_id} is spared for sequence {waiter.sequence_id}, not {found}",
        )
