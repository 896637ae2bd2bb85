"""Retention hints and eviction policies over HTTP."""

from pathlib import Path

import pytest

from octavo.core.request import DEFAULT_RETENTION, Retention
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.factory import async_engine
from support_engine import Recorder, byte_tokenizer, fake_parts
from support_server import CHAT, COMPLETIONS, HELLO, ScriptedEngine, check_error, client_of, post

PATH = "/kv_cache/eviction_policy"
GREEDY = {"temperature": 0, "max_tokens": 4}


def fake(tmp_path: Path, **settings: int) -> AsyncEngine:
    """The real engine around a runner without a model."""
    return async_engine(fake_parts(byte_tokenizer(tmp_path), Recorder(), **settings))


@pytest.mark.parametrize(
    ("path", "asks"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})]
)
async def test_hints_reach_the_engine(path: str, asks: dict[str, object]) -> None:
    """Each field of the hint is used; without one there is no wish."""
    engine = ScriptedEngine()
    hint = {"priority": 80, "duration_ms": 2500, "store": False}
    for body in (asks, asks | {"kv_cache_retention": hint}):
        assert (await post(engine, path, body)).status_code == 200
    found = [call["retention"] for call in engine.calls]
    assert found == [DEFAULT_RETENTION, Retention(80, 2.5, store=False)]


@pytest.mark.parametrize(
    "hint",
    [
        {"priority": 101},
        {"priority": -1},
        {"priority": "high"},
        {"duration_ms": 0},
        {"duration_ms": 1.5},
        {"store": "no"},
        {"ttl": 5},
        "long",
    ],
)
async def test_a_wrong_hint_is_refused_by_name(hint: object) -> None:
    """No value is clipped or ignored."""
    engine = ScriptedEngine()
    answer = await post(engine, COMPLETIONS, {"prompt": "a", "kv_cache_retention": hint})
    assert "kv_cache_retention" in check_error(answer, 400)
    assert not engine.calls


async def test_kv_that_is_not_to_be_stored_is_not_reused(tmp_path: Path) -> None:
    """The same prompt hits nothing after one that asked not to be stored, and all after another."""
    engine = fake(tmp_path)
    engine.start()
    cached = []
    async with client_of(engine) as client:
        for hint in ({"store": False}, {"store": True}, {}):
            body = {"prompt": "twelve chars", "kv_cache_retention": hint, **GREEDY}
            usage = (await client.post(COMPLETIONS, json=body)).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    engine.shutdown()
    assert cached[:2] == [0, 0]
    assert cached[2] > 0


async def test_the_policy_is_switched_while_requests_run(tmp_path: Path) -> None:
    """The engine thread switches between steps; what was cached is still hit, totals are kept."""
    engine = fake(tmp_path, num_blocks=24)
    engine.start()
    async with client_of(engine) as client:
        first = (await client.get(PATH)).json()
        assert (first["policy"], len(first["policies"])) == ("lru", 1)
        for number in range(12):
            body = {"prompt": f"{number} is the number of it", **GREEDY}
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200
        switched = (await client.post(PATH, json={"policy": "predict"})).json()
        assert switched["policy"] == "predict"
        again = (await client.post(COMPLETIONS, json=body)).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] > 0
        state = (await client.get(PATH)).json()
        check_error(await client.post(PATH, json={"policy": "magic"}), 400, "policy")
        check_error(await client.post(PATH, json={"policy": "os:path"}), 400, "policy")
        assert (await client.get(PATH)).json() == state
    engine.shutdown()
    old, new = state["policies"]
    assert (old["policy"], new["policy"]) == ("lru", "predict")
    assert old["evictions_total"] > 0
    assert new["hits_total"] > 0
    assert new["saved_tokens_total"] == 4 * new["hits_total"]
    assert [entry["switches_total"] for entry in (old, new)] == [0, 1]


async def test_the_policy_is_behind_the_key() -> None:
    """Neither reading nor switching goes without the server's key."""
    engine = ScriptedEngine()
    async with client_of(engine, api_key="secret") as client:
        for answer in (await client.get(PATH), await client.post(PATH, json={"policy": "predict"})):
            assert answer.status_code == 401
        key = {"Authorization": "Bearer secret"}
        answer = await client.post(PATH, json={"policy": "predict"}, headers=key)
        assert answer.json()["policy"] == "predict"


async def test_a_stopped_engine_switches_nothing(tmp_path: Path) -> None:
    """The answer is 503 at once, not a wait for a thread that is gone."""
    engine = fake(tmp_path)
    engine.start()
    engine.shutdown()
    async with client_of(engine) as client:
        check_error(await client.post(PATH, json={"policy": "lfu"}), 503)
