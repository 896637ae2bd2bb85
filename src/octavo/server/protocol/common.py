"""What completions and chat share: how to choose tokens, when to stop, what to report."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from octavo.server.protocol.retention import KVCacheRetention
from octavo.server.protocol.structured import ResponseFormat, StructuredOutputs
from octavo.server.protocol.validation import StrictModel, Unsupported, wrong

MAX_PROMPT_LOGPROBS: Final = 20

LATER: Final = "this version of the server does not have it"
NO_MEANING: Final = "it has no meaning for this server"
TEXT_ONLY: Final = "the model reads and writes text only"

UNSUPPORTED: Final[Mapping[str, Unsupported]] = {
    "spaces_between_special_tokens": Unsupported(LATER, neutral=(True,)),
    "return_tokens_as_token_ids": Unsupported("use return_token_ids", neutral=(False,)),
    "stream_interval": Unsupported(LATER, neutral=(1,)),
    "service_tier": Unsupported("there is one tier", neutral=("auto", "default")),
    "request_id": Unsupported("use the X-Request-Id header"),
}


DIFFERENCES: Final[Mapping[str, str]] = {
    "user": "accepted; it changes nothing",
    "safety_identifier": "accepted; it changes nothing",
    "metadata": "accepted; it changes nothing, as no completion is stored",
    "prompt_cache_key": "accepted; it changes nothing, as equal prefixes are cached without it",
    "presence_penalty": "counts output tokens only",
    "frequency_penalty": "counts output tokens only",
}


def read_truncation(value: Any) -> Any:
    """Check a ``truncate_prompt_tokens``."""
    if type(value) is int and value != -1 and value < 1:
        raise wrong("must be a number of tokens of at least 1, or -1 for all that fit")
    return value


def read_early_stopping(value: Any) -> Any:
    """Check an ``early_stopping``."""
    if not isinstance(value, bool) and value != "never":
        raise wrong('must be true, false or "never"')
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StreamOptions(StrictModel):
    """How a stream is framed."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        "include_obfuscation": Unsupported("streams are not padded", neutral=(False,)),
        "continuous_usage_stats": Unsupported(LATER, neutral=(False,)),
    }

    include_usage: bool = False
    """Send one more chunk, without choices, that holds the usage of the whole request."""


class GenerationRequest(StrictModel):
    """Fields that completions and chat share.

    Ranges are those of ``SamplingParams``, which refuses what is outside them.
    """

    unsupported: ClassVar[Mapping[str, Unsupported]] = UNSUPPORTED
    differences: ClassVar[Mapping[str, str]] = DIFFERENCES

    model: str | None = None
    """One of the served names; the first of them if left out."""
    n: int = 1
    """Completions of each prompt, 1 to 128."""
    temperature: float = 1.0
    """0 always takes the likeliest token; at most 2."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities sum to this."""
    presence_penalty: float = 0.0
    """-2 to 2."""
    frequency_penalty: float = 0.0
    """-2 to 2."""
    logit_bias: dict[str, float] = Field(default_factory=dict)
    """Token id (as a string) to a bias of -100 to 100."""
    seed: int | None = None
    """Seed of the request's own random stream; completion i uses ``seed + i``."""
    stop: Annotated[
        list[str], BeforeValidator(_as_list, json_schema_input_type=str | list[str])
    ] = Field(default_factory=list)
    """Up to 16 strings (OpenAI: 4) that end the output and are not part of it."""
    stream: bool = False
    """Send tokens as server-sent events as they come."""
    stream_options: StreamOptions | None = None
    """Only with ``stream``."""
    response_format: ResponseFormat | None = None
    """The shape of the output: text, any JSON object, JSON of a schema, or tags in text."""
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)
    prompt_cache_key: str | None = None

    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) logits of tokens in the prompt or output."""
    min_tokens: int = 0
    """No stop rule ends the output before so many tokens."""
    ignore_eos: bool = False
    """Whether the model's own end-of-turn ids do not end the output."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end the output, besides the model's own."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be chosen, the end of a turn included."""
    bad_words: list[str] = Field(default_factory=list)
    """Words that are not written, as the tokenizer writes them with and without a space before."""
    include_stop_str_in_output: bool = False
    """Whether the stop string that ended the output is kept in its text."""
    skip_special_tokens: bool = True
    """Whether control tokens leave no text."""
    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_PROMPT_LOGPROBS)
    """Report each prompt token's logprob and so many of the likeliest; not with ``stream``."""
    truncate_prompt_tokens: Annotated[int | None, BeforeValidator(read_truncation)] = None
    """Keep only so many of the prompt's last tokens; -1 keeps what the context holds beside
    ``max_tokens``."""
    use_beam_search: bool = False
    """Return the likeliest completions that ``n`` beams find; temperature is then 0."""
    length_penalty: float = 1.0
    """A beam's sum of logprobs is divided by its length to this power."""
    early_stopping: Annotated[
        bool | Literal["never"],
        PlainValidator(read_early_stopping, json_schema_input_type=bool | Literal["never"]),
    ] = False
    """When a search with enough finished beams ends, as in Hugging Face's ``generate``."""
    return_token_ids: bool = False
    """Report the token ids of prompt and output."""
    priority: int = 0
    """Lower runs first; only 0 unless the scheduling policy is ``priority``."""
    structured_outputs: StructuredOutputs | None = None
    """The shape of the output: a schema, a regex, a choice, a grammar, or tags in text."""
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    """Only requests with the same salt share cached prefixes."""
    kv_cache_retention: KVCacheRetention = KVCacheRetention()
    """How long the request's KV should stay in the prefix cache: a hint, never a promise."""

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage
