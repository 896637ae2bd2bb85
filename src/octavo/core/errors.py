"""Every error that Octavo raises on purpose, with the HTTP status a client sees.

::

    OctavoError
    ├── RequestError                what a client can cause; one request fails, nobody else's
    │   ├── InvalidRequestError     400  a parameter is wrong (``param`` names it)
    │   │   └── ContextLengthError  400  the request can never fit the context or the KV cache
    │   ├── AuthenticationError     401  the API key is missing or wrong
    │   ├── NotFoundError           404  no such model or path
    │   ├── BodyTooLargeError       413  the body is longer than the server reads
    │   ├── OverloadedError         429  the queue is full
    │   ├── GenerationError         500  computing this request failed
    │   └── UnavailableError        503  the server is draining or the engine has stopped
    ├── SetupError                  what a user or a machine can cause before serving starts
    │   ├── SettingError                 a setting is wrong (``name`` names it)
    │   └── LoadError                    a model file is missing, corrupt or not supported
    └── InvariantError              what only a bug can cause; carries the story

A message is one sentence that says what was wrong and, where it can, what would be right.
"""

from typing import ClassVar


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""

    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class RequestError(OctavoError):
    """One request cannot be served. Recoverable: other requests are not touched."""

    status = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequestError(RequestError):
    """A parameter of the request is wrong; ``param`` names it."""


class ContextLengthError(InvalidRequestError):
    """The request can never fit the model's context or the KV cache."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """There is no such model or path."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class BodyTooLargeError(RequestError):
    """The body is longer than the server reads."""

    status = 413
    code = "body_too_large"


class OverloadedError(RequestError):
    """The queue is full; the client should try again later."""

    status = 429
    type = "overloaded_error"
    code = "overloaded"


class GenerationError(RequestError):
    """Computing this request failed on the server's side."""

    status = 500
    type = "server_error"
    code = "generation_failed"


class UnavailableError(RequestError):
    """The server is draining, or its engine has stopped."""

    status = 503
    type = "unavailable_error"
    code = "unavailable"


class SetupError(OctavoError):
    """The server cannot start. Unrecoverable without the user's action."""


class SettingError(SetupError):
    """A setting is wrong; ``name`` names it as a user writes it (``--max-num-seqs``)."""

    def __init__(self, message: str, *, name: str) -> None:
        super().__init__(message)
        self.name = name


class LoadError(SetupError):
    """A model file is missing, corrupt, inconsistent or not supported."""


class InvariantError(OctavoError):
    """A law that only a bug can break was broken. ``story`` says what led to it."""

    def __init__(self, message: str, *, story: str = "") -> None:
        super().__init__(f"{message}\n{story}" if story else message)
        self.story = story
