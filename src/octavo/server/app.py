"""The composition of the server: routes, layers, and what they share."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from itertools import chain

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response

from octavo import __version__
from octavo.core.errors import RequestError
from octavo.core.events import NullObserver, Observer
from octavo.server.auth import KeyCheck
from octavo.server.docs_page import docs_page
from octavo.server.endpoints import ROUTES, add_endpoints
from octavo.server.errors import on_http_error, on_request_error
from octavo.server.gate import Gate
from octavo.server.generation import Generator
from octavo.server.lifecycle import Admission, Lifecycle
from octavo.server.openapi import answers, describe
from octavo.server.operations import Operations
from octavo.server.ports import Engine
from octavo.server.tools.styles import ToolStyle
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
    tool_style: ToolStyle | None = None,
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
        tool_style: how the model writes tool calls; None: as its chat template shows.
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
        docs_url=None,  # FastAPI's page loads its scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(
        Gate, keys=KeyCheck(api_key), lifecycle=lifecycle, observer=observer or NullObserver()
    )
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_error)
    generator = Generator(engine, Admission(max_num_inflight))
    translator = Translator(engine.tokenizer, engine.info, served_model_names, tool_style)
    add_endpoints(app, engine, generator, lifecycle, translator)
    _add_operations(app, Operations(engine, lifecycle, metrics, tuple(served_model_names)))
    app.openapi = cache(lambda: describe(app, chain.from_iterable(ROUTES.values())))  # type: ignore[method-assign]
    page = cache(lambda: docs_page(app.openapi()))
    app.add_api_route("/docs", lambda: HTMLResponse(page()), include_in_schema=False)
    return app


def _add_operations(app: FastAPI, operations: Operations) -> None:
    app.add_api_route("/v1/models", operations.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", operations.model, methods=["GET"])
    for path, probe in (("/health", operations.health), ("/live", operations.live)):
        app.add_api_route(path, probe, methods=["GET"])
        app.add_api_route(path, probe, methods=["HEAD"], include_in_schema=False)
    app.add_api_route(
        "/metrics",
        operations.metrics_text,
        methods=["GET"],
        response_class=Response,
        openapi_extra=answers("text/plain"),
    )
    app.add_api_route("/version", operations.version, methods=["GET"])
