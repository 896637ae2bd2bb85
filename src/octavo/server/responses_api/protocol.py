"""The body of ``POST /v1/responses``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from octavo.server.protocol.common import LATER, NO_MEANING, StreamOptions
from octavo.server.protocol.structured import JsonObjectFormat, JsonSchema
from octavo.server.protocol.structured import TextFormat as PlainText
from octavo.server.protocol.tools import (
    MAX_TOOLS,
    TOOL_CHOICE_KIND,
    FunctionName,
    ToolMode,
)
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong
from octavo.server.responses_api.items import Item


def _function_only(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise wrong("must have type 'function': the server has no tools of its own")
    return value


class FunctionTool(StrictModel):
    """A function that the model may call."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "output_schema": Unsupported(LATER),
        "defer_loading": Unsupported(LATER, neutral=(False,)),
        "allowed_callers": Unsupported(NO_MEANING),
    }

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    """What it does, for the model to read."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object."""
    strict: bool = False
    """Arguments follow the schema; they do so anyway where a call is required."""


class NamedFunction(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(StrictModel):
    """The only functions that may be called; all of them stay in the prompt."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """Whether one must be called."""
    tools: list[Annotated[NamedFunction, BeforeValidator(_function_only)]] = Field(min_length=1)


Choice = Annotated[
    Annotated[ToolMode, Tag("@mode")]
    | Annotated[NamedFunction, Tag("@function")]
    | Annotated[AllowedFunctions, Tag("@allowed_tools")],
    TOOL_CHOICE_KIND,
]


class ReasoningOptions(StrictModel):
    """Whether the model reasons before it answers."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "mode": Unsupported(LATER),
        "context": Unsupported(LATER, neutral=("auto",)),
    }
    differences: ClassVar[Mapping[str, str]] = {
        "summary": "reasoning itself is given, never a summary",
        "generate_summary": "reasoning itself is given, never a summary",
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """none or anything else: for models whose chat template can switch reasoning off."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class NamedSchema(JsonSchema):
    """JSON that a schema allows."""

    type: Literal["json_schema"]


def _format_kind(form: Any) -> str | None:
    kind = form.get("type") if isinstance(form, dict) else None
    return f"@{kind}" if kind in ("text", "json_object", "json_schema") else None


TextFormat = Annotated[
    Annotated[PlainText, Tag("@text")]
    | Annotated[JsonObjectFormat, Tag("@json_object")]
    | Annotated[NamedSchema, Tag("@json_schema")],
    Discriminator(
        _format_kind,
        custom_error_type="text.format",
        custom_error_message="must be an object of type text, json_object or json_schema",
    ),
]


class TextOptions(StrictModel):
    """What form the text has."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "verbosity": Unsupported(NO_MEANING, neutral=("medium",)),
    }

    format: TextFormat | None = None
    """Free text, any JSON object, or JSON that a schema allows."""


def _read_input(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong("must be a string or an array of items")
    return value


class ResponsesRequest(StrictModel):
    """A conversation to continue, and how."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "previous_response_id": Unsupported("nothing is stored; send the whole conversation"),
        "conversation": Unsupported("nothing is stored; send the whole conversation"),
        "store": Unsupported("nothing is stored", neutral=(False,)),
        "background": Unsupported("nothing is stored", neutral=(False,)),
        "prompt": Unsupported("there are no stored prompts"),
        "max_tool_calls": Unsupported("the server calls no tools itself"),
        "moderation": Unsupported(NO_MEANING),
        "context_management": Unsupported(LATER),
        "truncation": Unsupported("prompts are never cut unasked", neutral=("disabled",)),
        "service_tier": Unsupported("there is one tier", neutral=("auto", "default")),
        "prompt_cache_retention": Unsupported(LATER),
        "prompt_cache_options": Unsupported(LATER),
    }
    differences: ClassVar[Mapping[str, str]] = {
        "metadata": "returned with the answer; nothing else",
        "user": "accepted; it changes nothing",
        "safety_identifier": "accepted; it changes nothing",
        "prompt_cache_key": "accepted; it changes nothing",
    }

    @property
    def wants_logprobs(self) -> bool:
        """Whether logprobs of the text are asked for, in either way."""
        return "message.output_text.logprobs" in self.include or bool(self.top_logprobs)

    model: str | None = None
    """One of the served names; the first of them if left out."""
    input: Annotated[
        list[Item],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_read_input, json_schema_input_type=str | list[Item]),
    ]
    """The conversation so far: a text of the user's, or items."""
    instructions: str | None = None
    """What the system says first."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    """Most tokens to generate; what is left of the context if left out."""
    temperature: float = 1.0
    """0 always takes the likeliest token; at most 2."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities sum to this."""
    stream: bool = False
    """Send the answer as server-sent events as it comes."""
    stream_options: StreamOptions | None = None
    """Nothing but what is refused; usage comes with the last event anyway."""
    tools: Annotated[
        list[Annotated[FunctionTool, BeforeValidator(_function_only)]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ] = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: Choice = "auto"
    """Whether it may, must (required, or a named one) or must not (none) call them."""
    parallel_tool_calls: bool = True
    """Whether it may call several at once; false ends the answer with the first call."""
    reasoning: ReasoningOptions | None = None
    """Whether it reasons."""
    text: TextOptions | None = None
    """What form the text has."""
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default_factory=list
    )
    """What is reported besides: logprobs of the text. Reasoning is plain text anyway."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Report each token's logprob, and so many of the likeliest tokens."""
    metadata: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
