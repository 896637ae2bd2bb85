"""What the input of ``POST /v1/responses`` is made of."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from octavo.server.protocol.common import LATER, NO_MEANING
from octavo.server.protocol.tools import FunctionName
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

_TEXT_TYPES: Final = ("input_text", "output_text", "text")
_IDS: Final = "accepted; ids inform nobody, as nothing is stored"


class InputText(StrictModel):
    """A piece of text; of whichever type, it is the message's role that counts."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "annotations": Unsupported(NO_MEANING),
        "logprobs": Unsupported(NO_MEANING),
        "prompt_cache_breakpoint": Unsupported("equal prefixes are always cached"),
    }

    type: Literal["input_text", "output_text", "text"]
    text: str


def _text_only(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in _TEXT_TYPES:
        raise wrong("must be text: the model reads text only")
    return part


def _content_kind(content: Any) -> str | None:
    if isinstance(content, str):
        return "@string"
    return "@parts" if isinstance(content, list) else None


InputContent = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[
        list[Annotated[InputText, BeforeValidator(_text_only)]],
        Field(min_length=1, fail_fast=True),
        Tag("@parts"),
    ],
    Discriminator(
        _content_kind,
        custom_error_type="content",
        custom_error_message="must be a string or an array of text parts",
    ),
]
Status = Literal["in_progress", "completed", "incomplete"]


class MessageItem(StrictModel):
    """A message of the conversation."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {"phase": Unsupported(LATER)}
    differences: ClassVar[Mapping[str, str]] = {"id": _IDS, "status": "accepted, not looked at"}

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent
    id: str | None = None
    status: Status | None = None


class CallItem(StrictModel):
    """A call that the model made."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "caller": Unsupported(NO_MEANING),
        "namespace": Unsupported(LATER),
    }
    differences: ClassVar[Mapping[str, str]] = MessageItem.differences

    type: Literal["function_call"]
    call_id: str
    name: FunctionName
    arguments: str
    """A JSON object, as text."""
    id: str | None = None
    status: Status | None = None


class ResultItem(StrictModel):
    """What a function returned."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **CallItem.unsupported,
        "name": Unsupported(NO_MEANING),
    }
    differences: ClassVar[Mapping[str, str]] = MessageItem.differences

    type: Literal["function_call_output"]
    call_id: str
    output: InputContent
    id: str | None = None
    status: Status | None = None


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(StrictModel):
    """What the model wrote to itself."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "encrypted_content": Unsupported("reasoning is plain text"),
        "summary": Unsupported("reasoning is not summarized"),
    }
    differences: ClassVar[Mapping[str, str]] = MessageItem.differences

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)
    id: str | None = None
    status: Status | None = None


_TYPES: Final = ("message", "function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str | None:
    if not isinstance(item, dict):
        return None
    kind = item.get("type", "message")
    return f"@{kind}" if kind in _TYPES else None


Item = Annotated[
    Annotated[MessageItem, Tag("@message")]
    | Annotated[CallItem, Tag("@function_call")]
    | Annotated[ResultItem, Tag("@function_call_output")]
    | Annotated[ReasoningItem, Tag("@reasoning")],
    Discriminator(
        _kind,
        custom_error_type="item",
        custom_error_message=f"must be an object whose type is one of {', '.join(_TYPES)}",
    ),
]
