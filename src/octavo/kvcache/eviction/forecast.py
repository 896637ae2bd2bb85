"""How soon a block of a kind is used again, learned from the past of the stream it serves."""

from collections import OrderedDict
from collections.abc import Sequence

from octavo.kvcache.keys import BlockKey

Kind = int
"""Index of a kind of block; see ``ReuseForecast.observe``."""

_NUM_BINS_PER_OCTAVE = 3
_NUM_OCTAVES = 11
_MAX_TENANTS = 8
_SHARED_USES = 8


def _make_edges() -> list[int]:
    """Return the lowest age of each bin, in ticks: 0, 1, 2, 3, 4, 5, 6, 8, 10, 13 ..."""
    steps = range(_NUM_OCTAVES * _NUM_BINS_PER_OCTAVE)
    return [0, *sorted({round(2 ** (step / _NUM_BINS_PER_OCTAVE)) for step in steps})]


class _Curve:
    """Of the blocks of a kind, how many were used again at which age, and how many never."""

    __slots__ = ("ended", "live", "reused")

    def __init__(self, num_bins: int) -> None:
        self.reused = [0.0] * num_bins
        self.ended = [0.0] * num_bins
        """Reused, or given up, at that age."""
        self.live: dict[int, int] = {}
        """Blocks not used again so far, by the tick of their use."""


