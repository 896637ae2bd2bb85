"""What operators and clients ask about the server itself."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.responses import Response

from octavo import __version__
from octavo.core.errors import NotFoundError, UnavailableError
from octavo.observe.prometheus import CONTENT_TYPE
from octavo.server.errors import json_response
from octavo.server.lifecycle import DRAINING, Lifecycle
from octavo.server.ports import Engine


class Operations:
    """Answers everything that generates nothing."""

    def __init__(
        self,
        engine: Engine,
        lifecycle: Lifecycle,
        metrics: Callable[[], bytes],
        served_names: Sequence[str],
    ) -> None:
        self._engine = engine
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._served_names = served_names
        self._created = int(time.time())

    async def health(self) -> Response:
        """Say whether the server takes requests (readiness): 200, or 503 with the reason."""
        if self._lifecycle.is_draining:
            raise UnavailableError(DRAINING)
        if not self._engine.is_running:
            raise UnavailableError("The engine is not running.")
        return json_response({"status": "ok"})

    async def live(self) -> Response:
        """Say that the process answers (liveness): 200 also while draining."""
        return json_response({"status": "ok"})

    async def metrics_text(self) -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(self._metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def version(self) -> Response:
        """Return the server's version."""
        return json_response({"version": __version__})

    async def models(self) -> Response:
        """List the served models."""
        data = [self._describe(name) for name in self._served_names]
        return json_response({"object": "list", "data": data})

    async def model(self, name: str) -> Response:
        """Describe one served model.

        Raises:
            NotFoundError: no model is served by that name.
        """
        if name not in self._served_names:
            raise NotFoundError(f"There is no model {name[:100]!r}.", param="model")
        return json_response(self._describe(name))

    def _describe(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "octavo",
            "max_model_len": self._engine.info.max_model_len,
        }
