"""The policy that forecasts reuse, and falls back to LRU wherever LRU turns out better."""

from octavo.core.ids import BlockId
from octavo.kvcache.eviction.forecast import Kind, ReuseForecast
from octavo.kvcache.eviction.policy import CachedBlock, PrefixUse
from octavo.kvcache.eviction.ranked import LeastRecentlyUsed
from octavo.kvcache.eviction.shadow import ShadowForecast, ShadowLRU
from octavo.kvcache.eviction.worth_order import WorthOrder


class Leader:
    """Decides from the hits of two shadow caches which of them to follow.

    It begins with LRU. What the other one is ahead by since it was last behind must exceed a
    margin before it changes sides (a CUSUM test), so what can be lost on a side is about one
    margin and one turnover of the cache. Each return to LRU doubles the margin that the forecast
    must show next time: a stream that fools it costs a number of turnovers that grows only with
    the logarithm of the stream's length.
    """

    def __init__(self, num_blocks: int) -> None:
        self._base = max(8.0, num_blocks / 64)
        self._margin = self._base
        self._ahead = 0.0
        self.forecast_leads = False

    def compare(self, lru_hits: int, forecast_hits: int) -> None:
        """Take in the hits, in blocks, that one use of a prefix had in either shadow."""
        gain = lru_hits - forecast_hits if self.forecast_leads else forecast_hits - lru_hits
        self._ahead = max(0.0, self._ahead + gain)
        if self._ahead <= (self._base if self.forecast_leads else self._margin):
            return
        if self.forecast_leads:
            self._margin *= 2
        self.forecast_leads = not self.forecast_leads
        self._ahead = 0.0


class PredictedReuse:
    """Forget the block whose keeping is worth least, by a forecast of reuse learned online.

    The forecast and two shadow caches, one under LRU and one under the forecast, see every use.
    The real cache follows the shadow that hits more. The workload-aware policy of "KVCache in the
    wild" (2025) predicts by category, too; the fallback and the index are Octavo's.
    """

    def __init__(self) -> None:
        self.attach(1)

    def attach(self, num_blocks: int) -> None:
        """Size the shadows and the memory for what was forgotten."""
        self._forecast = ReuseForecast(num_blocks)
        self._leader = Leader(num_blocks)
        self._shadow_lru = ShadowLRU(num_blocks)
        self._shadow_forecast = ShadowForecast(num_blocks, self._forecast)
        self._recency = LeastRecentlyUsed()
        self._worths: WorthOrder[BlockId] = WorthOrder(self._forecast)
        self._marks: dict[BlockId, tuple[Kind, int]] = {}

    @property
    def forecast_leads(self) -> bool:
        """Whether the forecast chooses now, and not LRU."""
        return self._leader.forecast_leads

    def record(self, use: PrefixUse) -> None:
        """Learn from the use, and see which shadow served it better."""
        tick = self._forecast.tick
        kinds = self._forecast.observe(use.identity.tenant, use.keys)
        self._marks.update(
            (block, (kind, tick)) for block, kind in zip(use.block_ids, kinds, strict=True)
        )
        self._leader.compare(
            self._shadow_lru.use(use.keys), self._shadow_forecast.use(use.keys, kinds, tick)
        )

    def add(self, block: CachedBlock) -> None:
        """Take a candidate into both orders."""
        self._recency.add(block)
        mark = self._marks.get(block.block_id)
        kind, tick = mark if mark is not None else (self._forecast.unknown(), self._forecast.tick)
        self._worths.add(block.block_id, kind, tick)

    def remove(self, block_id: BlockId) -> None:
        """Drop a candidate from both orders."""
        self._recency.remove(block_id)
        self._worths.remove(block_id)

    def victim(self) -> BlockId:
        """Return the choice of whoever leads."""
        if self._leader.forecast_leads:
            return self._worths.first()
        return self._recency.victim()
