"""What front ends hand to callers: text and tokens of each completion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.errors import RequestError
from octavo.core.ids import TokenId
from octavo.core.request import FinishReason, TokenLogprobs


@dataclass(slots=True)
class GenerationDelta:
    """What is new in one completion of a prompt. Nobody changes it.

    It is not frozen because every step makes one for each sequence; see ``SequenceOutput``.
    """

    index: int
    """Which of the n completions."""
    text: str
    """New text: cut before a stop string, never ending in half a character."""
    token_ids: tuple[TokenId, ...]
    """New tokens; the text may lag behind them."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per new token where asked for, else empty."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    """Once, with the first delta of completion 0, where asked for."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV came from the cache."""
    num_generated_tokens: int
    """Tokens of this completion so far, these included."""
    finish_reason: FinishReason | None = None
    """Set in the completion's last delta, which is its only one with it."""
    stop_reason: str | TokenId | None = None
    """The stop string, or the stop token other than the model's own, that ended it."""
    error: RequestError | None = None
    """Why, when ``finish_reason`` is ERROR."""
    embedding: tuple[float, ...] | None = None
    """Of the prompt, where the request asked for pooling; in its only delta."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One whole completion of a prompt."""

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason
    stop_reason: str | TokenId | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the tokens' logprobs; None where logprobs were not asked for."""
        return None if self.logprobs is None else sum(item.logprob for item in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and all its completions."""

    request_id: str
    prompt: str | None
    """The text, where the prompt was given as text."""
    prompt_token_ids: tuple[TokenId, ...]
    outputs: tuple[CompletionOutput, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt and its vector."""

    request_id: str
    prompt_token_ids: tuple[TokenId, ...]
    embedding: tuple[float, ...]


def scaled(vector: Sequence[float]) -> tuple[float, ...]:
    """Return a vector of the same direction and length 1; one of zeros stays so."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return tuple(value / length for value in vector) if length > 0 else tuple(vector)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What callers may know about the model that is served."""

    served_name: str
    backend: str
    dtype: str
    """Number format of KV."""
    precision: str
    """How weights are held: ``float32``, ``bfloat16``, ``int8``, or ``file`` (as stored)."""
    max_model_len: int
    """Most tokens of prompt and completion together."""
    vocab_size: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    enable_prefix_caching: bool

    @property
    def num_kv_tokens(self) -> int:
        """Tokens of KV that fit at once."""
        return self.num_blocks * self.block_size
