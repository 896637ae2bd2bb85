"""From serving to stopped: who is being answered, and when that has to end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final

from octavo.core.errors import OverloadedError, UnavailableError

DRAINING: Final = "The server is shutting down and takes no new requests."
EXPIRED: Final = "The server shut down before this answer was complete."


class Lifecycle:
    """Counts requests in progress; refuses new ones while draining; ends them at the deadline.

    All methods are called on the server's event loop.
    """

    def __init__(self) -> None:
        self._num_active = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_draining = False
        self._is_expired = False
        self._scopes: set[asyncio.Timeout] = set()

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._is_draining

    @property
    def num_active(self) -> int:
        """Requests whose answer is not complete."""
        return self._num_active

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Hold this while a request is answered; UnavailableError while draining."""
        if self._is_draining:
            raise UnavailableError(DRAINING)
        self._num_active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_active -= 1
            if self._num_active == 0:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Do slow work inside this: it ends with UnavailableError once the drain expires."""
        if self._is_expired:
            raise UnavailableError(EXPIRED)
        scope = asyncio.timeout(None)
        self._scopes.add(scope)
        try:
            async with scope:
                yield
        except TimeoutError:
            if scope.expired():
                raise UnavailableError(EXPIRED) from None
            raise
        finally:
            self._scopes.discard(scope)

    def begin_drain(self) -> None:
        """Refuse new requests from now on."""
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every answer is complete; False if one still is not after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def expire(self) -> None:
        """End all work in progress with an error."""
        self._is_expired = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes:
            scope.reschedule(now)


class Admission:
    """Bounds how many sequences are in the engine, running or waiting, at once.

    Sequences that do not run wait, so ``limit`` is the engine's ``max_num_seqs`` plus the longest
    queue that is wanted. None: no bound.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._num_inside = 0

    @contextlib.contextmanager
    def sequences(self, count: int) -> Iterator[None]:
        """Hold this while ``count`` sequences are in the engine.

        A request larger than the limit gets in when it would be alone.

        Raises:
            OverloadedError: too many are inside.
        """
        full = self._limit is not None and self._num_inside + count > self._limit
        if full and self._num_inside > 0:
            raise OverloadedError("The queue is full: try again later.")
        self._num_inside += count
        try:
            yield
        finally:
            self._num_inside -= count
