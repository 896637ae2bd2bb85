"""From exceptions to OpenAI's error bodies: the one place that decides what a client is told."""

import logging
from collections.abc import Mapping
from typing import Any, Final

import orjson
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo.core.errors import RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS: Final = 1000
"""Longer messages are cut, so that no request can make its refusal large."""
MAX_PARAM_CHARS: Final = 200

_HEADERS: Final[Mapping[int, Mapping[str, str]]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
UNEXPECTED: Final = "The server failed to answer this request because of a fault of its own."


class ClientGoneError(Exception):
    """The client closed the connection; nobody is left to answer."""


def error_body(
    message: str, *, type: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Return OpenAI's error object, with all four keys that its specification asks for."""
    return {
        "error": {
            "message": _cut(message, MAX_MESSAGE_CHARS),
            "type": type,
            "param": None if param is None else _cut(param, MAX_PARAM_CHARS),
            "code": code,
        }
    }


def body_of(error: Exception) -> dict[str, Any]:
    """Return the body for any exception; one that nobody foresaw tells the client nothing."""
    if isinstance(error, RequestError):
        return error_body(error.message, type=error.type, param=error.param, code=error.code)
    return error_body(UNEXPECTED, type="server_error", code="internal_error")


def status_of(error: Exception) -> int:
    """Return the HTTP status for any exception."""
    return error.status if isinstance(error, RequestError) else 500


def error_response(error: Exception) -> Response:
    """Return the answer for any exception."""
    status = status_of(error)
    return json_response(body_of(error), status, _HEADERS.get(status))


def json_response(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return ``body`` as JSON."""
    return Response(
        orjson.dumps(body),
        status_code=status,
        headers=dict(headers or {}),
        media_type="application/json",
    )


async def on_request_error(request: Request, error: Exception) -> Response:
    """Answer a request that cannot be served."""
    return error_response(error)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: (f"There is no {request.method} {request.url.path}.", "not_found"),
        405: (f"{request.url.path} does not take {request.method}.", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), None))
    body = error_body(message, type="invalid_request_error", code=code)
    return json_response(body, error.status_code, error.headers)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
