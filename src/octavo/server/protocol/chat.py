"""The body of ``POST /v1/chat/completions``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from octavo.server.protocol.common import (
    LATER,
    NO_MEANING,
    TEXT_ONLY,
    UNSUPPORTED,
    GenerationRequest,
)
from octavo.server.protocol.tools import ToolCalls, ToolChoice, Tools
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class TextPart(StrictModel):
    """A piece of text in a message."""

    type: Literal["text"]
    text: str


def _text_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") != "text":
        raise wrong("must have type 'text': the model reads text only")
    return part


def _content_kind(content: Any) -> str | None:
    if isinstance(content, str):
        return "@string"
    return "@parts" if isinstance(content, list) else None


Part = Annotated[TextPart, BeforeValidator(_text_part)]
Content = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[list[Part], Field(min_length=1, fail_fast=True), Tag("@parts")],
    Discriminator(
        _content_kind,
        custom_error_type="content",
        custom_error_message="must be a string or an array of text parts",
    ),
]


class _Message(StrictModel):
    content: Content
    """Text; parts of an array are joined by line breaks, unless the template takes them apart."""


class SystemMessage(_Message):
    """Instructions; ``developer`` is the newer name of the same role."""

    role: Literal["system", "developer"]
    name: str | None = None


class UserMessage(_Message):
    """What the user says."""

    role: Literal["user"]
    name: str | None = None


class AssistantMessage(StrictModel):
    """What the model said before."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "function_call": Unsupported("use tool_calls"),
        "audio": Unsupported(TEXT_ONLY),
        "annotations": Unsupported(NO_MEANING),
        "refusal": Unsupported("send a refusal as content", neutral=("",)),
    }

    role: Literal["assistant"]
    content: Content | None = None
    """Text; may be left out where there are tool calls."""
    name: str | None = None
    reasoning_content: str | None = None
    """What it wrote to itself, for templates that keep it."""
    tool_calls: ToolCalls = Field(default_factory=list)
    """The tools it called; their results follow as messages of role tool."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise wrong("needs content or tool_calls")
        return self


class ToolMessage(_Message):
    """What a tool returned."""

    role: Literal["tool"]
    tool_call_id: str


def _role(message: Any) -> str | None:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        return None
    return "@system" if role == "developer" else f"@{role}"


Message = Annotated[
    Annotated[SystemMessage, Tag("@system")]
    | Annotated[UserMessage, Tag("@user")]
    | Annotated[AssistantMessage, Tag("@assistant")]
    | Annotated[ToolMessage, Tag("@tool")],
    Discriminator(
        _role,
        custom_error_type="role",
        custom_error_message=f"must be an object whose role is one of {', '.join(_ROLES)}",
    ),
]


class ChatRequest(GenerationRequest):
    """A conversation to continue, and how."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED,
        "functions": Unsupported("use tools"),
        "function_call": Unsupported("use tool_choice", neutral=("none", "auto")),
        "modalities": Unsupported(TEXT_ONLY, neutral=(["text"],)),
        "audio": Unsupported(TEXT_ONLY),
        "prediction": Unsupported(LATER),
        "web_search_options": Unsupported(NO_MEANING),
        "moderation": Unsupported(NO_MEANING),
        "verbosity": Unsupported(NO_MEANING, neutral=("medium",)),
        "store": Unsupported("no completion is kept", neutral=(False,)),
        "prompt_cache_retention": Unsupported(LATER),
        "prompt_cache_options": Unsupported(LATER),
        "documents": Unsupported(LATER),
        "chat_template": Unsupported("only the model's own template is used"),
        "echo": Unsupported("only completions echo", neutral=(False,)),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    """The conversation so far."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Most tokens to generate; what is left of the context if left out."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Older name of ``max_completion_tokens``."""
    logprobs: bool = False
    """Report each output token's logprob."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """With ``logprobs``: report so many of the likeliest tokens too."""
    tools: Tools = Field(default_factory=list)
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether it may (auto, the default), must (required, or a named one) or must not (none) call
    them, and which of them (allowed_tools)."""
    parallel_tool_calls: bool = True
    """Whether it may call several at once; false ends the answer with the first call."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """none switches reasoning off, where the chat template can; the rest leave it on."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's turn; true unless a message is continued."""
    continue_final_message: bool = False
    """Go on with the last message, which must be the assistant's, instead of a new one."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds what begins a text, such as a BOS; templates do so themselves."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the chat template."""
