"""What the server says about itself: the page at /docs, the compatibility table."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from octavo.server.anthropic.protocol import MessagesRequest
from octavo.server.endpoints import ROUTES
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.completions import CompletionRequest
from octavo.server.protocol.embeddings import EmbeddingRequest
from octavo.server.protocol.validation import StrictModel
from octavo.server.reference import parts_of, reference, rows_of
from octavo.server.responses_api.protocol import ResponsesRequest
from support import REPO
from support_server import CHAT, ScriptedEngine, check_error, client_of, make_app


def test_the_table_is_not_stale() -> None:
    """docs/api.md says what the models that check bodies say; else write it again with
    ``python -m octavo.server.reference > docs/api.md``."""
    assert (REPO / "docs" / "api.md").read_text(encoding="utf-8") == reference()


def test_every_path_is_in_the_table() -> None:
    """A route that reads a body cannot be left out of the table, nor be in it without serving."""
    document = make_app(ScriptedEngine()).openapi()
    reading = {path for path, about in document["paths"].items() if "post" in about}
    assert reading == ROUTES.keys()


def all_models() -> list[type[StrictModel]]:
    """Every body and every part of one."""
    bodies = [model for models in ROUTES.values() for model in models]
    return sorted({*bodies, *(part for body in bodies for part in parts_of(body))}, key=str)


@pytest.mark.parametrize("model", all_models(), ids=lambda model: model.__name__)
def test_every_field_is_told(model: type[StrictModel]) -> None:
    """A field is read, refused or different, never two of them, and what differs is a field."""
    assert not model.model_fields.keys() & model.unsupported.keys()
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert model.differences.keys() <= names
    assert {row.field for row in rows_of(model)} == names | model.unsupported.keys()
    for row in rows_of(model):
        if row.status != "honoured":
            assert row.note
    if model in {ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest}:
        assert all(row.note for row in rows_of(model))


@pytest.mark.shared
@pytest.mark.parametrize(
    ("schema", "model"),
    [
        ("CreateChatCompletionRequest", ChatRequest),
        ("CreateCompletionRequest", CompletionRequest),
        ("CreateResponse", ResponsesRequest),
        ("CreateEmbeddingRequest", EmbeddingRequest),
    ],
)
def test_every_parameter_of_the_specification_is_decided(
    shared: Path, schema: str, model: type[StrictModel]
) -> None:
    """Law 8: what OpenAI's specification lists is honoured or refused by name."""
    with (shared / "traces" / "openai" / "openapi.yaml").open(encoding="utf-8") as file:
        document = yaml.load(file, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    listed = properties(document["components"]["schemas"], {"$ref": f"#/x/{schema}"})
    assert len(listed) >= 5
    assert listed - {row.field for row in rows_of(model)} == set()


def properties(schemas: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """The properties of a schema and of all that it is composed of."""
    if "$ref" in schema:
        return properties(schemas, schemas[schema["$ref"].rsplit("/", 1)[1]])
    found = set(schema.get("properties", ()))
    return found.union(*(properties(schemas, part) for part in schema.get("allOf", ())))


class Loads(HTMLParser):
    """Collects what a page would load or link to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "iframe", "img", "link")
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


async def test_the_page_loads_nothing() -> None:
    """/docs needs no network beyond the server: no CDN, no script; and it names every field."""
    async with client_of(ScriptedEngine()) as client:
        response = await client.get("/docs")
        assert response.headers["content-type"].startswith("text/html")
        page = Loads()
        page.feed(response.text)
        assert page.found == ["openapi.json"]
        assert (await client.get("/openapi.json")).status_code == 200
    assert not re.search(r"https?://", response.text)
    for path, models in ROUTES.items():
        assert f"POST {path}</code>" in response.text
        assert all(row.field in response.text for model in models for row in rows_of(model))


async def test_the_page_needs_the_key() -> None:
    """HT-06: with a key set, the page is refused in so many words without it, and opens with it."""
    async with client_of(ScriptedEngine(), api_key="k") as client:
        assert "API key" in check_error(await client.get("/docs"), 401)
        allowed = await client.get("/docs", headers={"Authorization": "Bearer k"})
        assert allowed.status_code == 200


def test_own_document_is_valid_json_schema() -> None:
    """The schemas of bodies in /openapi.json are valid, and say what each field is for."""
    document = make_app(ScriptedEngine()).openapi()
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        if name in ("ChatRequest", "CompletionRequest"):
            told = schema["properties"].keys() - ChatRequest.differences.keys()
            assert all("description" in schema["properties"][field] for field in told)


def test_kinds_of_answers_are_documented() -> None:
    """Turns red when /openapi.json forgets that an answer may be a stream, or is no JSON."""
    paths = make_app(ScriptedEngine()).openapi()["paths"]
    kinds = {
        path: set(method["post" if "post" in method else "get"]["responses"]["200"]["content"])
        for path, method in paths.items()
        if path in (*ROUTES, "/metrics")
    }
    streaming = {"/v1/completions", CHAT, "/v1/responses", "/v1/messages"}
    expected = {path: {"application/json"} for path in ROUTES}
    expected |= {path: {"application/json", "text/event-stream"} for path in streaming}
    assert kinds == expected | {"/metrics": {"text/plain"}}
