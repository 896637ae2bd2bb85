"""The body of ``POST /kv_cache/eviction_policy``."""

from octavo.server.protocol.validation import StrictModel


class EvictionPolicyRequest(StrictModel):
    """Which cached KV is to be forgotten first from now on."""

    policy: str
    """``lru``, ``lfu``, ``slru``, ``cost``, ``predict``, or the server's own from its start."""
