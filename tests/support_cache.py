"""Shortcuts to use a KV cache without a scheduler."""

from octavo.core.ids import SequenceId
from octavo.core.request import DEFAULT_RETENTION, CacheIdentity
from octavo.kvcache.invariants import check_cache

IDENTITY = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")


def use(manager, number, tokens, *, retention=DEFAULT_RETENTION, identity=IDENTITY):
    """Run a sequence over ``tokens`` from admission to the end; return the tokens it hit.

    All of its blocks may hit: the token that is always computed anew comes after them.
    """
    sequence = SequenceId(number)
    hit = manager.match(identity, [*tokens, 0])
    assert manager.admit(sequence, hit, len(tokens), retention)
    manager.commit(sequence, tokens, len(tokens))
    manager.free(sequence)
    check_cache(manager)
    return hit.num_tokens


def cached(manager, tokens, *, identity=IDENTITY):
    """Return how many of ``tokens`` are cached, without using them."""
    return manager.match(identity, [*tokens, 0]).num_tokens
