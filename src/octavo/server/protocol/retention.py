"""Hints about how long a request's KV should stay in the prefix cache."""

from pydantic import Field

from octavo.core.request import DEFAULT_RETENTION_PRIORITY, Retention
from octavo.server.protocol.validation import StrictModel


class KVCacheRetention(StrictModel):
    """For all blocks of the request; names and ranges are TensorRT-LLM's."""

    priority: int = Field(default=DEFAULT_RETENTION_PRIORITY, ge=0, le=100)
    """0 to 100; blocks of a lower priority are evicted first."""
    duration_ms: int | None = Field(default=None, gt=0)
    """How long after the last use the priority holds, then it is 35 again; null: for ever."""
    store: bool = True
    """Whether other requests may reuse the KV that this one computes (it may reuse theirs)."""

    def wish(self) -> Retention:
        """Return what the engine takes."""
        ttl_s = None if self.duration_ms is None else self.duration_ms / 1000
        return Retention(self.priority, ttl_s, self.store)
