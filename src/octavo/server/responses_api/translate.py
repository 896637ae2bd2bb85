"""From bodies of the Responses API to the conversations that the chat template knows."""

from collections.abc import Iterable
from typing import Any, Final

from octavo.core.errors import InvalidRequestError
from octavo.server.conversation import ChatNames
from octavo.server.job import Job
from octavo.server.protocol.chat import ChatRequest
from octavo.server.protocol.validation import validate
from octavo.server.responses_api.items import (
    CallItem,
    InputContent,
    Item,
    MessageItem,
    ReasoningItem,
    ResultItem,
)
from octavo.server.responses_api.protocol import (
    AllowedFunctions,
    NamedFunction,
    NamedSchema,
    ResponsesRequest,
)
from octavo.server.translate import Translator

NAMES: Final = ChatNames(
    messages="input",
    max_tokens="max_output_tokens",
    reasoning="reasoning.effort",
    form="text.format",
)


class ResponsesTranslator:
    """Translates bodies for one model. Has no state; safe to use from several threads."""

    def __init__(self, translator: Translator) -> None:
        self._translator = translator

    def response(self, body: bytes) -> Job[ResponsesRequest]:
        """Translate the body of ``POST /v1/responses``.

        Raises:
            RequestError: it is malformed, or asks for what cannot be done.
        """
        request = ResponsesRequest.parse(body)
        if request.stream_options is not None and not request.stream:
            raise InvalidRequestError("stream_options needs stream: true.", param="stream_options")
        job = self._translator.conversation(_chat(request), NAMES)
        return Job(request, job.model, job.prompts, stream=request.stream, output=job.output)


def _chat(request: ResponsesRequest) -> ChatRequest:
    messages = _messages(request.input)
    if request.instructions is not None:
        messages.insert(0, {"role": "system", "content": request.instructions})
    choice: Any = request.tool_choice
    if isinstance(choice, NamedFunction):
        choice = _named(choice)
    elif isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": list(map(_named, choice.tools))}
        choice = {"type": "allowed_tools", "allowed_tools": allowed}
    return validate(
        ChatRequest,
        {
            "model": request.model,
            "messages": messages,
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stream": request.stream,
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.parameters,
                        "strict": tool.strict,
                    },
                }
                for tool in request.tools
            ],
            "tool_choice": choice,
            "logprobs": request.wants_logprobs,
            "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
            "response_format": _response_format(request),
            "parallel_tool_calls": request.parallel_tool_calls,
            "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        },
    )


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    """Return the text's format in chat's words."""
    form = None if request.text is None else request.text.format
    if form is None:
        return None
    if not isinstance(form, NamedSchema):
        return form.model_dump()
    return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def _messages(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return chat's messages: what the model did in one turn becomes one of them."""
    messages: list[dict[str, Any]] = []
    for item in items:
        turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
        match item:
            case MessageItem(role="assistant"):
                if turn is None or turn["content"] or turn["tool_calls"]:
                    messages.append(turn := _turn())
                turn["content"] = _parts(item.content)
            case CallItem():
                if turn is None:
                    messages.append(turn := _turn())
                function = {"name": item.name, "arguments": item.arguments}
                turn["tool_calls"].append(
                    {"id": item.call_id, "type": "function", "function": function}
                )
            case ReasoningItem():
                thought = "".join(part.text for part in item.content)
                messages.append(_turn(thought))
            case ResultItem():
                result = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**result, "content": _parts(item.output)})
            case MessageItem():
                messages.append({"role": item.role, "content": _parts(item.content)})
    return messages


def _turn(thought: str = "") -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "reasoning_content": thought or None,
        "tool_calls": [],
    }


def _parts(content: InputContent) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]
