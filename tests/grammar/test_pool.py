"""The pool that compiles: sharing, limits, and clients that leave."""

import asyncio
import threading

import pytest

from octavo.core.errors import InvalidRequestError, OverloadedError
from octavo.core.structured import StructuredOutput
from octavo.engine.grammars import MAX_OVERDUE, GrammarPool
from octavo.runner.grammar import CompiledGrammar
from support import PATIENCE_S

SO = StructuredOutput


LIMIT_S = 10 * PATIENCE_S
"""Runs out by ``Clock`` alone."""


class Clock:
    """The running loop's clock, which a test puts forward."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._time, self._ahead_s = loop.time, 0.0
        loop.time = self  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self._time() + self._ahead_s

    def put_forward(self) -> None:
        """Put it past every limit that has begun."""
        self._ahead_s += LIMIT_S

    async def run_out(self, *waiting: "asyncio.Future[CompiledGrammar]") -> list[object]:
        """Put it forward until nobody waits; return what came of each."""
        while not all(future.done() for future in waiting):
            self.put_forward()
            await turns()
        return [future.exception() or future.result() for future in waiting]


async def turns() -> None:
    """Let all tasks go as far as they get without other threads."""
    for _ in range(20):
        await asyncio.sleep(0)


class SlowCompiler:
    """Compiles when it is let to; has no memory of its own."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun: list[str] = []
        self.compiled: list[str] = []

    def find(self, spec: StructuredOutput) -> CompiledGrammar | None:
        return None

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        self.begun.append(spec.text)
        assert self.go.wait(PATIENCE_S)
        self.compiled.append(spec.text)
        if spec.text == "bad":
            raise InvalidRequestError("It is bad.", param=spec.param)
        return CompiledGrammar(spec)  # type: ignore[arg-type]

    def warm_up(self) -> None:
        pass

    async def begins(self, text: str) -> None:
        """Wait until this is being compiled."""
        while text not in self.begun:
            await asyncio.sleep(0.001)


@pytest.fixture
def compiler() -> SlowCompiler:
    """A compiler that waits."""
    return SlowCompiler()


def pool_of(compiler: SlowCompiler, **settings: float) -> GrammarPool:
    return GrammarPool(compiler, **{"num_threads": 1, "time_limit_s": LIMIT_S, **settings})  # type: ignore[arg-type]


async def test_equal_requests_share_one_compilation(compiler: SlowCompiler) -> None:
    """Turns red when a burst of requests for one schema compiles it many times."""
    pool = pool_of(compiler)
    tasks = [asyncio.ensure_future(pool.compile(SO.regex("a"))) for _ in range(9)]
    await turns()
    compiler.go.set()
    grammars = await asyncio.gather(*tasks)
    assert compiler.compiled == ["a"]
    assert all(grammar is grammars[0] for grammar in grammars)
    pool.shutdown()


async def test_a_refusal_reaches_all_who_wait(compiler: SlowCompiler) -> None:
    """Turns red when a refused schema hangs those who asked for it too, or is remembered."""
    pool = pool_of(compiler)
    compiler.go.set()
    for _ in range(2):
        results = await asyncio.gather(
            *(pool.compile(SO.regex("bad")) for _ in range(2)), return_exceptions=True
        )
        assert [type(result) for result in results] == [InvalidRequestError] * 2
    assert isinstance(await pool.compile(SO.regex("good")), CompiledGrammar)
    pool.shutdown()


async def test_what_takes_too_long_is_refused(compiler: SlowCompiler) -> None:
    """Turns red when a client waits without end for a compilation; who waited behind it is told
    that the server is busy, as its own grammar is not to blame."""
    pool, clock = pool_of(compiler), Clock()
    slow = asyncio.ensure_future(pool.compile(SO.regex("slow")))
    await compiler.begins("slow")
    behind = asyncio.ensure_future(pool.compile(SO.regex("behind")))
    await turns()
    first, second = await clock.run_out(slow, behind)
    assert isinstance(first, InvalidRequestError)
    assert first.param == "structured_outputs"
    assert isinstance(second, OverloadedError)
    compiler.go.set()
    pool.shutdown()


class Stubborn(SlowCompiler):
    """Compiles at once but what is called endless, which waits."""

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        if spec.text.startswith("endless"):
            return super().compile(spec)
        return CompiledGrammar(spec)  # type: ignore[arg-type]


async def test_the_vocabulary_takes_its_own_time() -> None:
    """Turns red when the first grammar is refused because the vocabulary is not ready yet."""
    ready = threading.Event()

    class Cold(SlowCompiler):
        def warm_up(self) -> None:
            assert ready.wait(PATIENCE_S)

    compiler = Cold()
    compiler.go.set()
    pool, clock = pool_of(compiler), Clock()
    pool.start()
    first, second = (asyncio.ensure_future(pool.compile(SO.regex(text))) for text in "ab")
    await turns()
    clock.put_forward()
    await turns()
    assert not first.done()
    ready.set()
    assert all(isinstance(g, CompiledGrammar) for g in await asyncio.gather(first, second))
    pool.shutdown()


async def test_what_takes_too_long_holds_up_no_other() -> None:
    """Turns red when compilations that cannot be stopped keep others from theirs; when a client
    that asks again begins another; or when they may be any number."""
    compiler = Stubborn()
    pool, clock = pool_of(compiler), Clock()

    async def refuse(text: str) -> None:
        waiting = asyncio.ensure_future(pool.compile(SO.regex(text)))
        await compiler.begins(text)
        await turns()
        (refusal,) = await clock.run_out(waiting)
        assert isinstance(refusal, InvalidRequestError)
        assert "takes more than" in refusal.message

    for index in range(MAX_OVERDUE - 1):
        for _ in range(2):
            await refuse(f"endless {index}")
        assert isinstance(await pool.compile(SO.regex(f"quick {index}")), CompiledGrammar)
    await refuse("endless last")
    with pytest.raises(OverloadedError):
        await pool.compile(SO.regex("quick"))
    again = asyncio.ensure_future(pool.compile(SO.regex("endless last")))
    await turns()
    compiler.go.set()
    assert isinstance(await again, CompiledGrammar)
    while not all(future.done() for future in pool._overdue.values()):
        await asyncio.sleep(0.001)
    assert len(compiler.compiled) == MAX_OVERDUE
    assert isinstance(await pool.compile(SO.regex("quick")), CompiledGrammar)
    pool.shutdown()


async def test_the_queue_is_bounded(compiler: SlowCompiler) -> None:
    """Turns red when grammars to compile pile up without limit."""
    pool = pool_of(compiler, max_pending=2)
    tasks = [asyncio.ensure_future(pool.compile(SO.regex(text))) for text in "ab"]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await pool.compile(SO.regex("c"))
    compiler.go.set()
    await asyncio.gather(*tasks)
    assert isinstance(await pool.compile(SO.regex("c")), CompiledGrammar)
    pool.shutdown()


async def test_a_client_that_leaves_spoils_nothing(compiler: SlowCompiler) -> None:
    """Turns red when a cancelled request cancels the compilation that others wait for."""
    pool = pool_of(compiler)
    gone, stays = (asyncio.ensure_future(pool.compile(SO.regex("a"))) for _ in range(2))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    compiler.go.set()
    assert isinstance(await stays, CompiledGrammar)
    pool.shutdown()
