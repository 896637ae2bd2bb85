"""Which requests are refused at once, and how many tokens the others may generate."""

from typing import Final

from octavo.core.config import SchedulerConfig
from octavo.core.errors import ContextLengthError, InvalidRequestError, InvariantError
from octavo.core.ids import TokenId
from octavo.core.request import Request
from octavo.scheduler.stop import ending_token_ids

MAX_TOKEN_ID: Final = 2**31 - 1
"""Largest token id where the vocabulary's size is not known."""


class Intake:
    """Checks a request against the limits of the model and of the KV cache.

    The rules, with P prompt tokens:

    * P + max_tokens <= max_model_len (OpenAI's rule, strict: P = max_model_len with max_tokens 1
      is refused although the last token needs no KV).
    * P + max_tokens - 1 <= slots of the pool, as the last sampled token needs no KV. So what is
      accepted can always run, if need be alone.
    * max_tokens None means up to the end of the context, or of the pool if that is smaller; at
      least one token must fit.
    """

    def __init__(self, config: SchedulerConfig, num_slots: int) -> None:
        self._config = config
        self._num_slots = num_slots

    def resolve_max_tokens(self, request: Request) -> int:
        """Return how many tokens the request may generate.

        Raises:
            ContextLengthError: it can never fit.
            InvalidRequestError: its prompt is empty, or an id or a count is not in the vocabulary.
        """
        if request.sampling.seed is None:
            raise InvariantError(f"request {request.request_id!r} came without a seed")
        self._check_prompt(request)
        self._check_vocabulary(request)
        num_prompt = len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            room = min(self._config.max_model_len - num_prompt, self._num_slots - num_prompt + 1)
            self._check_room(room, num_prompt, request.sampling.min_tokens)
            return room
        self._check_fit(num_prompt, max_tokens)
        return max_tokens

    def _check_prompt(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("The prompt must have at least one token.", param="prompt")
        self._check_ids("prompt", (min(prompt), max(prompt)))

    def _check_vocabulary(self, request: Request) -> None:
        sampling = request.sampling
        self._check_ids("logit_bias", tuple(sampling.logit_bias))
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        for name, count in (
            ("logprobs", sampling.logprobs),
            ("prompt_logprobs", sampling.prompt_logprobs),
        ):
            if count is not None and 0 < self._config.vocab_size < count:
                raise InvalidRequestError(
                    f"{name} must be at most the vocabulary's size ({self._config.vocab_size}), "
                    f"not {count}.",
                    param=name,
                )

    def _check_ids(self, param: str, token_ids: tuple[TokenId, ...]) -> None:
        highest = self._config.vocab_size - 1 if self._config.vocab_size else MAX_TOKEN_ID
        for token_id in token_ids:
            if not 0 <= token_id <= highest:
                raise InvalidRequestError(
                    f"{param} has token id {token_id}, which is not in the vocabulary "
                    f"(0 to {highest}).",
                    param=param,
                )

    def _check_fit(self, num_prompt: int, max_tokens: int) -> None:
        limit = self._config.max_model_len
        if num_prompt + max_tokens > limit:
            raise ContextLengthError(
                f"The prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) exceed the "
                f"model's context of {limit} tokens.",
                param="prompt" if num_prompt >= limit else "max_tokens",
            )
        if num_prompt + max(max_tokens - 1, 0) > self._num_slots:
            raise ContextLengthError(
                f"The prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) exceed the "
                f"{self._num_slots} tokens that the KV cache can hold.",
                param="prompt" if num_prompt > self._num_slots else "max_tokens",
            )

    def _check_room(self, room: int, num_prompt: int, min_tokens: int) -> None:
        limit = min(self._config.max_model_len, self._num_slots + 1)
        if room < 1:
            raise ContextLengthError(
                f"The prompt ({num_prompt} tokens) leaves no room for a token: prompt and output "
                f"must fit {limit} tokens.",
                param="prompt",
            )
        if room < min_tokens:
            raise ContextLengthError(
                f"min_tokens ({min_tokens}) does not fit: after the prompt ({num_prompt} tokens) "
                f"there is room for {room}.",
                param="min_tokens",
            )

    def ending_token_ids(self, request: Request) -> frozenset[TokenId]:
        """Return the ids that end the request's output."""
        return ending_token_ids(request.sampling, self._config.end_token_ids)
