"""The eviction policies by name."""

from typing import Final

from octavo.core.registry import Registry
from octavo.kvcache.eviction.policy import EvictionPolicy
from octavo.kvcache.eviction.predict import PredictedReuse
from octavo.kvcache.eviction.ranked import (
    CostPerByte,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    SegmentedLRU,
)

EVICTION_POLICIES: Final[Registry[EvictionPolicy]] = Registry(
    "--eviction-policy",
    ("victim", "attach", "record", "add", "remove"),
    {
        "lru": LeastRecentlyUsed,
        "lfu": LeastFrequentlyUsed,
        "slru": SegmentedLRU,
        "cost": CostPerByte,
        "predict": PredictedReuse,
    },
)
