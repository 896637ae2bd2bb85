"""The offline optimum: a policy that knows the trace."""

from octavo.core.ids import BlockId
from octavo.kvcache.eviction.policy import CachedBlock, PrefixUse
from octavo.kvcache.eviction.ranked import Rank, RankedPolicy
from octavo.workload.cache_trace import CacheTrace

_NEVER = float("inf")


class Clairvoyant(RankedPolicy):
    """Forgets the leaf whose next use is farthest away (Belady, 1966, on a tree of prefixes).

    A block is used only together with all before it, so the next use of a block is never later
    than that of a block after it: the farthest of all blocks is always a leaf.
    """

    def __init__(self, trace: CacheTrace) -> None:
        super().__init__()
        self._next_uses = _next_uses(trace)
        self._num_served = 0
        self._next: dict[BlockId, float] = {}

    def record(self, use: PrefixUse) -> None:
        """Look up when each block of the request is used next."""
        coming = self._next_uses[self._num_served]
        self._num_served += 1
        self._next.update(zip(use.block_ids, coming, strict=True))

    def rank(self, block: CachedBlock) -> Rank:
        """Return the farthest next use first."""
        return (-self._next[block.block_id],)


def _next_uses(trace: CacheTrace) -> list[list[float]]:
    """Return, of each request with a whole block, the next request to use each of its blocks."""
    prefixes: dict[tuple[object, ...], int] = {}
    paths: list[list[int]] = []
    for request in trace.requests:
        path: list[int] = []
        above = (request.tenant, -1)
        for start in range(0, len(request.token_ids) - trace.block_size + 1, trace.block_size):
            chunk = request.token_ids[start : start + trace.block_size]
            number = prefixes.setdefault((*above, chunk), len(prefixes))
            path.append(number)
            above = (request.tenant, number)
        if path:
            paths.append(path)
    coming: dict[int, float] = {}
    found = []
    for index in range(len(paths) - 1, -1, -1):
        found.append([coming.get(number, _NEVER) for number in paths[index]])
        coming.update(dict.fromkeys(paths[index], index))
    found.reverse()
    return found
