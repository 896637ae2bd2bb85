"""The bodies of ``POST /tokenize`` and ``POST /detokenize``, shaped as vLLM's."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, PlainValidator

from octavo.server.protocol.chat import Message
from octavo.server.protocol.common import LATER
from octavo.server.protocol.tools import Tools
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

MAX_TOKENS: Final = 1 << 20
"""Most token ids in one body."""


class TokenizeText(StrictModel):
    """A text to tokenize."""

    model: str | None = None
    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Whether the text begins as the tokenizer has it, with a BOS for example."""
    return_token_strs: bool = False
    """Report each token's text too."""


class TokenizeChat(StrictModel):
    """A conversation to tokenize."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "chat_template": Unsupported("only the model's own template is used"),
        "mm_processor_kwargs": Unsupported(LATER),
    }

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    """The conversation, as ``POST /v1/chat/completions`` takes it."""
    tools: Tools = Field(default_factory=list)
    """Functions that the model may call."""
    add_generation_prompt: bool | None = None
    """Whether the template opens the assistant's turn; true unless a message is continued."""
    continue_final_message: bool = False
    """Go on with the last message, which must be the assistant's."""
    add_special_tokens: bool = False
    """Whether the tokenizer adds what begins a text; templates do so themselves."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the chat template."""
    return_token_strs: bool = False
    """Report each token's text too."""


def _read_tokens(value: Any) -> list[int]:
    if not isinstance(value, list):
        raise wrong("must be an array of token ids")
    if len(value) > MAX_TOKENS:
        raise wrong(f"must hold at most {MAX_TOKENS} token ids, not {len(value)}")
    if not {type(item) for item in value} <= {int}:
        raise wrong("must hold integer token ids only")
    return value


class DetokenizeRequest(StrictModel):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_read_tokens, json_schema_input_type=list[int])]
    """The ids; the text is that of all of them together, control tokens included."""
