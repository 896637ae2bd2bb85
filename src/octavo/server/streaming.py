"""Server-sent events: framing, errors in the middle of a stream, clients that leave."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Final, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.errors import RequestError
from octavo.server.errors import ClientGoneError, body_of
from octavo.server.generation import ChoiceDelta, until_gone
from octavo.server.lifecycle import Lifecycle
from octavo.server.responses import ChunkWriter, UsageMeter

logger = logging.getLogger(__name__)

DONE: Final = b"data: [DONE]\n\n"
"""Ends a stream that is complete; one that failed ends with its error instead."""


def sse(body: Mapping[str, Any]) -> bytes:
    """Frame a body as a server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_sse(body: Mapping[str, Any]) -> bytes:
    """Frame a body as a server-sent event that is named after the body's ``type``."""
    kind: str = body["type"]
    return b"event: " + kind.encode() + b"\n" + sse(body)


class EventWriter(Protocol):
    """Turns the deltas of one answer into the events of its stream."""

    def opening(self) -> Iterable[bytes]:
        """Return what comes before any delta."""

    def events(self, item: ChoiceDelta) -> Iterable[bytes]:
        """Return what one delta adds: nothing, if its text is held back, or several events."""

    def closing(self) -> Iterable[bytes]:
        """Return what ends a complete stream."""

    def failure(self, error: Exception) -> bytes:
        """Return the event that ends a stream which failed."""


class ChunkEvents:
    """OpenAI's framing of completions and chat: nameless events, usage if asked, [DONE]."""

    def __init__(self, writer: ChunkWriter, *, include_usage: bool) -> None:
        self._writer = writer
        self._include_usage = include_usage
        self._meter = UsageMeter()

    def opening(self) -> Iterator[bytes]:
        """Return what comes before any delta."""
        return map(sse, self._writer.opening())

    def events(self, item: ChoiceDelta) -> Iterator[bytes]:
        """Return what one delta adds."""
        self._meter.add(item)
        return map(sse, self._writer.chunks(item))

    def closing(self) -> Iterator[bytes]:
        """Return the usage, where it was asked for, and the end."""
        if self._include_usage:
            yield sse(self._writer.usage(self._meter.usage()))
        yield DONE

    def failure(self, error: Exception) -> bytes:
        """Return OpenAI's error object as an event."""
        return sse(body_of(error))


async def events(
    deltas: AsyncGenerator[ChoiceDelta, None], writer: EventWriter
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a whole stream, joined where they come at once."""
    async with aclosing(deltas):
        if opening := b"".join(writer.opening()):
            yield opening
        async for item in deltas:
            if written := b"".join(writer.events(item)):
                yield written
        if closing := b"".join(writer.closing()):
            yield closing


class EventStreamResponse(Response):
    """Sends events until they end, fail, or the client leaves."""

    media_type = "text/event-stream"

    def __init__(
        self,
        stream: AsyncGenerator[bytes, None],
        lifecycle: Lifecycle,
        failure: Callable[[Exception], bytes],
    ) -> None:
        self._stream = stream
        self._failure = failure
        self._lifecycle = lifecycle
        self.status_code = 200
        self.background = None
        # Proxies must neither store nor hold back what is meant to arrive at once.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Set the headers; the length of a stream is not known."""
        self.raw_headers = [
            (name.lower().encode(), value.encode()) for name, value in (headers or {}).items()
        ]
        self.raw_headers.append((b"content-type", b"text/event-stream; charset=utf-8"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request."""
        try:
            await until_gone(receive, self._send_all(send))
        except ClientGoneError:
            logger.debug("A client left its stream.")

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with aclosing(self._stream):
            await send(start)
            try:
                async with self._lifecycle.deadline():
                    async for event in self._stream:
                        await send({"type": "http.response.body", "body": event, "more_body": True})
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("A stream failed.")
                event = self._failure(error)
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
