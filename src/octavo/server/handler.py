"""The life of a generation request, the same for every kind."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Generic

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from octavo.server.body import read_body
from octavo.server.errors import json_response
from octavo.server.gate import accept, request_uuid
from octavo.server.generation import ChoiceDelta, Generator, peek, until_gone
from octavo.server.job import Body, Job
from octavo.server.lifecycle import Lifecycle
from octavo.server.ports import Tokenizer
from octavo.server.responses import Collected, Envelope
from octavo.server.streaming import EventStreamResponse, EventWriter, events

LONG_BODY_BYTES: Final = 32 << 10
"""Longer bodies are translated on a thread, so that tokenizing them holds up no stream."""


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """What differs between the kinds of generation requests."""

    id_prefix: str
    translate: Callable[[bytes], Job[Body]]
    body: Callable[[Job[Body], Envelope, Tokenizer, Collected], dict[str, Any]]
    writer: Callable[[Job[Body], Envelope, Tokenizer], EventWriter] | None = None
    """None: its jobs never stream."""


@dataclass(frozen=True, slots=True)
class Handler(Generic[Body]):
    """Answers the requests of one endpoint."""

    endpoint: Endpoint[Body]
    generator: Generator
    tokenizer: Tokenizer
    lifecycle: Lifecycle
    system_fingerprint: str
    max_body_bytes: int

    async def __call__(self, request: Request) -> Response:
        """Read the body, run what it asks for, answer in one piece or as a stream.

        Raises:
            RequestError: it is refused or fails before anything was answered.
            ClientGoneError: the client left; nothing of it runs on.
        """
        body = await read_body(request, self.max_body_bytes)
        return await until_gone(request.receive, self._answer(body, request.scope))

    async def _answer(self, body: bytes, scope: Scope) -> Response:
        async with self.lifecycle.deadline():
            job = await self._translate(body)
            envelope = Envelope(
                id=f"{self.endpoint.id_prefix}{request_uuid(scope)}",
                created=int(time.time()),
                model=job.model,
                system_fingerprint=self.system_fingerprint,
            )
            deltas = await peek(self.generator.run(job, envelope.id))
            accept(scope)
            if self.endpoint.writer is None or not job.stream:
                answer = await _collect(deltas, job)
                return json_response(self.endpoint.body(job, envelope, self.tokenizer, answer))
        writer = self.endpoint.writer(job, envelope, self.tokenizer)
        return EventStreamResponse(events(deltas, writer), self.lifecycle, writer.failure)

    async def _translate(self, body: bytes) -> Job[Body]:
        if len(body) > LONG_BODY_BYTES:
            return await asyncio.to_thread(self.endpoint.translate, body)
        return self.endpoint.translate(body)


async def _collect(deltas: AsyncGenerator[ChoiceDelta, None], job: Job[Any]) -> Collected:
    answer = Collected(job.num_choices, len(job.prompts))
    async with aclosing(deltas):
        async for item in deltas:
            answer.add(item)
    return answer
