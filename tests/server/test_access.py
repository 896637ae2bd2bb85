"""Who gets in: without the key nothing but probes and metrics answers."""

import hmac
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import BaseRoute, Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from octavo.server.auth import OPEN_PATHS
from octavo.server.errors import is_anthropic
from support_server import CHAT, ScriptedEngine, check_error, client_of, make_app

KEY = "sk-correct-horse"
MESSAGES = {"/v1/messages", "/v1/messages/count_tokens"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO")
WRONG = (
    None,
    "",
    KEY,
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    f"Bearer {KEY[:-1]}",
    f"Bearer {KEY}x",
    f"Bearer {KEY.upper()}",
    f"Basic {KEY}",
    f"Bearer Bearer {KEY}",
)


def all_routes(routes: list[BaseRoute]) -> Iterator[Route]:
    for route in routes:
        if isinstance(route, Route):
            yield route
        else:
            yield from all_routes(getattr(route, "routes", None) or [])


def paths() -> list[str]:
    """Every path of the application, in all the spellings that routers have been fooled with."""
    found = {
        route.path.replace("{name:path}", "tiny")
        for route in all_routes(make_app(ScriptedEngine()).routes)
    }
    assert {CHAT, "/v1/completions", "/v1/models", "/version", "/openapi.json", "/docs"} <= found
    assert {"/v1/responses", "/v1/messages", "/tokenize", "/detokenize"} <= found
    assert {path for path in found if is_anthropic(path)} == MESSAGES
    locked = sorted(found - OPEN_PATHS)
    spellings = [
        "/{}",
        "//{}",
        "/v1/../{}",
        "/./{}",
        "/{}/",
        "/{}?key=x",
        "/health/../{}",
        "/%2e/{}",
    ]
    others = ["/", "/health/", "//health", "/Health", "/metrics/", "/invocations", "/v1"]
    return others + [s.format(path[1:]) for path in locked for s in spellings]


@pytest.mark.parametrize("authorization", WRONG)
async def test_nothing_answers_without_the_key(authorization: str | None) -> None:
    """HT-06: every route, alias and spelling, by every method, is a 401 without the right key."""
    headers = {} if authorization is None else {"Authorization": authorization}
    async with client_of(ScriptedEngine(), api_key=KEY) as client:
        for path in paths():
            for method in METHODS:
                response = await client.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method == "HEAD":
                    continue
                if is_anthropic(response.request.url.path):
                    assert response.json()["error"]["type"] == "authentication_error"
                else:
                    check_error(response, 401)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/", "/ws"])
@pytest.mark.parametrize("key", [None, KEY])
def test_websockets_are_refused(path: str, key: str | None) -> None:
    """HT-06: no path speaks WebSocket, so none can be a way around the key."""
    app = make_app(ScriptedEngine(), api_key=key)
    with (
        TestClient(app) as client,
        pytest.raises(WebSocketDisconnect),
        client.websocket_connect(path),
    ):
        pass


@pytest.mark.parametrize("authorization", [f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY} "])
async def test_the_key_opens(authorization: str) -> None:
    """HT-06, the other side: the right key is let in."""
    async with client_of(ScriptedEngine(), api_key=KEY) as client:
        headers = {"Authorization": authorization}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_open_paths(path: str) -> None:
    """HT-06: probes and scrapes need no key, as orchestrators have none to send."""
    async with client_of(ScriptedEngine(), api_key=KEY) as client:
        assert (await client.get(path)).status_code == 200


async def test_without_a_key_all_is_open() -> None:
    """No key set: nobody needs one, and one that is sent is not looked at."""
    async with client_of(ScriptedEngine()) as client:
        assert (await client.get("/v1/models")).status_code == 200
        headers = {"Authorization": "Bearer any"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


async def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """HT-06: the comparison is hmac's, on digests of one length, so time tells nothing."""
    lengths = []
    real = hmac.compare_digest

    def watch(left: Any, right: Any) -> bool:
        lengths.append((len(left), len(right)))
        return real(left, right)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    async with client_of(ScriptedEngine(), api_key=KEY) as client:
        for token in ("", "a", "a" * 1000, KEY):
            await client.get("/v1/models", headers={"Authorization": f"Bearer {token}"})
    assert lengths == [(32, 32)] * 4
