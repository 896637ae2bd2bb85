"""Replays a trace through the cache that serves, without a model, and counts what hit."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.config import CacheConfig
from octavo.core.errors import SettingError
from octavo.core.ids import SequenceId
from octavo.core.request import CacheIdentity
from octavo.kvcache.eviction.counters import EvictionStats
from octavo.kvcache.eviction.policy import EvictionPolicy
from octavo.kvcache.manager import KVCacheManager
from octavo.workload.cache_trace import CacheTrace, TraceRequest

_ANY_TOKEN = 0


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What the cache did with a trace."""

    num_tokens: int
    hit_blocks: tuple[int, ...]
    """Of each request, the leading blocks that were cached."""
    num_hit_tokens: int
    eviction: EvictionStats

    @property
    def token_hit_ratio(self) -> float:
        """Share of the prompts' tokens that were cached."""
        return self.num_hit_tokens / self.num_tokens if self.num_tokens else 0.0


def replay(
    trace: CacheTrace,
    num_blocks: int,
    policy: str | EvictionPolicy,
    *,
    on_request: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Serve one request after the other from a cache of ``num_blocks``.

    A request may hit all its blocks: the token that is always computed anew comes after them.

    Args:
        trace: what is asked.
        num_blocks: blocks of the pool.
        policy: a name in the registry, ``module:Class``, or the object itself.
        on_request: told ``(index, hit blocks)`` after each request, for progress and for tests.

    Raises:
        SettingError: a request needs more blocks than there are, or there is no such policy.
    """
    name = policy if isinstance(policy, str) else "lru"
    config = CacheConfig(num_blocks, trace.block_size, eviction_policy=name)
    eviction = None if isinstance(policy, str) else policy
    manager = KVCacheManager(config, eviction=eviction)
    hits = []
    for index, request in enumerate(trace.requests):
        hits.append(_serve(manager, SequenceId(index), request))
        if on_request is not None:
            on_request(index, hits[-1])
    per_block = trace.tokens_per_block
    num_hit_tokens = sum(
        min(count * per_block, request.num_tokens)
        for count, request in zip(hits, trace.requests, strict=True)
    )
    stats = manager.eviction_stats()[name]
    return ReplayResult(trace.num_tokens, tuple(hits), num_hit_tokens, stats)


def _serve(manager: KVCacheManager, sequence_id: SequenceId, request: TraceRequest) -> int:
    size = manager.config.block_size
    num_full = len(request.token_ids) // size * size
    token_ids = request.token_ids[:num_full]
    identity = CacheIdentity("trace", "trace", "none", tenant=request.tenant)
    manager.advance(request.arrival_s)
    hit = manager.match(identity, (*token_ids, _ANY_TOKEN))
    if not manager.admit(sequence_id, hit, num_full):
        raise SettingError(
            f"A request of the trace takes {num_full // size} blocks: a cache of "
            f"{manager.config.num_blocks} is too small for it.",
            name="--num-blocks",
        )
    manager.commit(sequence_id, token_ids, num_full)
    manager.free(sequence_id)
    return len(hit.block_ids)
