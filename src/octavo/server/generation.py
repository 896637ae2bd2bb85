"""Running a job on the engine: one stream of deltas for all its prompts and choices."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive

from octavo.core.errors import GenerationError, UnavailableError
from octavo.core.request import FinishReason
from octavo.engine.outputs import GenerationDelta
from octavo.server.errors import ClientGoneError
from octavo.server.job import Job, PreparedPrompt
from octavo.server.lifecycle import Admission
from octavo.server.ports import Engine

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What is new in one choice of an answer."""

    prompt: int
    """Which prompt it completes."""
    choice: int
    """Its index among the choices of all prompts."""
    delta: GenerationDelta


class Generator:
    """Runs jobs on an engine."""

    def __init__(self, engine: Engine, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission

    async def run(self, job: Job[Any], request_id: str) -> AsyncGenerator[ChoiceDelta, None]:
        """Yield the deltas of all choices as they come; closing it aborts what is unfinished.

        Raises:
            RequestError: before the first delta if the job is refused; later if computing it
                fails or the engine stops.
        """
        with self._admission.sequences(job.num_choices):
            if len(job.prompts) == 1:
                stream = self._run_prompt(job, 0, request_id)
            else:
                stream = _merged(
                    [
                        self._run_prompt(job, index, f"{request_id}-{index}")
                        for index in range(len(job.prompts))
                    ]
                )
            async with aclosing(stream):
                async for item in stream:
                    yield item

    async def _run_prompt(
        self, job: Job[Any], index: int, request_id: str
    ) -> AsyncGenerator[ChoiceDelta, None]:
        prompt: PreparedPrompt = job.prompts[index]
        deltas = self._engine.generate(
            prompt.token_ids,
            prompt.sampling,
            request_id=request_id,
            priority=job.priority,
            cache_salt=job.cache_salt,
            retention=job.retention,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                _check(delta)
                yield ChoiceDelta(index, index * job.n + delta.index, delta)


def _check(delta: GenerationDelta) -> None:
    if delta.finish_reason is FinishReason.ERROR:
        raise delta.error or GenerationError("Computing this request failed.")
    if delta.finish_reason is FinishReason.ABORT:
        raise UnavailableError("The server gave up this request.")


async def peek(stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Wait for a stream's first item, so that its refusal comes before anything is answered.

    Returns a stream of the same items.
    """
    try:
        first = [await anext(stream)]
    except StopAsyncIteration:
        first = []
    except BaseException:
        await stream.aclose()
        raise

    async def resumed() -> AsyncGenerator[T, None]:
        async with aclosing(stream):
            for item in first:
                yield item
            async for item in stream:
                yield item

    return resumed()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do ``work``, whose request was read whole, unless the client leaves first.

    Raises:
        ClientGoneError: the client left; the work was cancelled and has ended.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yield items of all streams as they come; the first error ends them all."""
    queue: asyncio.Queue[T | Exception | None] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait(item)
        except Exception as error:  # handed on to whoever reads the queue
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        num_live = len(tasks)
        while num_live:
            item = await queue.get()
            if item is None:
                num_live -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
