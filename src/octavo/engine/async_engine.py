"""The front end of servers: completions as async streams, from an engine on its own thread."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from octavo.core.errors import InvalidRequestError, UnavailableError
from octavo.core.events import Observer, SchedulerStats
from octavo.core.ids import RequestId, TokenId
from octavo.core.request import DEFAULT_RETENTION, Request, Retention
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.engine.core import EngineCore
from octavo.engine.grammars import GrammarPool
from octavo.engine.output_processor import OutputProcessor
from octavo.engine.outputs import GenerationDelta, ModelInfo
from octavo.engine.requests import RequestBuilder
from octavo.engine.thread import (
    Abort,
    Add,
    EngineThread,
    Finish,
    Outbox,
    SetEvictionPolicy,
)
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.models.tokenizer import Tokenizer
from octavo.runner.grammar import CompiledGrammar

logger = logging.getLogger(__name__)

QUIET_S: Final = 1.0
"""How long after the start the vocabulary is prepared for grammars, if nothing runs then."""
COMMAND_TIMEOUT_S: Final = 60.0
"""How long the engine thread may take to get to a command; it does so between steps."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """The engine has stopped for good."""

    message: str


_Item = GenerationDelta | _Failure


class AsyncEngine:
    """Serves completions on one event loop while an engine thread computes them.

    All methods are called on the loop that called ``start``.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        requests: RequestBuilder,
        info: ModelInfo,
        observer: Observer,
        grammars: GrammarPool | None = None,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._core = core
        self._requests = requests
        self._grammars = grammars
        self._processor = OutputProcessor(tokenizer, observer)
        self._thread = EngineThread(core, self._hand_over)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[RequestId, asyncio.Queue[_Item]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._failure: str | None = None

    def start(self) -> None:
        """Start the engine thread; must be called on the event loop that will be used."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._loop.call_later(QUIET_S, self._prepare_grammars)

    def _prepare_grammars(self) -> None:
        """Prepare for grammars once nothing runs, neither the start nor a request."""
        assert self._loop is not None
        if self._grammars is None or not self.is_running:
            return
        if self._queues:
            self._loop.call_later(QUIET_S, self._prepare_grammars)
            return
        self._grammars.start()

    def shutdown(self) -> None:
        """Stop the engine thread after its step; live completions end with an error."""
        self._thread.stop()
        if self._grammars is not None:
            self._grammars.shutdown()
        self._fail("The server is shutting down.")

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no completion is live; False if some still is after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    @property
    def is_running(self) -> bool:
        """Whether the engine can serve."""
        return self._failure is None and self._thread.is_alive

    def stats(self) -> SchedulerStats:
        """Return the scheduler's gauges and totals, as of now."""
        return self._core.stats()

    async def set_eviction_policy(self, name: str) -> None:
        """Switch the KV cache's eviction policy between two steps; nothing cached is lost.

        Only the built-in policies and those named by the operator can be had: a class of another
        name would be code that a client chooses.

        Raises:
            InvalidRequestError: the name is not known; the old policy stays in force.
            SettingError: the operator's own policy fails to take over; the old one stays, too.
            UnavailableError: the engine does not run, or does not answer.
        """
        known = dict.fromkeys(EVICTION_POLICIES.names)
        known |= dict.fromkeys(totals.policy for totals in self.stats().eviction)
        if name not in known:
            raise InvalidRequestError(
                f"policy must be one of {', '.join(known)}, not {name!r:.100}.", param="policy"
            )
        if not self.is_running:
            raise UnavailableError(self._failure or "The engine is not running.")
        done: Future[None] = Future()
        self._thread.send(SetEvictionPolicy(name, done))
        try:
            await asyncio.wait_for(asyncio.wrap_future(done), COMMAND_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError("The engine did not answer in time.") from None

    async def generate(
        self,
        prompt_token_ids: Sequence[TokenId],
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        retention: Retention = DEFAULT_RETENTION,
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Yield the deltas of ``sampling.n`` completions as they come, interleaved.

        Closing the generator (or cancelling its task) aborts what is unfinished.

        Raises:
            RequestError: before the first delta if the request is refused; later only
                UnavailableError, if the engine stops.
        """
        if not self.is_running:
            raise UnavailableError(self._failure or "The engine is not running.")
        _held = await self._compile(sampling.structured_output)
        request = self._requests.build(
            prompt_token_ids,
            sampling,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            retention=retention,
        )
        queue = self._submit(request)
        num_live = sampling.n
        try:
            while num_live:
                item = await queue.get()
                if isinstance(item, _Failure):
                    raise UnavailableError(item.message)
                num_live -= item.finish_reason is not None
                yield item
        finally:
            if num_live:
                self._thread.send(Abort(request.request_id))

    async def _compile(self, spec: StructuredOutput | None) -> CompiledGrammar | None:
        """Return the grammar that a request wants; the caller holds it for the runner."""
        if spec is None:
            return None
        if self._grammars is None:
            raise InvalidRequestError(
                f"{spec.param} is not supported by this engine.", param=spec.param
            )
        return await self._grammars.compile(spec)

    def _submit(self, request: Request) -> asyncio.Queue[_Item]:
        if request.request_id in self._queues:
            raise InvalidRequestError(
                f"A request named {request.request_id!r} is already running.",
                param="request_id",
            )
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._queues[request.request_id] = queue
        self._processor.add(request)
        self._thread.send(Add(request))
        self._idle.clear()
        return queue

    def _hand_over(self, outbox: Outbox) -> None:
        """Pass what left the engine thread to the event loop."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is listening
            self._loop.call_soon_threadsafe(self._take, outbox)

    def _take(self, outbox: Outbox) -> None:
        if outbox.has_failed:
            self._fail("The engine has stopped because of a fault; the server must be restarted.")
            return
        for done in self._processor.process(outbox.outputs):
            if done.stopped_after is not None:
                self._thread.send(Finish(done.request_id, done.stopped_after, done.index))
            for delta in done.deltas:
                self._queues[done.request_id].put_nowait(delta)
        for request_id in self._processor.settle(outbox.finished):
            self._queues.pop(request_id, None)
        if not self._queues:
            self._idle.set()

    def _fail(self, message: str) -> None:
        self._failure = message
        for request_id, queue in self._queues.items():
            queue.put_nowait(_Failure(message))
            self._processor.drop(request_id)
        self._queues.clear()
        self._idle.set()
