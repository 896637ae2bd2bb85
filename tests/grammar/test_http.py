"""Structured output over HTTP: refused before anything is answered, alone, and kept if taken."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field

from support_engine import Recorder, patient_engine, tiny_parts
from support_grammar import fits
from support_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    NAME,
    check_error,
    live_server,
    make_app,
    parse_events,
)

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
BAD_SHAPES: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "["}},
    {"structured_outputs": {"regex": "(?<=a)b"}},
    {"structured_outputs": {"regex": "a" * 100_000}},
    {"structured_outputs": {"json": {"type": "string", "pattern": "a{5,2}"}}},
    {"structured_outputs": {"json": {"type": "foo"}}},
    {"structured_outputs": {"json": '"x"'}},
    {"structured_outputs": {"grammar": 'start: "a"\nstart: "b"'}},
    {"structured_outputs": {"structural_tag": "{}"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": {"$ref": "#/missing"}},
        }
    },
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": False}}},
]


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the real server on a real engine with a tiny random model."""
    parts = tiny_parts(tmp_path / "model", Recorder(), max_model_len=256, debug_invariants=True)
    engine = patient_engine(parts)
    engine.start()
    transport = httpx.ASGITransport(app=make_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
    engine.shutdown()


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    return await client.post(path, json={**prompt, "max_tokens": 100, **fields})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_bad_shapes(client: httpx.AsyncClient, path: str, stream: bool) -> None:
    """CO-01, CO-04: a shape that cannot be used is a 400 that names its field, before any stream
    begins; the server stays healthy."""
    for shape in BAD_SHAPES:
        response = await ask(client, path, stream=stream, **shape)
        check_error(response, 400)
        assert response.json()["error"]["param"].split(".")[0] == next(iter(shape))
    assert (await client.get("/health")).status_code == 200


async def test_good_among_bad(client: httpx.AsyncClient) -> None:
    """CO-02: valid, malformed, valid; then fifty interleaved: each gets what it deserves."""
    good = {"structured_outputs": {"grammar": 'start: "yes" | "no"'}}
    bad = {"structured_outputs": {"grammar": 'start: "a"\nstart: "b"'}}
    statuses = [(await ask(client, CHAT, **shape)).status_code for shape in (good, bad, good)]
    assert statuses == [200, 400, 200]
    shapes = [good, bad, *BAD_SHAPES[:3]] * 10
    responses = await asyncio.gather(*(ask(client, CHAT, **shape) for shape in shapes))
    assert [r.status_code for r in responses] == [200 if s is good else 400 for s in shapes]
    texts = {r.json()["choices"][0]["message"]["content"] for r in responses if r.is_success}
    assert texts <= {"yes", "no"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_shapes_hold(client: httpx.AsyncClient, path: str) -> None:
    """HT-10: what is accepted is enforced, streamed or not, for every choice."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    body = {"response_format": form, "n": 3, "temperature": 1, "seed": 5}
    whole = (await ask(client, path, **body)).json()
    texts = [c["message"]["content"] if path == CHAT else c["text"] for c in whole["choices"]]
    reasons = [choice["finish_reason"] for choice in whole["choices"]]
    assert all(fits(CITY, text) for text in texts)
    assert reasons == ["stop"] * 3
    response = await ask(client, path, stream=True, **body)
    streamed = {0: "", 1: "", 2: ""}
    for chunk in parse_events(response.content):
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") if path == CHAT else choice["text"]
            streamed[choice["index"]] += piece or ""
    assert list(streamed.values()) == texts


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "a", "text": {"format": {"name": "a"}}}, "text.format"),
        (
            "/v1/messages",
            {"model": NAME, "messages": HELLO, "max_tokens": 9, "output_config": {"format": {}}},
            "output_config.format",
        ),
    ],
)
async def test_bad_shapes_are_named_as_the_api_does(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str
) -> None:
    """HT-10: a bad schema is a 400 that names the field which the client sent, not chat's."""
    form = (fields.get("text") or fields["output_config"])["format"]
    form |= {"type": "json_schema", "schema": {"type": "foo"}}
    refused = await client.post(path, json=fields)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{param} has a json schema")
    assert refused.json()["error"].get("param") in (param, None)


async def test_truncated_json_says_so(client: httpx.AsyncClient) -> None:
    """CO-13: max_tokens 10 in a long string is 200 with ``length``, streamed or not."""
    schema = {**CITY, "properties": {"name": {"type": "string", "minLength": 99}, "old": {}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"response_format": form, "max_tokens": 10}
    [choice] = (await ask(client, CHAT, **body)).json()["choices"]
    assert choice["finish_reason"] == "length"
    chunks = parse_events((await ask(client, CHAT, stream=True, **body)).content)
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"


class Step(BaseModel):
    """What the client expects back."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["move", "turn"]
    amount: int = Field(ge=0, le=99)


class Plan(BaseModel):
    """A nested model, so that the schema has definitions."""

    model_config = ConfigDict(extra="forbid")
    steps: list[Step] = Field(min_length=1, max_length=2)


async def test_the_openai_client_parses(tmp_path: Path) -> None:
    """Turns red when ``client.chat.completions.parse`` does not get a pydantic model back."""
    openai = pytest.importorskip("openai")
    parts = tiny_parts(tmp_path / "model", Recorder(), max_model_len=512)
    with live_server(lambda: patient_engine(parts)) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client:
            completion = await client.chat.completions.parse(
                model="tiny",
                messages=HELLO,
                response_format=Plan,
                max_tokens=200,
                logprobs=True,
                seed=1,
            )
    [choice] = completion.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Plan)
    assert json.loads(choice.message.content) == choice.message.parsed.model_dump()
    assert len(choice.logprobs.content) == completion.usage.completion_tokens
