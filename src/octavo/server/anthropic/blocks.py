"""What messages of Anthropic's API are made of."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from octavo.server.protocol.common import NO_MEANING
from octavo.server.protocol.tools import FunctionName
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

_CACHE_CONTROL: Final = "equal prefixes are always cached; nothing needs to be marked"


class _Block(StrictModel):
    differences: ClassVar[Mapping[str, str]] = {"cache_control": _CACHE_CONTROL}

    cache_control: dict[str, Any] | None = None


class TextBlock(_Block):
    """A piece of text."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {"citations": Unsupported(NO_MEANING)}

    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """What the model wrote to itself."""

    differences: ClassVar[Mapping[str, str]] = {
        **_Block.differences,
        "signature": "empty in answers and not checked in histories",
    }

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call that the model made."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "caller": Unsupported("the server calls no tools itself", neutral=({"type": "direct"},)),
    }

    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]
    """Its arguments."""


def _by_type(kinds: tuple[str, ...]) -> BeforeValidator:
    """Refuse blocks of other types before looking into them."""

    def read(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in kinds:
            raise wrong(
                f"must be an object of type {' or '.join(kinds)}: the model reads text only"
            )
        return block

    return BeforeValidator(read)


def _type(block: Any) -> str:
    return f"@{block['type']}" if isinstance(block, dict) else f"@{block.type}"


def _content_kind(content: Any) -> str | None:
    if isinstance(content, str):
        return "@string"
    return "@blocks" if isinstance(content, list) else None


_CONTENT: Final = Discriminator(
    _content_kind,
    custom_error_type="content",
    custom_error_message="must be a string or an array of blocks",
)

TextOnly = Annotated[TextBlock, _by_type(("text",))]
SystemContent = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[list[TextOnly], Field(fail_fast=True), Tag("@blocks")],
    _CONTENT,
]


class ToolResultBlock(_Block):
    """What a tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: SystemContent | None = None
    """Text."""
    is_error: bool = False
    """Whether the tool failed; the model is told so."""


_UserBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("@text")] | Annotated[ToolResultBlock, Tag("@tool_result")],
        Discriminator(_type),
    ],
    _by_type(("text", "tool_result")),
]
_AssistantBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("@text")]
        | Annotated[ToolUseBlock, Tag("@tool_use")]
        | Annotated[ThinkingBlock, Tag("@thinking")],
        Discriminator(_type),
    ],
    _by_type(("text", "tool_use", "thinking")),
]
UserContent = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[list[_UserBlock], Field(min_length=1, fail_fast=True), Tag("@blocks")],
    _CONTENT,
]
AssistantContent = Annotated[
    Annotated[str, Tag("@string")]
    | Annotated[list[_AssistantBlock], Field(min_length=1, fail_fast=True), Tag("@blocks")],
    _CONTENT,
]
