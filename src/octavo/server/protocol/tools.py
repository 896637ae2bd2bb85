"""Tools in a chat request: what the model may call, must call, and has called."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _read_name(name: Any) -> Any:
    if isinstance(name, str) and not _NAME.fullmatch(name):
        raise wrong("must be 1 to 64 of the characters a-z, A-Z, 0-9, _, - and .")
    return name


FunctionName = Annotated[str, BeforeValidator(_read_name)]


def _function_only(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") != "function":
        raise wrong("must have type 'function': there are no other tools")
    return value


class Function(StrictModel):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    """What it does, for the model to read."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; none if left out."""
    strict: bool = False
    """Arguments follow the schema; they do so anyway where a call is required."""


class ChatTool(StrictModel):
    """A tool; all are functions."""

    type: Literal["function"]
    function: Function


class FunctionChoice(StrictModel):
    """Which function to call."""

    name: FunctionName


class NamedTool(StrictModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: FunctionChoice


class AllowedTools(StrictModel):
    """The only tools that may be called; all of them stay in the prompt."""

    mode: Literal["auto", "required"]
    """Whether one must be called."""
    tools: list[Annotated[NamedTool, BeforeValidator(_function_only)]] = Field(min_length=1)


class AllowedChoice(StrictModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_kind(choice: Any) -> str | None:
    if isinstance(choice, str):
        return "@mode"
    kind = choice.get("type") if isinstance(choice, dict) else None
    return f"@{kind}" if kind in ("function", "allowed_tools") else None


TOOL_CHOICE_KIND: Final = Discriminator(
    _choice_kind,
    custom_error_type="tool_choice",
    custom_error_message="must be 'none', 'auto', 'required' or an object of type 'function' or "
    "'allowed_tools'",
)

Tools = Annotated[
    list[Annotated[ChatTool, BeforeValidator(_function_only)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
ToolMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ToolMode, Tag("@mode")]
    | Annotated[NamedTool, Tag("@function")]
    | Annotated[AllowedChoice, Tag("@allowed_tools")],
    TOOL_CHOICE_KIND,
]


class CalledFunction(StrictModel):
    """What the model called, and how."""

    name: FunctionName
    arguments: str
    """A JSON object, as text."""


class ToolCall(StrictModel):
    """A call that the model made before."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None
    """As in streams; not looked at."""


ToolCalls = Annotated[
    list[Annotated[ToolCall, BeforeValidator(_function_only)]], Field(fail_fast=True)
]
