"""The two ways to ask for a shape of output: OpenAI's ``response_format``, vLLM's own field."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag

from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
_ONE_WAY: Final = "JSON is written in one way, a space after each colon and comma"


def _read_schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise wrong("must be a JSON schema: an object, or true")
    return value


def _read_schema_or_text(value: Any) -> Any:
    return value if isinstance(value, str) else _read_schema(value)


def _read_tags(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise wrong("must be an object with structures and triggers, or its JSON text")
    return value


Schema = Annotated[
    dict[str, Any] | bool,
    PlainValidator(_read_schema, json_schema_input_type=dict[str, Any] | bool),
]


class TextFormat(StrictModel):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A named schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    """Changes nothing."""
    schema_: Schema = Field(alias="schema")
    """Draft 2020-12, as far as llguidance goes; what it cannot enforce is refused."""
    description: str | None = None
    """Changes nothing: the prompt is the client's."""
    strict: bool | None = None
    """Changes nothing: a schema is always enforced."""


class JsonSchemaFormat(StrictModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class Structure(StrictModel):
    """A tag: how it begins, what is in it, how it ends."""

    begin: str
    schema_: Schema = Field(alias="schema")
    end: str


class StructuralTagFormat(StrictModel):
    """Free text, but what follows a trigger is one of the tags."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "format": Unsupported("give structures and triggers")
    }

    type: Literal["structural_tag"]
    structures: list[Structure] = Field(min_length=1)
    triggers: list[str] = Field(min_length=1)


def _format(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"@{kind}" if isinstance(kind, str) and kind in _FORMATS else None


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("@text")]
    | Annotated[JsonObjectFormat, Tag("@json_object")]
    | Annotated[JsonSchemaFormat, Tag("@json_schema")]
    | Annotated[StructuralTagFormat, Tag("@structural_tag")],
    Discriminator(
        _format,
        custom_error_type="response_format",
        custom_error_message=f"must be an object whose type is one of {', '.join(_FORMATS)}",
    ),
]


class StructuredOutputs(StrictModel):
    """vLLM's field: exactly one of these."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "whitespace_pattern": Unsupported(_ONE_WAY),
        "disable_any_whitespace": Unsupported(_ONE_WAY, neutral=(True, False)),
        "disable_additional_properties": Unsupported("say so in the schema", neutral=(False,)),
        "disable_fallback": Unsupported("there is no fallback", neutral=(True, False)),
    }

    json_: (
        Annotated[
            dict[str, Any] | bool | str,
            PlainValidator(
                _read_schema_or_text, json_schema_input_type=dict[str, Any] | bool | str
            ),
        ]
        | None
    ) = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """Matched from end to end; Rust's syntax, without lookaround."""
    choice: list[str] | None = Field(default=None, min_length=1)
    """One of these texts."""
    grammar: str | None = None
    """llguidance's variant of Lark."""
    structural_tag: (
        Annotated[
            dict[str, Any] | str,
            PlainValidator(_read_tags, json_schema_input_type=dict[str, Any] | str),
        ]
        | None
    ) = None
    """``structures`` and ``triggers`` as in ``response_format``, or their JSON text."""
