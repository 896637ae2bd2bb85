"""Shadow caches: what other policies would hold, by keys alone, to know what they would hit."""

from collections import OrderedDict
from collections.abc import Container, Sequence

from octavo.kvcache.eviction.forecast import Kind, ReuseForecast
from octavo.kvcache.eviction.worth_order import WorthOrder
from octavo.kvcache.keys import BlockKey


class ShadowLRU:
    """A cache of as many blocks that forgets the least recently used. O(1) a block."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def use(self, keys: Sequence[BlockKey]) -> int:
        """Use a prefix; return how many of its leading blocks were there."""
        num_hits = _count_leading(keys, self._keys)
        for key in reversed(keys):  # so that a block is forgotten before those it follows
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)
        return num_hits


class _Node:
    __slots__ = ("key", "kind", "num_children", "parent", "tick")

    def __init__(self, key: BlockKey, parent: "_Node | None") -> None:
        self.key = key
        self.parent = parent
        self.num_children = 0
        self.kind: Kind = 0
        self.tick = 0


class ShadowForecast:
    """A cache of as many blocks that forgets the leaf worth least by a forecast."""

    def __init__(self, num_blocks: int, forecast: ReuseForecast) -> None:
        self._num_blocks = num_blocks
        self._forecast = forecast
        self._nodes: dict[BlockKey, _Node] = {}
        self._order: WorthOrder[_Node] = WorthOrder(forecast)

    def use(self, keys: Sequence[BlockKey], kinds: Sequence[Kind], tick: int) -> int:
        """Use a prefix whose blocks are of these kinds now; return how many led it."""
        num_hits = _count_leading(keys, self._nodes)
        parent: _Node | None = None
        for key, kind in zip(keys, kinds, strict=True):
            node = self._nodes.get(key)
            if node is None:
                node = self._insert(key, parent)
            elif node in self._order:
                self._order.remove(node)
            node.kind, node.tick = kind, tick
            parent = node
        self._evict()  # spares this prefix: its last block is no candidate yet
        if parent is not None and not parent.num_children:
            self._order.add(parent, parent.kind, parent.tick)
            self._evict()
        return num_hits

    def _insert(self, key: BlockKey, parent: _Node | None) -> _Node:
        node = self._nodes[key] = _Node(key, parent)
        if parent is not None:
            parent.num_children += 1
        return node

    def _evict(self) -> None:
        while len(self._nodes) > self._num_blocks and len(self._order):
            node = self._order.first()
            self._order.remove(node)
            del self._nodes[node.key]
            parent = node.parent
            if parent is not None:
                parent.num_children -= 1
                if not parent.num_children:
                    self._order.add(parent, parent.kind, parent.tick)


def _count_leading(keys: Sequence[BlockKey], held: Container[BlockKey]) -> int:
    for index, key in enumerate(keys):
        if key not in held:
            return index
    return len(keys)
