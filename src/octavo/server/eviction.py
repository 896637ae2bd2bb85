"""Seeing and switching the KV cache's eviction policy while the server runs."""

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.server.body import DEFAULT_MAX_BODY_BYTES, read_body
from octavo.server.errors import json_response
from octavo.server.ports import Engine
from octavo.server.protocol.eviction import EvictionPolicyRequest


class EvictionControl:
    """Answers ``GET`` and ``POST /kv_cache/eviction_policy``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def show(self) -> Response:
        """Say which policy is in force, and what each achieved since the start."""
        return json_response(self._state())

    async def switch(self, request: Request) -> Response:
        """Put another policy in force; nothing cached is lost.

        Raises:
            InvalidRequestError: there is no such policy.
            UnavailableError: the engine does not run, or does not answer.
        """
        asked = EvictionPolicyRequest.parse(await read_body(request, DEFAULT_MAX_BODY_BYTES))
        await self._engine.set_eviction_policy(asked.policy)
        return json_response(self._state())

    def _state(self) -> dict[str, Any]:
        totals = self._engine.stats().eviction
        return {
            "policy": next((entry.policy for entry in totals if entry.is_in_force), None),
            "policies": [asdict(entry) for entry in totals],
        }
