"""Chat templates: a conversation becomes the text that the model was trained on."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Final

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.environment import Template
from jinja2.exceptions import SecurityError

from octavo.core.errors import GenerationError, InvalidRequestError, LoadError
from octavo.models.chat_template_sandbox import MAX_TEXT, TemplateSandbox, budget_variables

_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
_PROBE: Final = "octavo probes content"
_RESERVED: Final = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A model's chat templates, compiled. Immutable, safe to use from several threads."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile.

        Args:
            templates: name to Jinja text, at least one. ``default`` is used unless there are
                tools and a ``tool_use``; a template alone is the default whatever its name.
            special_tokens: variables such as ``bos_token`` to their text.
            now: tells templates the date (``strftime_now``).

        Raises:
            LoadError: a template has a syntax error or wants other files.
        """
        if not templates:
            raise LoadError("A chat template needs a text.")
        sandbox = TemplateSandbox(now)
        self._templates = {name: _compile(sandbox, name, text) for name, text in templates.items()}
        self._special_tokens = dict(special_tokens)
        self.text = "\n".join(templates.values())
        """All that the templates say, to see what they know of (tools, reasoning)."""

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        **variables: object,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: at least one, of plain JSON values. Keys that are None are left out. Content
                may be a text or a list of text parts, joined by line breaks where the template
                takes only texts; a text becomes a list of one part where it takes only lists.
            add_generation_prompt: whether the text ends where the assistant's turn begins.
            tools: schemas of the functions that the model may call.
            variables: further variables of the template (``enable_thinking``).

        Raises:
            InvalidRequestError: the template cannot render these messages.
            GenerationError: the template tried what the sandbox forbids.
        """
        if reserved := _RESERVED & variables.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {min(reserved)}.", param="chat_template_kwargs"
            )
        if not messages:
            raise InvalidRequestError("messages must have at least one message.", param="messages")
        return self._render(
            self._choose(tools),
            {
                "messages": [self._prepared(message) for message in messages],
                "tools": _plain(tools),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **{name: _plain(value) for name, value in variables.items()},
            },
        )

    def _choose(self, tools: Sequence[Mapping[str, object]] | None) -> Template:
        if tools and _TOOL_USE in self._templates:
            return self._templates[_TOOL_USE]
        return self._default

    @property
    def _default(self) -> Template:
        if _DEFAULT in self._templates:
            return self._templates[_DEFAULT]
        return next(iter(self._templates.values()))

    def _render(self, template: Template, variables: Mapping[str, object]) -> str:
        """Render; turn whatever goes wrong into one sentence."""
        pieces: list[str] = []
        length = 0
        everything = {**self._special_tokens, **variables, **budget_variables()}
        try:
            for piece in template.generate(everything):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_TEXT:
                    raise TemplateError(f"it builds a text longer than {MAX_TEXT:,}")
        except SecurityError as error:
            raise GenerationError(
                f"The model's chat template tried something that is not allowed: {_short(error)}."
            ) from error
        except Exception as error:  # templates compute on the messages, so anything can happen
            raise InvalidRequestError(
                f"The model's chat template cannot render these messages: {_short(error)}.",
                param="messages",
            ) from error
        return "".join(pieces)

    def _prepared(self, message: Mapping[str, object]) -> dict[str, object]:
        """Return a message of plain values whose content the template can take."""
        if not isinstance(message, Mapping):
            raise InvalidRequestError(
                "Each message must be an object with role and content.", param="messages"
            )
        plain = {str(key): _plain(value) for key, value in message.items() if value is not None}
        content = plain.get("content")
        takes_text, takes_parts = self._content_forms
        if isinstance(content, list):
            texts = [_part_text(part) for part in content]
            if takes_parts:
                plain["content"] = [{"type": "text", "text": text} for text in texts]
            else:
                plain["content"] = "\n".join(texts)
        elif isinstance(content, str) and takes_parts and not takes_text:
            plain["content"] = [{"type": "text", "text": content}]
        return plain

    @cached_property
    def _content_forms(self) -> tuple[bool, bool]:
        """Whether the template renders content that is a text, and content that is parts."""
        return self._renders(_PROBE), self._renders([{"type": "text", "text": _PROBE}])

    def _renders(self, content: object) -> bool:
        """Whether content comes through, and not as the program text of a list."""
        variables = {
            "messages": [{"role": "user", "content": content}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": False,
        }
        try:
            text = self._render(self._default, variables)
        except (InvalidRequestError, GenerationError):
            return False
        return _PROBE in text and "'text'" not in text and '"text"' not in text


def _compile(sandbox: TemplateSandbox, name: str, text: str) -> Template:
    try:
        return sandbox.compile_template(text)
    except TemplateSyntaxError as error:
        raise LoadError(
            f"The model's chat template ({name}) has an error in line {error.lineno}: "
            f"{_short(error)}."
        ) from error
    except RecursionError as error:
        raise LoadError(f"The model's chat template ({name}) is nested too deep.") from error


def _short(error: Exception) -> str:
    """Return what an error says, on one line and without a full stop."""
    text = error.message if isinstance(error, TemplateError) and error.message else str(error)
    return " ".join((text or type(error).__name__).split())[:300].rstrip(".")


def _part_text(part: object) -> str:
    """Return the text of one content part; InvalidRequestError if it is not a text."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"Content parts must be of type 'text' with a text, not {kind!r:.50}.", param="messages"
    )


def _plain(value: object) -> object:
    """Copy JSON values into plain Python ones, whose methods the sandbox knows to be harmless."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item) for item in value]
    raise InvalidRequestError(
        f"Messages must be made of JSON values, not {type(value).__name__}.", param="messages"
    )
