"""The server's own OpenAPI document: request bodies come from the models that check them."""

from collections.abc import Iterable
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE: Final = "#/components/schemas/{model}"


def json_body(*models: type[BaseModel]) -> dict[str, Any]:
    """Return what a route says about its body, which is one of ``models``, and its answers."""
    references = [{"$ref": REFERENCE.format(model=model.__name__)} for model in models]
    schema = references[0] if len(references) == 1 else {"oneOf": references}
    streams = any("stream" in model.model_fields for model in models)
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        **answers("application/json", *(["text/event-stream"] if streams else [])),
    }


def answers(*media_types: str) -> dict[str, Any]:
    """Return what a route says about the kinds of its answers."""
    return {"responses": {"200": {"content": {kind: {} for kind in media_types}}}}


def describe(app: FastAPI, models: Iterable[type[BaseModel]]) -> dict[str, Any]:
    """Return the document of an application whose bodies are ``models``."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    _, schemas = models_json_schema(
        [(model, "validation") for model in models], ref_template=REFERENCE
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    return document
