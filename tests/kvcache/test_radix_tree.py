"""The radix tree equals a brute-force set of prefixes, whatever the digest."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.errors import InvariantError
from octavo.core.request import CacheIdentity
from octavo.kvcache.invariants import check_tree
from octavo.kvcache.keys import blake2b
from octavo.kvcache.radix_tree import RadixTree

IDENTITIES = [
    CacheIdentity(model="m", tokenizer="t", kv_dtype="f", tenant=tenant) for tenant in ("a", "b")
]
DIGESTS = {
    "strong": blake2b,
    "one bit": lambda data: bytes([blake2b(data)[0] & 1]),
    "constant": lambda data: b"same",
}
Path = tuple[tuple[int, ...], ...]


class RadixMachine(RuleBasedStateMachine):
    """The model is a dict from (identity, chunks of the prefix) to the block that ends it."""

    @initialize(block_size=st.integers(1, 3), digest=st.sampled_from(sorted(DIGESTS)))
    def start(self, block_size, digest):
        self.size = block_size
        self.tree = RadixTree(block_size, DIGESTS[digest])
        self.model: dict[tuple[CacheIdentity, Path], int] = {}
        self.next_block = 0

    def _path(self, tokens) -> Path:
        size = self.size
        return tuple(
            tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)
        )

    @rule(
        identity=st.sampled_from(IDENTITIES),
        tokens=st.lists(st.integers(0, 1), max_size=12),
    )
    def insert(self, identity, tokens):
        """Insert a whole prefix; blocks that are there already are kept."""
        path = self._path(tokens)
        parent = None
        for length in range(1, len(path) + 1):
            place = (identity, path[:length])
            block, self.next_block = self.next_block, self.next_block + 1
            kept = self.tree.insert(identity, parent, path[length - 1], block)
            assert kept == self.model.setdefault(place, block)
            parent = kept

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        """A leaf can be removed, anything else cannot."""
        place = data.draw(st.sampled_from(sorted(self.model, key=repr)))
        block = self.model[place]
        if self._has_child(place):
            with pytest.raises(InvariantError, match="no leaf"):
                self.tree.remove(block)
        else:
            self.tree.remove(block)
            del self.model[place]

    def _has_child(self, place) -> bool:
        identity, path = place
        return any(
            other == identity and len(p) == len(path) + 1 and p[: len(path)] == path
            for other, p in self.model
        )

    @rule(
        identity=st.sampled_from(IDENTITIES),
        tokens=st.lists(st.integers(0, 1), max_size=14),
        limit=st.integers(0, 14),
    )
    def match(self, identity, tokens, limit):
        """The match is the longest prefix of whole blocks that the model has; it is read-only."""
        path = self._path(tokens)[:limit]
        expected = []
        for length in range(1, len(path) + 1):
            block = self.model.get((identity, path[:length]))
            if block is None:
                break
            expected.append(block)
        version = self.tree.version
        nodes = [(id(node), list(node.block_ids)) for node in self.tree.nodes()]
        assert self.tree.match(identity, tokens, len(path)) == tuple(expected)
        assert self.tree.version == version
        assert nodes == [(id(node), node.block_ids) for node in self.tree.nodes()]

    @invariant()
    def laws(self):
        if not hasattr(self, "tree"):
            return
        check_tree(self.tree, self.size)
        assert len(self.tree) == len(self.model)
        for place, block in self.model.items():
            assert self.tree.depth(block) == len(place[1]) - 1
            assert self.tree.is_leaf(block) == (not self._has_child(place))


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def fill(tree, identity, tokens, first_block):
    """Insert all of ``tokens``, block ids counted from ``first_block``."""
    parent = None
    for index, start in enumerate(range(0, len(tokens), 2)):
        chunk = tuple(tokens[start : start + 2])
        parent = tree.insert(identity, parent, chunk, first_block + index)


def shape(tree):
    """Return the runs of the tree by their start."""
    return sorted((node.start, node.block_ids) for node in tree.nodes() if node.block_ids)


def test_runs_are_compressed_split_and_merged():
    """A prefix is one node; divergence splits it at a block, removal of a branch heals it."""
    tree = RadixTree(2)
    fill(tree, IDENTITIES[0], [1, 2, 3, 4, 5, 6], 0)
    assert shape(tree) == [(0, [0, 1, 2])]
    fill(tree, IDENTITIES[0], [1, 2, 3, 4, 9, 9], 10)
    assert shape(tree) == [(0, [0, 1]), (2, [2]), (2, [12])]
    tree.remove(12)
    assert shape(tree) == [(0, [0, 1, 2])]


def test_an_empty_namespace_is_forgotten():
    """Salts are unbounded, so a namespace without blocks must cost nothing."""
    tree = RadixTree(2)
    fill(tree, IDENTITIES[0], [1, 2], 0)
    tree.remove(0)
    assert list(tree.nodes()) == []


def test_a_block_chains_only_to_its_own_namespace():
    """A parent of another identity, an unknown parent and a block twice are bugs."""
    tree = RadixTree(2)
    fill(tree, IDENTITIES[0], [1, 2], 0)
    with pytest.raises(InvariantError, match="namespace"):
        tree.insert(IDENTITIES[1], 0, (3, 4), 1)
    with pytest.raises(InvariantError, match="namespace"):
        tree.insert(IDENTITIES[0], 7, (3, 4), 1)
    with pytest.raises(InvariantError, match="already"):
        tree.insert(IDENTITIES[0], None, (3, 4), 0)
