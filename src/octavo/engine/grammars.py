"""Compiling grammars off the engine thread, before a request is taken."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from octavo.core.errors import InvalidRequestError, OverloadedError
from octavo.core.structured import StructuredOutput
from octavo.runner.grammar import CompiledGrammar, GrammarCompiler

NUM_THREADS: Final = 2
MAX_OVERDUE: Final = 4
"""Most compilations that go on though their requests were refused; each has a thread of its own."""
MAX_PENDING: Final = 64
"""Most grammars that wait for a thread or are compiled at once."""
TIME_LIMIT_S: Final = 0.8


class GrammarPool:
    """Compiles on few threads; requests for the same grammar share one compilation.

    A compilation that runs over its time limit cannot be stopped: its request is refused, and it
    goes on beside those of others until the compiler's own limits end it. All methods but the
    compiler's run on one event loop.
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        *,
        num_threads: int = NUM_THREADS,
        max_pending: int = MAX_PENDING,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._compiler = compiler
        self._num_threads = num_threads
        self._max_pending = max_pending
        self._time_limit_s = time_limit_s
        self._threads = ThreadPoolExecutor(
            num_threads + MAX_OVERDUE, thread_name_prefix="octavo-grammars"
        )
        self._pending: dict[StructuredOutput, asyncio.Task[CompiledGrammar]] = {}
        self._overdue: dict[StructuredOutput, Future[CompiledGrammar]] = {}
        self._slots = asyncio.Semaphore(num_threads)
        self._warming: Future[object] | None = None

    def start(self) -> None:
        """Prepare the vocabulary in the background, so that no request waits for it.

        It holds Python's lock for some tenths of a second, so the best time is one when nothing
        runs.
        """
        self._warming = self._warming or self._threads.submit(self._compiler.warm_up)

    def shutdown(self) -> None:
        """Take no more work, and drop what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """Return the grammar of ``spec``. While it is held, the runner finds it compiled.

        Raises:
            InvalidRequestError: it is malformed, not supported, or takes too long.
            OverloadedError: too many others are being compiled.
        """
        grammar = self._compiler.find(spec)
        if grammar is not None:
            return grammar
        task = self._pending.get(spec)
        if task is None:
            if len(self._pending) >= self._max_pending:
                raise _overloaded()
            task = self._pending[spec] = asyncio.create_task(self._compile(spec))
            task.add_done_callback(lambda done: self._settle(spec, done))
        return await asyncio.shield(task)  # one who leaves takes it from nobody else

    def _settle(self, spec: StructuredOutput, done: asyncio.Task[CompiledGrammar]) -> None:
        del self._pending[spec]
        # A failure that nobody waits for any more is nobody's business.
        _ = done.cancelled() or done.exception()

    async def _compile(self, spec: StructuredOutput) -> CompiledGrammar:
        # That takes its time once, and is no grammar's fault.
        self._warming = self._warming or self._threads.submit(self._compiler.warm_up)
        await asyncio.wrap_future(self._warming)
        deadline = asyncio.get_running_loop().time() + self._time_limit_s
        self._overdue = {spec: f for spec, f in self._overdue.items() if not f.done()}
        overdue = self._overdue.get(spec)
        if overdue is not None:
            return await self._result(spec, overdue, deadline)
        if len(self._overdue) >= MAX_OVERDUE:
            raise _overloaded()
        has_queued = self._slots.locked()
        try:
            await asyncio.wait_for(self._slots.acquire(), self._time_limit_s)
        except TimeoutError:
            raise _overloaded() from None
        try:
            future = self._threads.submit(self._compiler.compile, spec)
            return await self._result(spec, future, deadline, has_queued=has_queued)
        finally:
            self._slots.release()

    async def _result(
        self,
        spec: StructuredOutput,
        future: Future[CompiledGrammar],
        deadline: float,
        *,
        has_queued: bool = False,
    ) -> CompiledGrammar:
        compiling = asyncio.wrap_future(future)
        compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
        remaining = deadline - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait({compiling}, timeout=remaining)
        if done:
            return compiling.result()
        self._overdue[spec] = future
        if has_queued:  # it had less than its time
            raise _overloaded()
        raise InvalidRequestError(
            f"{spec.param} takes more than {self._time_limit_s:g} s to compile: simplify it.",
            param=spec.param,
        )


def _overloaded() -> OverloadedError:
    return OverloadedError("Too many grammars are being compiled: try again later.")
