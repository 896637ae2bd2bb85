"""Receiving a request's body: of the right kind, and not too long."""

from typing import Final

from starlette.requests import ClientDisconnect, Request

from octavo.core.errors import BodyTooLargeError, InvalidRequestError
from octavo.server.errors import ClientGoneError

DEFAULT_MAX_BODY_BYTES: Final = 32 << 20


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body.

    Raises:
        InvalidRequestError: it is not declared to be JSON in UTF-8.
        BodyTooLargeError: it is longer than ``limit`` bytes.
        ClientGoneError: the client left before it was complete.
    """
    _check_type(request.headers.get("content-type", ""))
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise _too_large(limit)
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _check_type(header: str) -> None:
    kind, _, parameters = header.partition(";")
    charset = parameters.replace('"', "").replace(" ", "").lower()
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise InvalidRequestError("The Content-Type header must be application/json.")


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The body must not be longer than {limit} bytes.")
