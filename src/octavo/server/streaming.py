"""Server-sent events: framing, errors in the middle of a stream, clients that leave."""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

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


async def events(
    deltas: AsyncGenerator[ChoiceDelta, None], writer: ChunkWriter, *, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a whole stream."""
    meter = UsageMeter()
    async with aclosing(deltas):
        for chunk in writer.opening():
            yield sse(chunk)
        async for item in deltas:
            meter.add(item)
            # One write for what came at once.
            written = b"".join(sse(chunk) for chunk in writer.chunks(item))
            if written:
                yield written
        if include_usage:
            yield sse(writer.usage(meter.usage()))
        yield DONE


class EventStreamResponse(Response):
    """Sends events until they end, fail, or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, stream: AsyncGenerator[bytes, None], lifecycle: Lifecycle) -> None:
        self._stream = stream
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
                event = sse(body_of(error))
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
