"""From a chat request's messages to the text of its prompt."""

from typing import Final

from octavo.core.errors import InvalidRequestError
from octavo.server.ports import ChatTemplate
from octavo.server.protocol.chat import ChatRequest, Content, Message, ToolMessage

OWN_FIELDS: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that have fields of their own in the body."""


def render(template: ChatTemplate | None, request: ChatRequest) -> str:
    """Return the prompt's text.

    Raises:
        InvalidRequestError: the model has no template, or the messages or options do not suit it.
    """
    if template is None:
        raise InvalidRequestError(
            "This model has no chat template: use /v1/completions.", param="messages"
        )
    variables = request.chat_template_kwargs
    if taken := OWN_FIELDS & variables.keys():
        raise InvalidRequestError(
            f"chat_template_kwargs must not hold {min(taken)}.", param="chat_template_kwargs"
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise InvalidRequestError(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    opens_turn = not request.continue_final_message and request.add_generation_prompt is not False
    messages = [_as_mapping(message) for message in request.messages]
    text = template.render(messages, add_generation_prompt=opens_turn, **variables)
    return _up_to(request.messages[-1], text) if request.continue_final_message else text


def _as_mapping(message: Message) -> dict[str, object]:
    """Return a message as chat templates know it; they call a developer ``system``."""
    role = "system" if message.role == "developer" else message.role
    fields: dict[str, object] = {"role": role, "content": _plain(message.content)}
    if isinstance(message, ToolMessage):
        fields["tool_call_id"] = message.tool_call_id
    elif message.name is not None:
        fields["name"] = message.name
    return fields


def _plain(content: Content) -> str | list[dict[str, str]]:
    """Return content as plain values; the template joins parts where it takes only text."""
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _up_to(last: Message, text: str) -> str:
    """Cut a rendered conversation after its last message's content, so that it goes on there."""
    content = last.content if isinstance(last.content, str) else last.content[-1].text
    content = content.strip()
    end = text.rfind(content)
    if last.role != "assistant" or not content or end < 0:
        raise InvalidRequestError(
            "continue_final_message needs a last message of the assistant, with text that the "
            "chat template keeps.",
            param="continue_final_message",
        )
    return text[: end + len(content)]
