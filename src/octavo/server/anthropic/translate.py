"""From Anthropic's bodies to the conversations that the chat template knows."""

from collections.abc import Iterator
from typing import Any, Final

import orjson

from octavo.core.errors import InvalidRequestError
from octavo.server.anthropic.blocks import (
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from octavo.server.anthropic.protocol import (
    AssistantTurn,
    CountRequest,
    MessagesRequest,
    Prompt,
    ToolChoice,
    Turn,
    UserTurn,
)
from octavo.server.conversation import ChatNames
from octavo.server.job import Job
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.validation import validate
from octavo.server.translate import Translator

NAMES: Final = ChatNames(
    max_tokens="max_tokens",
    reasoning="thinking",
    form="output_config.format",
    demands_reasoning=False,
)
_EFFORTS: Final = {"disabled": "none", "enabled": "medium", "adaptive": "medium"}
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


class MessagesTranslator:
    """Translates bodies for one model. Has no state; safe to use from several threads."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def messages(self, body: bytes) -> Job[ChatRequest]:
        """Translate the body of ``POST /v1/messages``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = MessagesRequest.parse(body)
        fields: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "stop": request.stop_sequences,
            "stream": request.stream,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
        return self._translator.conversation(self._chat(request, fields), NAMES)

    def count(self, body: bytes) -> int:
        """Return how many tokens the prompt of a body of ``POST .../count_tokens`` has.

        Raises:
            RequestError: it is malformed, or names another model.
        """
        chat = self._chat(CountRequest.parse(body), {})
        self._translator.prompts.served_name(chat.model)
        return len(self._translator.prompt_of(chat, NAMES)[1])

    def _chat(self, request: Prompt, fields: dict[str, Any]) -> ChatRequest:
        messages = [message for turn in request.messages for message in _from_turn(turn)]
        if request.system:
            messages.insert(0, {"role": "system", "content": _text(request.system)})
        fields |= {
            "model": request.model,
            "messages": messages,
            # An answer that was begun goes on, as in Anthropic's API.
            "continue_final_message": _is_begun(request.messages[-1]),
            "reasoning_effort": _EFFORTS[request.thinking.type] if request.thinking else None,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                        "strict": tool.strict,
                    },
                }
                for tool in request.tools
            ],
        }
        form = None if request.output_config is None else request.output_config.format
        if form is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        choice = request.tool_choice
        if choice is not None:
            fields["tool_choice"] = _choice(choice)
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return validate(ChatRequest, fields)


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if (choice.name is not None) != (choice.type == "tool"):
        raise InvalidRequestError(
            "tool_choice.name goes with tool_choice.type 'tool', and only with it.",
            param="tool_choice.name",
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _is_begun(turn: Turn) -> bool:
    """Whether a turn is text of the assistant's, which the answer goes on with."""
    if not isinstance(turn, AssistantTurn):
        return False
    last = turn.content if isinstance(turn.content, str) else turn.content[-1]
    if isinstance(last, TextBlock):
        last = last.text
    if isinstance(last, str) and not last.strip():
        raise InvalidRequestError(
            "messages must not end with an empty message of the assistant.", param="messages"
        )
    return isinstance(last, str)


def _from_turn(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield the messages that a turn is: results of tools are messages of their own."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif isinstance(turn, AssistantTurn):
        yield _from_assistant(turn)
    elif isinstance(turn, UserTurn):
        yield from _from_user(turn)
    else:
        yield {"role": "system", "content": _text(turn.content)}


def _from_user(turn: UserTurn) -> Iterator[dict[str, Any]]:
    said: list[dict[str, str]] = []
    for block in turn.content:
        match block:
            case ToolResultBlock():
                if said:
                    yield {"role": "user", "content": said}
                    said = []
                result = _text(block.content or "")
                content = f"Error: {result}" if block.is_error else result
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case TextBlock(text=text):
                said.append({"type": "text", "text": text})
    if said:
        yield {"role": "user", "content": said}


def _from_assistant(turn: AssistantTurn) -> dict[str, Any]:
    blocks = [block for block in turn.content if not isinstance(block, str)]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": orjson.dumps(block.input).decode()},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return {
        "role": "assistant",
        "content": "\n".join(texts) if texts or not calls else None,
        "reasoning_content": "\n".join(thoughts) if thoughts else None,
        "tool_calls": calls,
    }


def _text(content: str | list[TextBlock]) -> str:
    """Return text as one; blocks are separated by line breaks, as parts are in chat."""
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