class ReuseForecast:
    """Learns, kind by kind, the chance that a block is used again at each age.

    Age counts touches of blocks, in ticks of a sixteenth of the pool. For each kind it keeps the
    life table of its blocks (Kaplan-Meier: those that are still waiting count for the ages they
    have reached). ``worth`` is the most hits per block and tick that keeping a block from its age
    on can bring, over all the times one could give up (the Gittins index). It may rise with age:
    where people need minutes to answer, a block is worth more after two minutes than when it is
    fresh, and so a chosen part is kept long rather than everything briefly. Least Hit Density
    (Beckmann et al., NSDI 2018) ranks by the same data with one fixed time of giving up.
    """

    def __init__(self, num_blocks: int) -> None:
        self._tick_touches = max(1, num_blocks // 16)
        self._max_history = min(max(8 * num_blocks, 1 << 16), max(2 * num_blocks, 1 << 18))
        self._edges = _make_edges()
        self._num_bins = len(self._edges)
        self._bins = [
            index
            for index, (low, high) in enumerate(zip(self._edges, self._edges[1:], strict=False))
            for _ in range(low, high)
        ]
        self._widths = self._make_widths()
        self._prior = [
            0.3 * width / (low + width)
            for low, width in zip(self._edges, self._widths, strict=True)
        ]
        """With nothing learned the chance falls with age, which makes the order that of LRU."""
        self._touches = 0
        self._history: OrderedDict[BlockKey, tuple[int, Kind, int]] = OrderedDict()
        """Of each block seen lately, cached or not: tick of its last use, kind, earlier uses."""
        self._kinds: dict[tuple[int, ...], Kind] = {}
        self._tenants: dict[str, int] = {}
        self._curves: list[_Curve] = []
        self._worths: list[list[float]] = []
        self._pooled = self._prior
        self._default = self._index(self._prior)
        self._round_touches = max(4 * self._tick_touches, 1024)
        """Touches in which every kind's worths are computed anew once."""
        self._decay = 0.5 ** (self._round_touches / self._max_history)
        self._due = 0.0
        self._next_kind = 0
        self._sum_reused = [0.0] * self._num_bins
        self._sum_exposed = [0.0] * self._num_bins

    @property
    def tick(self) -> int:
        """The time."""
        return self._touches // self._tick_touches

    def observe(self, tenant: str, keys: Sequence[BlockKey]) -> list[Kind]:
        """Learn from a use of a prefix, and return the kind of each of its blocks.

        The kind says whose it is, how often the block was used before (fresh, once, twice, more:
        a shared prompt), whether the prefix continues one that few have used (a conversation) or
        starts anew, and how much of it was new (a long one-off document or a short question).
        """
        known, uses = self._known_prefix(keys)
        continues = known > 0 and uses < _SHARED_USES
        new = min((len(keys) - known).bit_length(), 9)
        owner = self._tenant(tenant)
        kinds = []
        for key in keys:
            entry = self._history.pop(key, None)
            num_uses = 0 if entry is None else entry[2] + 1
            kind = self._kind((owner, min(num_uses, 3), continues, new))
            if entry is not None:
                self._end(entry[0], entry[1], reused=True)
            self._begin(key, kind, num_uses)
            kinds.append(kind)
        while len(self._history) > self._max_history:
            _, (tick, kind, _) = self._history.popitem(last=False)
            self._end(tick, kind, reused=False)
        self._update(len(keys))
        return kinds

    def unknown(self) -> Kind:
        """Return the kind of blocks of which nothing is known."""
        return self._kind((-1, 0, 0, 0))

    def worth(self, kind: Kind, age: int) -> float:
        """Return the hits per tick to be had by keeping a block of this kind and age in ticks."""
        return self._worths[kind][self._bin(age)]

    def _make_widths(self) -> list[float]:
        gaps = [float(high - low) for low, high in zip(self._edges, self._edges[1:], strict=False)]
        return [*gaps, float(self._edges[-1])]

    def _bin(self, age: int) -> int:
        return self._bins[age] if age < len(self._bins) else self._num_bins - 1

    def _known_prefix(self, keys: Sequence[BlockKey]) -> tuple[int, int]:
        """Return the leading blocks seen before, and the uses of the last of them."""
        uses = 0
        for index, key in enumerate(keys):
            entry = self._history.get(key)
            if entry is None:
                return index, uses
            uses = entry[2] + 1
        return len(keys), uses

    def _tenant(self, tenant: str) -> int:
        """Return a number per tenant; those past the first few share one."""
        found = self._tenants.get(tenant)
        if found is not None:
            return found
        if len(self._tenants) >= _MAX_TENANTS:
            return _MAX_TENANTS
        self._tenants[tenant] = len(self._tenants)
        return self._tenants[tenant]

    def _kind(self, features: tuple[int, ...]) -> Kind:
        kind = self._kinds.get(features)
        if kind is None:
            kind = self._kinds[features] = len(self._kinds)
            self._curves.append(_Curve(self._num_bins))
            self._worths.append(self._default)
        return kind

    def _begin(self, key: BlockKey, kind: Kind, num_uses: int) -> None:
        tick = self._touches // self._tick_touches
        self._history[key] = (tick, kind, num_uses)
        live = self._curves[kind].live
        live[tick] = live.get(tick, 0) + 1
        self._touches += 1

    def _end(self, tick: int, kind: Kind, *, reused: bool) -> None:
        curve = self._curves[kind]
        curve.live[tick] -= 1
        if not curve.live[tick]:
            del curve.live[tick]
        index = self._bin(self.tick - tick)
        curve.ended[index] += 1.0
        if reused:
            curve.reused[index] += 1.0

    def _update(self, num_touches: int) -> None:
        """Compute worths anew, a few kinds at a time, so that no step of the engine is held up."""
        self._due += len(self._curves) * num_touches / self._round_touches
        while self._due >= 1.0:
            self._due -= 1.0
            if self._next_kind >= len(self._curves):
                self._end_round()
            self._update_kind(self._next_kind)
            self._next_kind += 1

    def _update_kind(self, kind: Kind) -> None:
        """Compute a kind's worths from its life table, and let what is long ago fade."""
        curve = self._curves[kind]
        exposed = self._life_table(curve)
        chances = list(map(self._chance, curve.reused, exposed, self._pooled))
        self._worths[kind] = self._index(chances)
        self._sum_reused = list(map(float.__add__, self._sum_reused, curve.reused))
        self._sum_exposed = list(map(float.__add__, self._sum_exposed, exposed))
        curve.reused = [count * self._decay for count in curve.reused]
        curve.ended = [count * self._decay for count in curve.ended]

    def _end_round(self) -> None:
        """Take what all kinds together showed as what to expect of one without a past."""
        chances = map(self._chance, self._sum_reused, self._sum_exposed, self._prior)
        self._pooled = list(chances)
        self._default = self._index(self._pooled)
        self._sum_reused = [0.0] * self._num_bins
        self._sum_exposed = [0.0] * self._num_bins
        self._next_kind = 0

    @staticmethod
    def _chance(reused: float, exposed: float, prior: float) -> float:
        """Return the share reused, as if twenty more had behaved as the prior says."""
        return (reused + 20.0 * prior) / (exposed + 20.0)

    def _life_table(self, curve: _Curve) -> list[float]:
        """Return how many blocks were seen through each bin; those still in it count half."""
        waiting = [0.0] * self._num_bins
        now = self.tick
        for tick, count in curve.live.items():
            waiting[self._bin(now - tick)] += count
        exposed = [0.0] * self._num_bins
        reached = 0.0
        for index in range(self._num_bins - 1, -1, -1):
            reached += curve.ended[index] + waiting[index]
            exposed[index] = reached - 0.5 * waiting[index]
        return exposed

    def _index(self, chances: Sequence[float]) -> list[float]:
        """Return, per bin, the best ratio of expected hits to expected ticks from there on.

        Backwards; a stretch of bins is joined to the next as long as that one has the better
        ratio, since whoever keeps a block through the first then keeps it through the second.
        """
        worths = [0.0] * self._num_bins
        stretches: list[tuple[float, float, float]] = []
        for index in range(self._num_bins - 1, -1, -1):
            chance = chances[index]
            hits, ticks, left = chance, self._widths[index] * (1.0 - chance / 2), 1.0 - chance
            while stretches and stretches[-1][0] * ticks > hits * stretches[-1][1]:
                more_hits, more_ticks, stay = stretches.pop()
                hits += left * more_hits
                ticks += left * more_ticks
                left *= stay
            stretches.append((hits, ticks, left))
            worths[index] = hits / ticks
        return worths
