"""Answers against OpenAI's own specification."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml

from support_server import CHAT, COMPLETIONS, HELLO, ScriptedEngine, client_of, parse_events, post
from support_tools import CALL as TOOL_CALL
from support_tools import QWEN, TOOLS, WEATHER, calling_engine, named_events

pytestmark = pytest.mark.shared
Check = Callable[[str, Any], None]


@pytest.fixture(scope="module")
def check(shared: Path) -> Check:
    """Validates a body against one of the specification's schemas."""
    path = shared / "traces" / "openai" / "openapi.yaml"
    with path.open(encoding="utf-8") as file:
        document = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    schemas = {"components": {"schemas": nullable(document["components"]["schemas"])}}

    def validate(name: str, body: Any) -> None:
        jsonschema.validate(body, {"$ref": f"#/components/schemas/{name}", **schemas})

    return validate


def nullable(schema: Any) -> Any:
    """Rewrite OpenAPI 3.0's ``nullable`` as JSON Schema has it."""
    if isinstance(schema, list):
        return [nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    rewritten = {key: nullable(value) for key, value in schema.items() if key != "nullable"}
    if schema.get("nullable") is True:
        return {"anyOf": [rewritten, {"type": "null"}]}
    return rewritten


def test_the_check_can_fail(check: Check) -> None:
    """A validator that passes everything would prove nothing."""
    for name in ("CreateChatCompletionResponse", "ErrorResponse", "CreateCompletionResponse"):
        with pytest.raises(jsonschema.ValidationError):
            check(name, {"id": 5})


CHAT_FIELDS = [
    {},
    {"n": 3},
    {"logprobs": True, "top_logprobs": 2},
    {"n": 2, "logprobs": True, "return_token_ids": True, "prompt_logprobs": None, "max_tokens": 3},
]


@pytest.mark.parametrize("fields", CHAT_FIELDS, ids=str)
async def test_chat(check: Check, fields: dict[str, Any]) -> None:
    """Chat answers and chunks are what the specification describes."""
    body = {"messages": HELLO, **fields}
    answer = (await post(ScriptedEngine(), CHAT, body)).json()
    check("CreateChatCompletionResponse", answer)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in parse_events((await post(ScriptedEngine(), CHAT, streamed)).content):
        check("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize(
    "fields",
    [{}, {"n": 3}, {"logprobs": 2}, {"echo": True}, {"n": 2, "logprobs": 0, "seed": 1}],
    ids=str,
)
async def test_completions(check: Check, fields: dict[str, Any]) -> None:
    """Completions are what the specification describes; chunks but for the reason, which is null
    until the last (the specification's schema forgets that, its server does not)."""
    body = {"prompt": ["ab", "cd"], **fields}
    answer = (await post(ScriptedEngine(), COMPLETIONS, body)).json()
    check("CreateCompletionResponse", answer)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for chunk in parse_events((await post(ScriptedEngine(), COMPLETIONS, streamed)).content):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        chunk = {key: value for key, value in chunk.items() if value is not None or key != "usage"}
        check("CreateCompletionResponse", chunk)


SAYINGS = ["Hi", f"<think>Hm.</think>Look. {TOOL_CALL}{TOOL_CALL}", TOOL_CALL]


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": True, "top_logprobs": 1}], ids=str)
@pytest.mark.parametrize("text", SAYINGS)
async def test_chat_with_tools(check: Check, text: str, fields: dict[str, Any]) -> None:
    """Calls in chat answers and chunks are what the specification describes."""
    body = {"messages": HELLO, "tools": TOOLS, **fields}
    template = QWEN + "<think>"
    answer = (await post(calling_engine(text, template=template), CHAT, body)).json()
    check("CreateChatCompletionResponse", answer)
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = await post(calling_engine(text, template=template), CHAT, streamed)
    for chunk in parse_events(chunks.content):
        check("CreateChatCompletionStreamResponse", chunk)


@pytest.mark.parametrize("text", SAYINGS)
@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 9}, {"top_logprobs": 2}], ids=str)
async def test_responses(check: Check, text: str, fields: dict[str, Any]) -> None:
    """Responses and each of their events are what the specification describes."""
    body = {"input": "hi", "tools": [{"type": "function", **WEATHER}], **fields}
    template = QWEN + "<think>"
    answer = (await post(calling_engine(text, template=template), "/v1/responses", body)).json()
    check("Response", answer)
    streamed = await post(
        calling_engine(text, template=template), "/v1/responses", {**body, "stream": True}
    )
    for event in named_events(streamed.content):
        check("ResponseStreamEvent", event)


async def test_responses_that_fail(check: Check) -> None:
    """The event of a failed response is what the specification describes."""
    engine = calling_engine("abc", failure="It broke.", fail_after=1)
    streamed = await post(engine, "/v1/responses", {"input": "hi", "stream": True})
    for event in named_events(streamed.content):
        check("ResponseStreamEvent", event)


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "base64"}], ids=str)
async def test_embeddings(check: Check, fields: dict[str, Any]) -> None:
    """Embeddings are what the specification describes; but for base64, which it forgets."""
    engine = ScriptedEngine(embedding=(3.0, -4.0))
    answer = (await post(engine, "/v1/embeddings", {"input": ["a", "bc"], **fields})).json()
    if fields:
        for item in answer["data"]:
            data = base64.b64decode(item["embedding"])
            item["embedding"] = np.frombuffer(data, "<f4").tolist()
    assert answer["data"][1]["embedding"] == pytest.approx([0.6, -0.8])
    check("CreateEmbeddingResponse", answer)


async def test_models_and_errors(check: Check) -> None:
    """Lists of models and errors of every status are what the specification describes."""
    async with client_of(ScriptedEngine(), api_key="k") as client:
        check("ErrorResponse", (await client.get("/v1/models")).json())
        client.headers["Authorization"] = "Bearer k"
        check("ListModelsResponse", (await client.get("/v1/models")).json())
        check("Model", (await client.get("/v1/models/tiny")).json())
        for path in ("/none", "/v1/models/none", CHAT):
            check("ErrorResponse", (await client.get(path)).json())
        check("ErrorResponse", (await client.post(CHAT, json={})).json())
    check(
        "ErrorResponse", (await post(ScriptedEngine(failure="x"), CHAT, {"messages": HELLO})).json()
    )
