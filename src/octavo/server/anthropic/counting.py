"""How long a prompt is, without answering it."""

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.anthropic.translate import MessagesTranslator
from octavo.server.body import read_body
from octavo.server.errors import json_response


@dataclass(frozen=True, slots=True)
class TokenCounter:
    """Answers ``POST /v1/messages/count_tokens``."""

    translator: MessagesTranslator
    max_body_bytes: int

    async def __call__(self, request: Request) -> Response:
        """Return the number of tokens that the model would read."""
        body = await read_body(request, self.max_body_bytes)
        return json_response({"input_tokens": await asyncio.to_thread(self.translator.count, body)})
