"""Compiling grammars off the engine thread, before a request is taken."""

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from octavo.core.errors import InvalidRequestError, OverloadedError
from octavo.core.structured import StructuredOutput
from octavo.runner.grammar import CompiledGrammar, GrammarCompiler

NUM_THREADS: Final = 2
MAX_PENDING: Final = 64
"""Most grammars that wait for a thread or are compiled at once."""
TIME_LIMIT_S: Final = 5.0


class GrammarPool:
    """Compiles on few threads; requests for the same grammar share one compilation.

    A compilation that runs over its time limit cannot be stopped: its request is refused, and the
    thread goes on until the compiler's own limits end it. All methods but the compiler's run on
    one event loop.
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
        self._max_pending = max_pending
        self._time_limit_s = time_limit_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="octavo-grammars")
        self._pending: dict[StructuredOutput, Future[CompiledGrammar]] = {}

    def start(self) -> None:
        """Prepare the vocabulary in the background, so that no request waits for it."""
        self._threads.submit(self._compiler.warm_up)

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
        pending = self._submit(spec)
        waiting = asyncio.wrap_future(pending)
        # A failure that nobody waits for any more is nobody's business.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        done, _ = await asyncio.wait({waiting}, timeout=self._time_limit_s)
        if done:
            return waiting.result()
        if pending.running():
            raise InvalidRequestError(
                f"{spec.param} takes more than {self._time_limit_s:g} s to compile: simplify it.",
                param=spec.param,
            )
        raise OverloadedError("Too many grammars are being compiled: try again later.")

    def _submit(self, spec: StructuredOutput) -> Future[CompiledGrammar]:
        self._pending = {key: f for key, f in self._pending.items() if not f.done()}
        pending = self._pending.get(spec)
        if pending is None:
            if len(self._pending) >= self._max_pending:
                raise OverloadedError("Too many grammars are being compiled: try again later.")
            pending = self._threads.submit(self._compiler.compile, spec)
            self._pending[spec] = pending
        return pending
