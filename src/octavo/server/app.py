"""The composition of the server: routes, layers, and what they share."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from octavo import __version__
from octavo.core.errors import RequestError
from octavo.core.events import NullObserver, Observer
from octavo.server.auth import KeyCheck
from octavo.server.body import DEFAULT_MAX_BODY_BYTES
from octavo.server.chat import chat_body, chat_events
from octavo.server.completions import completion_body, completion_events
from octavo.server.errors import on_http_error, on_request_error
from octavo.server.gate import Gate
from octavo.server.generation import Generator
from octavo.server.handler import Endpoint, Handler
from octavo.server.lifecycle import Admission, Lifecycle
from octavo.server.openapi import describe, json_body
from octavo.server.operations import Operations
from octavo.server.ports import Engine
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.completions import CompletionRequest
from octavo.server.translate import Translator


def build_app(
    engine: Engine,
    *,
    served_model_names: Sequence[str],
    metrics: Callable[[], bytes],
    api_key: str | None = None,
    observer: Observer | None = None,
    lifecycle: Lifecycle | None = None,
    max_num_inflight: int | None = None,
) -> FastAPI:
    """Return the application that serves ``engine``, which it starts and shuts down.

    Args:
        engine: not started yet.
        served_model_names: names that clients may use; the first is the default.
        metrics: returns the text that Prometheus scrapes.
        api_key: needed for all paths but probes and metrics; None lets everybody in.
        observer: told of refused requests.
        lifecycle: shared with whoever drains the server; its own if None.
        max_num_inflight: bound of sequences in the engine, running and waiting; None: no bound.
    """
    lifecycle = lifecycle or Lifecycle()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            engine.shutdown()

    app = FastAPI(
        title="Octavo",
        version=__version__,
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
    )
    app.add_middleware(
        Gate, keys=KeyCheck(api_key), lifecycle=lifecycle, observer=observer or NullObserver()
    )
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    generator = Generator(engine, Admission(max_num_inflight))
    _add_generation(app, engine, generator, lifecycle, served_model_names)
    _add_operations(app, Operations(engine, lifecycle, metrics, tuple(served_model_names)))
    app.openapi = cache(lambda: describe(app, CompletionRequest, ChatRequest))  # type: ignore[method-assign]
    return app


def _add_generation(
    app: FastAPI,
    engine: Engine,
    generator: Generator,
    lifecycle: Lifecycle,
    served_names: Sequence[str],
) -> None:
    translator = Translator(engine.tokenizer, engine.info, served_names)
    shared: dict[str, Any] = {
        "generator": generator,
        "tokenizer": engine.tokenizer,
        "lifecycle": lifecycle,
        "system_fingerprint": f"octavo-{__version__}-{engine.info.backend}-{engine.info.dtype}",
        "max_body_bytes": DEFAULT_MAX_BODY_BYTES,
    }
    completions = Handler(
        Endpoint("cmpl-", translator.completion, completion_body, completion_events), **shared
    )
    chat = Handler(Endpoint("chatcmpl-", translator.chat, chat_body, chat_events), **shared)

    @app.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Complete one or several prompts."""
        return await completions(request)

    @app.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await chat(request)


def _add_operations(app: FastAPI, operations: Operations) -> None:
    app.add_api_route("/v1/models", operations.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", operations.model, methods=["GET"])
    for path, probe in (("/health", operations.health), ("/live", operations.live)):
        app.add_api_route(path, probe, methods=["GET"])
        app.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/metrics", operations.metrics_text, methods=["GET"])
    app.add_api_route("/version", operations.version, methods=["GET"])
