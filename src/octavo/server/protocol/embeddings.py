"""The body of ``POST /v1/embeddings``."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from octavo.core.sampling import Pooling
from octavo.server.protocol.common import LATER, read_truncation
from octavo.server.protocol.completions import Prompt, read_prompts
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong


def _read_input(value: Any) -> list[Prompt]:
    prompts = read_prompts(value)
    if "" in prompts:
        raise wrong("must not be an empty string, nor hold one")
    return prompts


class EmbeddingRequest(StrictModel):
    """Texts to turn into vectors."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "dimensions": Unsupported("vectors are as long as the model's hidden states"),
        "messages": Unsupported(LATER),
        "request_id": Unsupported("use the X-Request-Id header"),
    }
    differences: ClassVar[Mapping[str, str]] = {"user": "accepted; it changes nothing"}

    model: str | None = None
    """One of the served names; the first of them if left out."""
    input: Annotated[
        list[Prompt],
        PlainValidator(
            _read_input, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
        ),
    ]
    """One or several texts, or token ids."""
    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or the base64 of little-endian float32s."""
    user: str | None = None
    pooling: Pooling = "last"
    """The final hidden state of the last token, or the mean over all tokens."""
    normalize: bool = True
    """Scale each vector to length 1."""
    truncate_prompt_tokens: Annotated[int | None, BeforeValidator(read_truncation)] = None
    """Keep only so many of each text's last tokens; -1 keeps what the context holds."""
    add_special_tokens: bool = True
    """Whether a text begins as the tokenizer has it, with a BOS for example."""
    priority: int = 0
    """Lower runs first; only 0 unless the scheduling policy is ``priority``."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Only requests with the same salt share cached prefixes."""
