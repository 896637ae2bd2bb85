"""What an answer must look like so that it is calls of tools, with arguments of their schemas."""

from collections.abc import Sequence
from typing import Any, Final

import orjson

from octavo.core.errors import InvalidRequestError
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

    Raises:
        InvalidRequestError: a tool's schema is not one of objects.
    """
    opening: str | TokenId = "" if style.bare else mark
    return StructuredOutput.tool_calls(
        {
            "open": opening,
            "prefix": style.begin,
            **_calls(style, [(tool, _schema(tool.function)) for tool in tools], single=single),
        }
    )


def free_calls(
    style: ToolStyle,
    tools: Sequence[ChatTool],
    *,
    single: bool,
    mark: str | TokenId,
    thought: tuple[TokenId, ...] = (),
) -> StructuredOutput:
    """Return the shape of an answer that may say anything, and may call ``tools`` and no others.

    Arguments of strict tools follow their schemas. Calls end the answer, but for Hermes' style,
    where each has marks of its own.

    Args:
        style, tools, single, mark: as for ``forced_calls``.
        thought: the marks of reasoning, where they are control tokens; the last one alone, where
            the prompt ends inside.

    Raises:
        InvalidRequestError: a strict tool's schema is not one of objects.
    """
    schemas = [
        (tool, _schema(tool.function) if tool.function.strict else ANY_ARGUMENTS) for tool in tools
    ]
    if style is HERMES and isinstance(mark, str) and not thought:
        begin, end = mark + style.begin, "}" + style.end
        structures = [
            {"begin": begin + _head(style, tool.function), "schema": schema, "end": end}
            for tool, schema in schemas
        ]
        return StructuredOutput.structural_tag(
            {"structures": structures, "triggers": [mark]}, param="tools"
        )
    return StructuredOutput.tool_calls(
        {
            "open": mark,
            "prefix": style.begin,
            "text": "not an object" if style.bare else "any",
            **({"thought": thought} if thought else {}),
            **_calls(style, schemas, single=single),
        }
    )


def _calls(
    style: ToolStyle, schemas: Sequence[tuple[ChatTool, dict[str, Any]]], *, single: bool
) -> dict[str, Any]:
    return {
        "choices": [
            {"begin": _head(style, tool.function), "schema": schema, "end": "}"}
            for tool, schema in schemas
        ],
        "separator": style.between,
        "close": style.end,
        "max_calls": 1 if single or not style.between else MAX_CALLS,
    }


def _head(style: ToolStyle, function: Function) -> str:
    """Return a call up to its arguments."""
    return f'{{"name": {orjson.dumps(function.name).decode()}, "{style.arguments_key}": '


def _schema(function: Function) -> dict[str, Any]:
    """Return the schema of a function's arguments, which allows objects alone.

    Raises:
        InvalidRequestError: the function's own names another type.
    """
    if function.parameters is None:
        return NO_ARGUMENTS
    kind = function.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"tools has the function {function.name!r}, whose arguments must be an object: its "
            "schema must have the type 'object'.",
            param="tools",
        )
    return {**function.parameters, "type": "object"}
