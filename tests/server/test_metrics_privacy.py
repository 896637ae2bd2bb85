"""What anybody who may scrape /metrics can learn about those who sent requests."""

import re
from pathlib import Path

import httpx

from octavo.engine.factory import async_engine
from octavo.observe.prometheus import PrometheusObserver
from octavo.server.app import build_app
from support_engine import tiny_parts
from support_server import CHAT, HELLO

KEY = "sekret-key"


async def test_clients_leave_no_trace_in_labels(tmp_path: Path) -> None:
    """HT-07: turns red when a key, a user, a prompt, a salt, or a name that a client made up
    becomes a label, or when more clients make more series."""
    observer = PrometheusObserver(model_name="tiny")
    engine = async_engine(tiny_parts(tmp_path / "model", observer, max_model_len=256))
    engine.start()
    app = build_app(
        engine,
        served_model_names=["tiny"],
        metrics=observer.render,
        api_key=KEY,
        observer=observer,
    )
    transport = httpx.ASGITransport(app=app)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def ask(name: str) -> None:
            told = {"user": name, "cache_salt": name, "metadata": {"tenant": name}}
            body = {"messages": [*HELLO, {"role": "user", "content": name}], "max_tokens": 1}
            sent = {**headers, "X-Request-Id": name, "User-Agent": name}
            for fields in (told, {"model": name}, {name: 1}, {"user": [name]}):
                await client.post(CHAT, json={**body, **fields}, headers=sent)
            await client.post(f"/v1/{name}", json=body, headers=sent)
            await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {name}"})

        await ask("client-0")
        before = (await client.get("/metrics")).text
        for i in range(1, 20):
            await ask(f"client-{i}")
        after = (await client.get("/metrics")).text
    engine.shutdown()

    def names(text: str) -> set[str]:
        return set(re.findall(r"^([^#\s]\S*) ", text, re.MULTILINE))

    assert names(after) == names(before) != set()
    assert "client-" not in after
    assert KEY not in after
