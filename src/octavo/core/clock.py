"""Time as an argument: the pure tower is told what time it is."""

from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds from an arbitrary start; never goes back."""


class ManualClock:
    """A clock that moves only when told to, for tests and simulation."""

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        """Return the current time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds``, which must not be negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
