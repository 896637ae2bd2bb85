"""The bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag

from octavo.server.anthropic.blocks import AssistantContent, SystemContent, UserContent
from octavo.server.protocol.common import LATER, NO_MEANING
from octavo.server.protocol.structured import Schema
from octavo.server.protocol.tools import MAX_TOOLS, FunctionName
from octavo.server.protocol.validation import StrictModel, Unsupported

_CACHING: Final = "equal prefixes are always cached; nothing needs to be marked"


class UserTurn(StrictModel):
    """What the user says, and what tools returned."""

    role: Literal["user"]
    content: UserContent


class AssistantTurn(StrictModel):
    """What the model said and called before; the last message may be one, which goes on."""

    role: Literal["assistant"]
    content: AssistantContent


class SystemTurn(StrictModel):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: SystemContent


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else None
    return f"@{role}" if isinstance(role, str) else None


Turn = Annotated[
    Annotated[UserTurn, Tag("@user")]
    | Annotated[AssistantTurn, Tag("@assistant")]
    | Annotated[SystemTurn, Tag("@system")],
    Discriminator(
        _role,
        custom_error_type="role",
        custom_error_message="must be an object whose role is user, assistant or system",
    ),
]


class Tool(StrictModel):
    """A function that the model may call."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "defer_loading": Unsupported(LATER, neutral=(False,)),
        "allowed_callers": Unsupported(LATER, neutral=(["direct"],)),
        "input_examples": Unsupported(LATER),
        "eager_input_streaming": Unsupported(NO_MEANING, neutral=(True, False)),
    }
    differences: ClassVar[Mapping[str, str]] = {"cache_control": _CACHING}

    type: Literal["custom"] = "custom"
    """The server has no tools of its own."""
    name: FunctionName
    description: str | None = None
    """What it does, for the model to read."""
    input_schema: dict[str, Any]
    """JSON schema of its input, an object."""
    strict: bool = False
    """Input follows the schema; it does so anyway where a call is required."""
    cache_control: dict[str, Any] | None = None


class ToolChoice(StrictModel):
    """Whether the model may (auto), must (any, or one tool) or must not (none) call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    """The tool that must be called; only with type ``tool``."""
    disable_parallel_tool_use: bool = False
    """Whether the answer ends with its first call."""


class Thinking(StrictModel):
    """Whether the model reasons before it answers."""

    differences: ClassVar[Mapping[str, str]] = {
        "budget_tokens": "not a bound: only max_tokens ends reasoning",
        "display": "accepted; reasoning is always shown as it is",
    }

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(StrictModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")
    """The schema; what cannot be enforced is refused."""


class OutputConfig(StrictModel):
    """What form the answer has."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "task_budget": Unsupported(LATER),
    }

    differences: ClassVar[Mapping[str, str]] = {
        "effort": "accepted; it changes nothing, as models have one effort",
    }

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    """JSON of a schema; free text if left out."""


class Metadata(StrictModel):
    """Who asks."""

    user_id: str | None = None


class Prompt(StrictModel):
    """What both bodies hold."""

    model: str
    """One of the served names."""
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    """The conversation so far."""
    system: SystemContent | None = None
    """Instructions."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(
        default_factory=list
    )
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it may, must or must not call them."""
    thinking: Thinking | None = None
    """Whether the model reasons."""
    output_config: OutputConfig | None = None
    """What form the answer has."""
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


_DIFFERENCES: Final[Mapping[str, str]] = {
    "cache_control": _CACHING,
    "thinking": "heeded where the chat template knows ``<think>``; other models do not reason",
    "context_management": "accepted; nothing is edited out of the conversation that is sent",
}
_UNSUPPORTED: Final[Mapping[str, Unsupported]] = {
    "container": Unsupported(NO_MEANING),
    "mcp_servers": Unsupported("the server calls no tools itself"),
    "output_format": Unsupported("use output_config.format"),
    "speed": Unsupported("there is one speed", neutral=("standard",)),
    "inference_geo": Unsupported(NO_MEANING),
    "diagnostics": Unsupported(NO_MEANING),
    "user_profile_id": Unsupported(NO_MEANING),
    "workspace_id": Unsupported(NO_MEANING),
}


class CountRequest(Prompt):
    """A conversation whose tokens are counted."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = _UNSUPPORTED
    differences: ClassVar[Mapping[str, str]] = _DIFFERENCES


class MessagesRequest(Prompt):
    """A conversation to continue, and how."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **_UNSUPPORTED,
        "service_tier": Unsupported("there is one tier", neutral=("auto", "standard_only")),
    }
    differences: ClassVar[Mapping[str, str]] = {
        **_DIFFERENCES,
        "metadata": "accepted; it changes nothing",
    }

    max_tokens: int = Field(ge=1)
    """Most tokens to generate."""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, max_length=16
    )
    """Up to 16 strings that end the output and are not part of it."""
    stream: bool = False
    """Send the answer as server-sent events as it comes."""
    temperature: float = Field(default=1.0, ge=0.0, le=1.0)
    """0 always takes the likeliest token."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities sum to this."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    metadata: Metadata | None = None
