"""The body of ``POST /v1/completions``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, PlainValidator

from octavo.server.protocol.common import LATER, UNSUPPORTED, GenerationRequest
from octavo.server.protocol.validation import Unsupported, wrong

MAX_PROMPTS: Final = 2048
"""Most prompts in one body."""

TokenPrompt = list[int]
Prompt = str | TokenPrompt


def _new_document() -> list[Prompt]:
    return [""]


def read_prompts(value: Any) -> list[Prompt]:
    """Return the prompts of any of the four shapes that the specification allows."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong("must be a string, an array of strings, token ids, or arrays of token ids")
    if not value:
        raise wrong("must not be an empty array")
    if type(value[0]) is int:
        return [_read_tokens(value, "")]
    if len(value) > MAX_PROMPTS:
        raise wrong(f"must hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    if isinstance(value[0], str):
        if not all(isinstance(item, str) for item in value):
            raise wrong("must not mix strings with anything else")
        return value
    return [_read_tokens(item, f"[{index}]") for index, item in enumerate(value)]


def _read_tokens(value: Any, where: str) -> TokenPrompt:
    if not isinstance(value, list) or not value:
        raise wrong(f"{where} must be a non-empty array of token ids".strip())
    if {type(item) for item in value} != {int}:
        raise wrong(f"{where} must hold integer token ids only".strip())
    return value


class CompletionRequest(GenerationRequest):
    """What to complete, and how."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED,
        "suffix": Unsupported("the model does not fill in the middle", neutral=("",)),
        "prompt_embeds": Unsupported(LATER),
    }

    prompt: Annotated[
        list[Prompt],
        PlainValidator(
            read_prompts,
            json_schema_input_type=str | list[str] | list[int] | list[list[int]],
        ),
    ] = Field(default_factory=_new_document)
    """One or several prompts; an empty text starts a new document."""
    max_tokens: int = Field(default=16, ge=0)
    """Most tokens to generate; 0 only scores (and echoes) the prompt."""
    best_of: int | None = Field(default=None, ge=1, le=20)
    """Compute so many completions and return the ``n`` with the highest sum of logprobs; the
    number of beams with ``use_beam_search``. Not with ``stream`` if above 1."""
    logprobs: int | None = Field(default=None, ge=0, le=5)
    """Report the chosen token's logprob and so many of the likeliest."""
    echo: bool = False
    """Begin each completion with its prompt."""
    add_special_tokens: bool = True
    """Whether a text begins as the tokenizer has it, with a BOS for example."""
