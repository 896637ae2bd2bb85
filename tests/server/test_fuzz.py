"""Bodies that nobody thought of: whatever is sent, the answer is right or a refusal."""

import asyncio
import json
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.server.anthropic.protocol import CountRequest, MessagesRequest
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.completions import CompletionRequest
from octavo.server.protocol.embeddings import EmbeddingRequest
from octavo.server.protocol.tokenize import DetokenizeRequest, TokenizeChat
from octavo.server.protocol.validation import StrictModel
from octavo.server.responses_api.protocol import ResponsesRequest
from support_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    ScriptedEngine,
    check_error,
    make_app,
    parse_events,
    post,
    reasons_of,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
NUMBER = st.integers(-3, 300) | st.floats(-3, 3)
NAMES = {
    path: sorted({*model.model_fields, *model.unsupported})
    for path, model in ((CHAT, ChatRequest), (COMPLETIONS, CompletionRequest))
}
PROMPT = st.text(max_size=30) | st.lists(st.integers(-2, 310) | st.text(max_size=5), max_size=5)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "developer", "tool", "x"])},
    optional={"content": st.text(max_size=30) | JSON, "name": JSON, "tool_call_id": JSON},
)


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A body that is nearly right: known fields with likely and unlikely values."""
    fields = st.dictionaries(
        st.sampled_from(NAMES[path]), st.booleans() | NUMBER | JSON, max_size=4
    )
    body = draw(fields)
    if path == CHAT:
        body["messages"] = draw(st.just(HELLO) | st.lists(MESSAGE, max_size=3))
    else:
        body["prompt"] = draw(PROMPT)
    return body


def encoded(body: dict[str, Any]) -> bytes:
    """Write a body, integers of any size and NaN included."""
    return json.dumps(body).encode()


def send(path: str, body: bytes) -> None:
    """Send a body; a refusal must be one of the client's making, an answer must be whole."""
    engine = ScriptedEngine()
    response = asyncio.run(post(engine, path, body))
    assert not engine.live
    if response.status_code != 200:
        assert response.status_code in (400, 404)
        check_error(response, response.status_code)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert all(len(found) == 1 for found in reasons_of(parse_events(response.content)).values())
    else:
        assert response.json()["choices"]


@settings(max_examples=60, deadline=None)
@given(bodies(CHAT))
def test_chat_bodies(body: dict[str, Any]) -> None:
    """HT-01: no body of chat, however odd its fields, is a fault of the server's."""
    send(CHAT, encoded(body))


@settings(max_examples=60, deadline=None)
@given(bodies(COMPLETIONS))
def test_completion_bodies(body: dict[str, Any]) -> None:
    """HT-01: no body of completions, however odd its fields, is a fault of the server's."""
    send(COMPLETIONS, encoded(body))


OTHERS: dict[str, tuple[type[StrictModel], dict[str, Any]]] = {
    "/v1/responses": (ResponsesRequest, {"input": "hi"}),
    "/v1/messages": (MessagesRequest, {"model": "tiny", "max_tokens": 5, "messages": HELLO}),
    "/v1/messages/count_tokens": (CountRequest, {"model": "tiny", "messages": HELLO}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "hi"}),
    "/tokenize": (TokenizeChat, {"messages": HELLO}),
    "/detokenize": (DetokenizeRequest, {"tokens": [97]}),
}
ITEM = st.dictionaries(
    st.sampled_from(["type", "role", "content", "text", "name", "input", "id", "arguments"]),
    st.sampled_from(["text", "tool_use", "function_call", "message", "user", "assistant"]) | JSON,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(OTHERS)), st.data())
def test_other_bodies(path: str, data: st.DataObject) -> None:
    """HT-01: no body of any other endpoint, however odd its fields, is a fault of the server's."""
    model, minimal = OTHERS[path]
    names = st.sampled_from(sorted({*model.model_fields, *model.unsupported}))
    odd = JSON | NUMBER | st.lists(ITEM, max_size=3) | ITEM
    body = minimal | data.draw(st.dictionaries(names, odd, max_size=3))
    engine = ScriptedEngine(embedding=(1.0,))
    response = asyncio.run(post(engine, path, encoded(body)))
    assert response.status_code in (200, 400, 404), response.text
    assert not engine.live
    if response.status_code != 200:
        assert response.json()["error"]["message"]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([CHAT, COMPLETIONS]), st.binary(max_size=60))
def test_bytes(path: str, body: bytes) -> None:
    """HT-01: no bytes are a fault of the server's."""
    send(path, body)


def test_own_document_describes_every_field() -> None:
    """The server's OpenAPI document names each field that it reads, and resolves its references."""
    document = make_app(ScriptedEngine()).openapi()
    schemas = document["components"]["schemas"]
    for model in (ChatRequest, CompletionRequest):
        assert schemas[model.__name__]["properties"].keys() == model.model_fields.keys()
        assert schemas[model.__name__]["additionalProperties"] is False
    text = orjson.dumps(document).decode()
    for reference in text.split('"$ref":"')[1:]:
        name = reference.split('"', 1)[0].removeprefix("#/components/schemas/")
        assert name in schemas
