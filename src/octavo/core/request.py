"""What was asked, and how it ended."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from octavo.core.errors import InvalidRequestError, RequestError
from octavo.core.ids import RequestId, TokenId
from octavo.core.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended; the values are the labels of the metrics."""

    STOP = "stop"
    """An end-of-turn id, a stop id or a stop string came."""
    LENGTH = "length"
    """The token limit or the end of the context was reached."""
    ABORT = "abort"
    """The client gave up, or the server shut down."""
    ERROR = "error"
    """Computing it failed."""


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """Whose KV may be shared with whom: the namespace of a prefix in the cache.

    Two requests can share KV only if every field is equal, so a new model or tokenizer version,
    another adapter or another tenant cannot hit old KV by construction.
    """

    model: str
    """Fingerprint of the weights and of every setting that changes KV."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    kv_dtype: str
    """Number format of stored KV."""
    adapter: str = ""
    """Identity *and content* of the adapter; empty without one."""
    tenant: str = ""
    """Who is isolated from whom; empty with a single tenant."""
    salt: str = ""
    """The client's own ``cache_salt``; empty without one."""


DEFAULT_RETENTION_PRIORITY: Final = 35
"""What TensorRT-LLM takes for blocks of which nothing is said."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the KV of a request should outlive it: hints, never promises.

    Raises:
        InvalidRequestError: a value is out of its range.
    """

    priority: int = DEFAULT_RETENTION_PRIORITY
    """0 to 100; blocks of a lower priority are evicted first."""
    ttl_s: float | None = None
    """Seconds after the last use for which ``priority`` holds; then the default does."""
    store: bool = True
    """Whether other requests may reuse the KV that this one computes (it may reuse theirs)."""

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 100:
            raise InvalidRequestError(
                f"The retention priority must be from 0 to 100, not {self.priority}.",
                param="retention",
            )
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise InvalidRequestError(
                f"The retention TTL must be above 0 seconds, not {self.ttl_s}.", param="retention"
            )


DEFAULT_RETENTION: Final = Retention()
"""No wish at all."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what to do with it. Frozen: nothing about what was asked ever changes."""

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...]
    """At least one token."""
    sampling: SamplingParams
    """``max_tokens`` may be None: up to the end of the context."""
    identity: CacheIdentity
    arrival_time: float
    """Seconds on the engine's clock."""
    priority: int = 0
    """Lower runs first under the ``priority`` policy; ignored under ``fcfs``."""
    retention: Retention = DEFAULT_RETENTION
    """What should become of its KV."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, and what was likelier."""

    token_id: TokenId
    logprob: float
    rank: int
    """1 is the likeliest token of the vocabulary."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """The likeliest tokens, likeliest first; fewer than asked where the vocabulary is small."""


@dataclass(slots=True)
class SequenceOutput:
    """What one step produced for one completion of a request. Nobody changes it.

    It is not frozen because every step makes one for each sequence, and a frozen one takes about
    four times as long to make.
    """

    request_id: RequestId
    new_token_ids: tuple[TokenId, ...] = ()
    new_logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per new token where the request asked for logprobs, else empty."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """Set once, with the first output: one entry per prompt token, the first of them None."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the cache when the request first ran."""
    finish_reason: FinishReason | None = None
    stop_token_id: TokenId | None = None
    """The token that ended the output, if one did; it is also the last of ``new_token_ids``."""
    error: RequestError | None = None
    """Why, when ``finish_reason`` is ERROR."""
    embedding: tuple[float, ...] | None = None
    """Of the prompt, where the request asked for pooling; with its only output."""
    index: int = 0
    """Which of the request's completions."""


@dataclass(frozen=True, slots=True)
class RequestStats:
    """The life of a finished completion, in seconds on the engine's clock. None: never got there.

    A request has one for each of its completions.
    """

    request_id: RequestId
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    """Tokens the client was given: those past a stop string do not count."""
    max_tokens: int
    finish_reason: FinishReason
    num_preemptions: int
    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    finish_time: float
    index: int = 0
    """Which of the request's completions."""
