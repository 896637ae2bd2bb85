"""What an answer must look like so that it is calls of tools, with arguments of their schemas."""

from collections.abc import Sequence
from typing import Any, Final

import orjson

from octavo.core.ids import TokenId
from octavo.core.structured import StructuredOutput
from octavo.server.protocol.tools import ChatTool, Function
from octavo.server.tools.styles import HERMES, ToolStyle

MAX_CALLS: Final = 16
"""Most calls in an answer that must call: a weak model would go on until it is cut."""
NO_ARGUMENTS: Final = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_ARGUMENTS: Final = {"type": "object"}


def forced_calls(
    style: ToolStyle, tools: Sequence[ChatTool], *, single: bool, mark: str | TokenId
) -> StructuredOutput:
    """Return the shape of an answer that calls some of ``tools`` and says nothing else.

    Args:
        style: how calls are written.
        tools: what may be called.
        single: whether there is only one call.
        mark: the style's mark, as a text or as a control token.
    """
    opening: str | TokenId = "" if style.bare else mark
    begin = style.begin
    if isinstance(opening, str):
        opening, begin = opening + begin, ""
    return StructuredOutput.tool_calls(
        {
            "open": opening,
            "choices": [
                {"begin": _head(style, tool.function), "schema": _schema(tool.function), "end": "}"}
                for tool in tools
            ],
            "prefix": begin,
            "separator": style.between,
            "close": style.end,
            "max_calls": 1 if single or not style.between else MAX_CALLS,
        }
    )


def strict_calls(style: ToolStyle, tools: Sequence[ChatTool]) -> StructuredOutput | None:
    """Return the shape of an answer whose calls, if any, have arguments of their schemas.

    None where no tool is strict, or where nothing but text announces a call.
    """
    if style is not HERMES or not any(tool.function.strict for tool in tools):
        return None
    begin = style.mark + style.begin
    structures = [
        {
            "begin": begin + _head(style, tool.function),
            "schema": _schema(tool.function) if tool.function.strict else ANY_ARGUMENTS,
            "end": "}" + style.end,
        }
        for tool in tools
    ]
    return StructuredOutput.structural_tag(
        {"structures": structures, "triggers": [style.mark]}, param="tools"
    )


def _head(style: ToolStyle, function: Function) -> str:
    """Return a call up to its arguments."""
    return f'{{"name": {orjson.dumps(function.name).decode()}, "{style.arguments_key}": '


def _schema(function: Function) -> dict[str, Any]:
    return NO_ARGUMENTS if function.parameters is None else function.parameters
