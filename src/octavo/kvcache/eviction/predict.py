"""The policy that forecasts reuse, and falls back to LRU wherever LRU turns out better."""

from octavo.core.ids import BlockId
from octavo.kvcache.eviction.forecast import Kind, ReuseForecast
from octavo.kvcache.eviction.policy import CachedBlock, PrefixUse
from octavo.kvcache.eviction.ranked import LeastRecentlyUsed
from octavo.kvcache.eviction.shadow import ShadowForecast, ShadowLRU
from octavo.kvcache.eviction.worth_order import WorthOrder


class Leader:
    """Decides from the hits of two shadow caches which of them to follow.

    It begins with LRU, and follows the forecast once that has hit more since it was last behind,
    by a margin and by three standard deviations of chance. From then on it keeps an account of
    what the forecast won and lost lately, and returns to LRU when the account is overdrawn by
    more than chance explains. So a forecast that turns bad costs about what it had won, a few
    deviations, and one turnover of the cache. Each return doubles the margin asked of it next
    time: a stream that fools it costs a number of turnovers that grows only with the logarithm
    of the stream's length.
    """

    def __init__(self, num_blocks: int) -> None:
        self._overdraft = max(8.0, num_blocks / 64)
        self._margin = self._overdraft
        self._memory = 8.0 * num_blocks
        """Touches over which the account forgets."""
        self._account = 0.0
        self._noise = 0.0
        """Sum of the squared differences, for the standard deviation of the account."""
        self.forecast_leads = False

    def compare(self, num_touches: int, lru_hits: int, forecast_hits: int) -> None:
        """Take in what one use of a prefix hit in either shadow, in blocks."""
        gain = forecast_hits - lru_hits
        if self.forecast_leads:
            kept = max(0.0, 1.0 - num_touches / self._memory)
            self._account = kept * self._account + gain
            self._noise = kept * self._noise + gain * gain
            if self._account < -max(self._overdraft, 2.0 * self._noise**0.5):
                self._margin *= 2
                self._change_sides()
            return
        self._account += gain
        self._noise += gain * gain
        if self._account <= 0:
            self._account = self._noise = 0.0
        elif self._account > max(self._margin, 3.0 * self._noise**0.5):
            self._change_sides()

    def _change_sides(self) -> None:
        self.forecast_leads = not self.forecast_leads
        self._account = self._noise = 0.0


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
        lru_hits = self._shadow_lru.use(use.keys)
        forecast_hits = self._shadow_forecast.use(use.keys, kinds, tick)
        self._leader.compare(len(use.keys), lru_hits, forecast_hits)

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
