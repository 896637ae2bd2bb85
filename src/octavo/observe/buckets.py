"""Histograms that count many observations at once; bounds are vLLM's, so dashboards carry over."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

# fmt: off
FIRST_TOKEN_S: Final = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
    160, 640, 2560,
)
"""Upper bounds of time to first token, in seconds."""

INTER_TOKEN_S: Final = (
    .01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)
"""Upper bounds of times per output token, in seconds."""

REQUEST_S: Final = (
    .3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)
"""Upper bounds of a request's phases, in seconds."""
# fmt: on

STEP_TOKENS: Final = (1, *(2**power for power in range(3, 15)))
"""Upper bounds of tokens per step: 1, 8, 16, … 16384."""

TOKENS: Final = tuple(digit * 10**power for power in range(8) for digit in (1, 2, 5))
"""Upper bounds of tokens per request: 1, 2, 5, 10, … shown up to the model's context length."""


class BucketCounts:
    """Counts of one histogram. Not thread-safe: the owner holds a lock."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        """Sum of all observed values."""

    def observe(self, value: float) -> None:
        """Count one value; a value equal to a bound belongs to that bound's bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count each of the values."""
        for value in values:
            self.observe(value)

    def cumulative(self, limit: float = float("inf")) -> list[tuple[str, float]]:
        """Return (upper bound, observations at or below it), without finite bounds over limit."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip(self._bounds, self._counts, strict=False):
            running += count
            if bound <= limit:
                rows.append((str(float(bound)), running))
        rows.append(("+Inf", running + self._counts[-1]))
        return rows
