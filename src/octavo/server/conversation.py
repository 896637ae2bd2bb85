"""From a chat request's messages to the text of its prompt, and how to read its answer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from octavo.core.errors import InvalidRequestError
from octavo.server.ports import ChatTemplate
from octavo.server.protocol.chat import (
    AssistantMessage,
    ChatRequest,
    Content,
    Message,
    ToolMessage,
)
from octavo.server.protocol.tools import (
    AllowedChoice,
    ChatTool,
    NamedTool,
    ToolCall,
    ToolChoice,
)
from octavo.server.protocol.validation import nests_deeply
from octavo.server.tools.output import OutputFormat
from octavo.server.tools.reasoning import OPEN, uses_reasoning
from octavo.server.tools.styles import HERMES, ToolStyle, style_of, takes_tools
from octavo.server.tools.teaching import teach

OWN_FIELDS: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that have fields of their own in the body."""


@dataclass(frozen=True, slots=True)
class ChatNames:
    """What the API that a conversation came through calls its fields, for refusals."""

    messages: str = "messages"
    max_tokens: str = "max_completion_tokens"
    reasoning: str = "reasoning_effort"
    form: str = "response_format"
    demands_reasoning: bool = True
    """Whether a model that cannot reason refuses to; some clients ask every model for it."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as the model reads it, and how to read what it answers."""

    text: str
    output: OutputFormat
    tools: Sequence[ChatTool]
    """What the model may call; one alone, if it must be that one."""
    must_call: bool
    is_restricted: bool
    """Whether the prompt offers tools that may not be called."""


class Conversations:
    """Renders the conversations of one model. Has no state."""

    def __init__(self, template: ChatTemplate | None, style: ToolStyle | None = None) -> None:
        """Look at what the template knows.

        Args:
            template: the model's; None if it has none.
            style: how the model writes tool calls; None: as its template shows.
        """
        self._template = template
        text = "" if template is None else template.text
        self._knows_tools = takes_tools(text)
        self._style = style or (style_of(text) if self._knows_tools else HERMES)
        self._reasons = uses_reasoning(text)

    def render(self, request: ChatRequest, names: ChatNames) -> RenderedChat:
        """Render a request.

        Raises:
            InvalidRequestError: the model has no template, or the messages or options do not
                suit it.
        """
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template: use /v1/completions.", param=names.messages
            )
        tools = offered_tools(request)
        opens_turn = _opens_turn(request)
        messages = [_as_mapping(message) for message in request.messages]
        schemas: list[dict[str, Any]] | None = [_tool_schema(tool) for tool in tools] or None
        if not self._knows_tools:
            messages, schemas = teach(messages, schemas or ()), None
        text = self._template.render(
            messages,
            add_generation_prompt=opens_turn,
            tools=schemas,
            **self._variables(request, names),
        )
        if request.continue_final_message:
            text = _up_to(request.messages[-1], text)
        callable_tools = [tool for tool in tools if tool.function.name in _chosen(request, tools)]
        return RenderedChat(
            text,
            self._output(request, callable_tools, text),
            callable_tools,
            must_call=_must_call(request.tool_choice),
            is_restricted=len(callable_tools) < len(tools),
        )

    def _variables(self, request: ChatRequest, names: ChatNames) -> dict[str, Any]:
        """Return the template's variables: the client's own win."""
        effort = request.reasoning_effort
        needs = effort not in (None, "none") and names.demands_reasoning
        if effort is None or not (self._reasons or needs):
            return request.chat_template_kwargs
        if not self._reasons:
            raise InvalidRequestError(
                f"{names.reasoning} is not supported: this model does not reason between marks.",
                param=names.reasoning,
            )
        asked = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        return asked | request.chat_template_kwargs

    def _output(self, request: ChatRequest, tools: Sequence[ChatTool], text: str) -> OutputFormat:
        return OutputFormat(
            calls=self._style if tools else None,
            tool_names=frozenset(tool.function.name for tool in tools),
            single_call=not request.parallel_tool_calls
            or isinstance(request.tool_choice, NamedTool),
            reasoning=self._reasons,
            in_reasoning=self._reasons and text.rstrip().endswith(OPEN),
        )


def offered_tools(request: ChatRequest) -> Sequence[ChatTool]:
    """Return the tools that the model is told of.

    Raises:
        InvalidRequestError: the choice does not suit the tools.
    """
    choice, names = request.tool_choice, [tool.function.name for tool in request.tools]
    if choice is not None and choice not in ("none", "auto") and not names:
        raise InvalidRequestError("tool_choice needs tools to choose from.", param="tool_choice")
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequestError(f"tools has two functions named {twice!r}.", param="tools")
    if choice == "none":
        return ()
    if unknown := _chosen(request, request.tools) - set(names):
        raise InvalidRequestError(
            f"tool_choice names {min(unknown)!r}, which is not among tools.", param="tool_choice"
        )
    return request.tools


def _chosen(request: ChatRequest, tools: Sequence[ChatTool]) -> set[str]:
    """Return the names of what may be called: all tools, unless the choice names some."""
    match request.tool_choice:
        case NamedTool(function=function):
            return {function.name}
        case AllowedChoice(allowed_tools=allowed):
            return {tool.function.name for tool in allowed.tools}
    return {tool.function.name for tool in tools}


def _must_call(choice: ToolChoice | None) -> bool:
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _opens_turn(request: ChatRequest) -> bool:
    """Check the options of the template, and return whether it opens the assistant's turn."""
    if taken := OWN_FIELDS & request.chat_template_kwargs.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs must not hold {min(taken)}.", param="chat_template_kwargs"
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    return not request.continue_final_message and request.add_generation_prompt is not False


def _tool_schema(tool: ChatTool) -> dict[str, Any]:
    """Return a tool as chat templates know it."""
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _as_mapping(message: Message) -> dict[str, Any]:
    """Return a message as chat templates know it; they call a developer ``system``."""
    role = "system" if message.role == "developer" else message.role
    content = "" if message.content is None else _plain(message.content)
    fields: dict[str, Any] = {"role": role, "content": content}
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        fields["name"] = message.name
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            fields["tool_calls"] = [_as_call(call) for call in message.tool_calls]
        if message.reasoning_content is not None:
            fields["reasoning_content"] = message.reasoning_content
    return fields


def _as_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as chat templates know it: its arguments are an object, where they are one."""
    arguments: Any = call.function.arguments
    try:
        read = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        read = None  # the model wrote no JSON: it reads what it wrote
    if isinstance(read, dict) and not nests_deeply(read):
        arguments = read
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _plain(content: Content) -> str | list[dict[str, str]]:
    """Return content as plain values; the template joins parts where it takes only text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _up_to(last: Message, text: str) -> str:
    """Cut a rendered conversation after its last message's content, so that it goes on there."""
    said = last.content or ""
    content = (said if isinstance(said, str) else said[-1].text).strip()
    end = text.rfind(content)
    if last.role != "assistant" or not content or end < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant, with text that the "
            "chat template keeps.",
            param="continue_final_message",
        )
    return text[: end + len(content)]
