"""Candidates ordered by what a forecast says keeping them is worth now."""

import heapq
from collections.abc import Hashable
from typing import Generic, TypeVar

from octavo.core.errors import InvariantError
from octavo.kvcache.eviction.forecast import Kind, ReuseForecast

ItemT = TypeVar("ItemT", bound=Hashable)


class WorthOrder(Generic[ItemT]):
    """Finds the item worth least, though all worths change with time.

    Items of one kind and tick share their worth, so they share a stack; a heap orders the stacks
    and is made anew when a tick ends. Within a stack the last one in goes
    first: the parent that eviction uncovers follows its child at once, and a prefix is given up
    as a whole rather than every prefix a little.
    """

    def __init__(self, forecast: ReuseForecast) -> None:
        self._forecast = forecast
        self._stacks: dict[tuple[Kind, int], dict[ItemT, None]] = {}
        self._places: dict[ItemT, tuple[Kind, int]] = {}
        self._heap: list[tuple[float, Kind, int]] = []
        self._heap_tick = -1

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, item: ItemT) -> bool:
        return item in self._places

    def add(self, item: ItemT, kind: Kind, tick: int) -> None:
        """Take in an item of a kind that was last used at a tick."""
        place = (kind, tick)
        self._places[item] = place
        stack = self._stacks.get(place)
        if stack is None:
            stack = self._stacks[place] = {}
            worth = self._forecast.worth(kind, self._forecast.tick - tick)
            heapq.heappush(self._heap, (worth, kind, tick))
        stack[item] = None
        if len(self._heap) > 2 * len(self._stacks) + 64:
            self._rebuild()  # nothing was evicted for long, and emptied stacks piled up

    def remove(self, item: ItemT) -> None:
        """Drop an item."""
        place = self._places.pop(item)
        stack = self._stacks[place]
        del stack[item]
        if not stack:
            del self._stacks[place]

    def first(self) -> ItemT:
        """Return the item worth least."""
        forecast = self._forecast
        if self._heap_tick != forecast.tick:
            self._rebuild()
        while self._heap:
            _, kind, tick = self._heap[0]
            stack = self._stacks.get((kind, tick))
            if stack:
                return next(reversed(stack))
            heapq.heappop(self._heap)
        raise InvariantError("a victim was asked for, but nothing can be evicted")

    def _rebuild(self) -> None:
        now, worth = self._forecast.tick, self._forecast.worth
        self._heap_tick = now
        self._heap = [(worth(kind, now - tick), kind, tick) for kind, tick in self._stacks]
        heapq.heapify(self._heap)
