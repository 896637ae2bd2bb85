"""The outermost layer: request ids, the key, draining, and a last word on errors."""

import logging
import re
import uuid
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.errors import RequestError
from octavo.core.events import Observer, RequestRejected
from octavo.server.auth import OPEN_PATHS, KeyCheck
from octavo.server.errors import ClientGoneError, error_response, is_anthropic
from octavo.server.lifecycle import Lifecycle

logger = logging.getLogger(__name__)

UUID_KEY: Final = "octavo.uuid"
ACCEPTED_KEY: Final = "octavo.accepted"
_REQUEST_ID: Final = re.compile(rb"[\x21-\x7e]{1,128}")


def request_uuid(scope: Scope) -> str:
    """Return the unique name that the gate gave a request."""
    name: str = scope[UUID_KEY]
    return name


def accept(scope: Scope) -> None:
    """Note that the engine took a request: what becomes of it now is no refusal."""
    scope[ACCEPTED_KEY] = True


class Gate:
    """Wraps the application; every request passes here, whatever its path.

    A request's ``X-Request-Id`` is returned with its answer, and made up if there is none (or one
    that is no plain word of at most 128 characters). Anthropic's clients look for it in
    ``Request-Id``, so answers on their paths have it there too.
    """

    def __init__(
        self, app: ASGIApp, *, keys: KeyCheck, lifecycle: Lifecycle, observer: Observer
    ) -> None:
        self._app = app
        self._keys = keys
        self._lifecycle = lifecycle
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:
            await self._answer(scope, receive, _Sender(scope, send, self._observer))

    async def _answer(self, scope: Scope, receive: Receive, send: "_Sender") -> None:
        try:
            if scope["path"] in OPEN_PATHS:
                await self._app(scope, receive, send)
                return
            self._check_key(scope)
            with self._lifecycle.request():
                await self._app(scope, receive, send)
        except ClientGoneError:
            logger.debug("A client left before its answer.")
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("Answering %s %s failed.", scope["method"], scope["path"])
            if send.started:
                raise
            await error_response(error, scope["path"])(scope, receive, send)

    def _check_key(self, scope: Scope) -> None:
        """Take the key from where the path's clients put it."""
        given = _header(scope, b"authorization")
        if given is None and is_anthropic(scope["path"]):
            key = _header(scope, b"x-api-key")
            given = None if key is None else b"Bearer " + key
        self._keys.check(given)


class _Sender:
    """Adds the request id to an answer's headers, and reports refusals."""

    def __init__(self, scope: Scope, send: Send, observer: Observer) -> None:
        scope[UUID_KEY] = uuid.uuid4().hex
        given = _header(scope, b"x-request-id") or b""
        self._id = given if _REQUEST_ID.fullmatch(given) else scope[UUID_KEY].encode()
        self._scope = scope
        self._send = send
        self._observer = observer
        self.started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            if self._is_refusal(message["status"]):
                self._observer.on_event(RequestRejected(message["status"]))
            headers = [*message.get("headers", ()), (b"x-request-id", self._id)]
            if is_anthropic(self._scope["path"]):
                headers.append((b"request-id", self._id))
            message = {**message, "headers": headers}
        await self._send(message)

    def _is_refusal(self, status: int) -> bool:
        asks = self._scope["method"] == "POST" and self._scope["path"].startswith("/v1/")
        refused = 400 <= status < 500 or status == 503
        return asks and refused and ACCEPTED_KEY not in self._scope


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)
