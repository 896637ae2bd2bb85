"""From exceptions to error bodies: the one place that decides what a client is told."""

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
_MESSAGES: Final = "/v1/messages"
_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
UNEXPECTED: Final = "The server failed to answer this request because of a fault of its own."


def is_anthropic(path: str) -> bool:
    """Whether those who ask for ``path``, which need not exist, expect Anthropic's error bodies."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


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


def anthropic_body_of(error: Exception) -> dict[str, Any]:
    """Return the body that Anthropic's clients expect for any exception."""
    message = error.message if isinstance(error, RequestError) else UNEXPECTED
    return _anthropic_body(message, status_of(error))


def _anthropic_body(message: str, status: int) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": _cut(message, MAX_MESSAGE_CHARS)}}


def status_of(error: Exception) -> int:
    """Return the HTTP status for any exception."""
    return error.status if isinstance(error, RequestError) else 500


def error_response(error: Exception, path: str) -> Response:
    """Return the answer for any exception, as clients of ``path`` expect it."""
    status = status_of(error)
    body = anthropic_body_of(error) if is_anthropic(path) else body_of(error)
    return json_response(body, status, _HEADERS.get(status))


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
    return error_response(error, request.url.path)


async def on_http_error(request: Request, error: Exception) -> Response:
    """Answer what the router refuses: an unknown path, a wrong method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: (f"There is no {request.method} {request.url.path}.", "not_found"),
        405: (f"{request.url.path} does not take {request.method}.", "method_not_allowed"),
    }
    message, code = messages.get(error.status_code, (str(error.detail), None))
    if is_anthropic(request.url.path):
        body = _anthropic_body(message, error.status_code)
    else:
        body = error_body(message, type="invalid_request_error", code=code)
    return json_response(body, error.status_code, error.headers)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
