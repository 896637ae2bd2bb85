"""Which requests are refused at once, and how many tokens the others may generate."""

from typing import Final

from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.errors import ContextLengthError, InvalidRequestError, InvariantError
from octavo.core.ids import TokenId
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.scheduler.stop import ending_token_ids

MAX_TOKEN_ID: Final = 2**31 - 1
"""Largest token id where the vocabulary's size is not known."""

BAN_BIAS: Final = -100.0
"""The ``logit_bias`` that bans a token, however large its logit (``runner/sampler.py``)."""


class Intake:
    """Checks a request against the limits of the model and of the KV cache.

    The rules, with P prompt tokens:

    * P + max_tokens <= max_model_len (OpenAI's rule, strict: P = max_model_len with max_tokens 1
      is refused although the last token needs no KV).
    * P + max_tokens - 1 <= slots of the pool, as the last sampled token needs no KV. So what is
      accepted can always run, if need be alone.
    * A beam search, whose beams advance together, must fit with all its beams, which share the
      whole blocks of the prompt only; and its beams must fit a batch.
    * max_tokens None means up to the end of the context, or of the pool if that is smaller; at
      least one token must fit.
    """

    def __init__(self, config: SchedulerConfig, num_slots: int, cache: CacheConfig) -> None:
        self._config = config
        self._num_slots = num_slots
        self._cache = cache

    def resolve_max_tokens(self, request: Request) -> int:
        """Return how many tokens the request may generate.

        Raises:
            ContextLengthError: it can never fit.
            InvalidRequestError: its prompt is empty, an id is not in the vocabulary, or no token of
                it may be chosen.
        """
        if request.sampling.seed is None:
            raise InvariantError(f"request {request.request_id!r} came without a seed")
        self._check_prompt(request)
        self._check_vocabulary(request)
        num_prompt = len(request.prompt_token_ids)
        max_tokens = request.sampling.max_tokens
        num_slots = self._num_slots
        if request.sampling.use_beam_search:
            self._check_beams(request.sampling.num_branches)
            num_slots = self._slots_of_a_beam(request)
        if max_tokens is None:
            room = min(self._config.max_model_len, num_slots + 1) - num_prompt
            self._check_room(room, num_prompt, request.sampling.min_tokens)
            return room
        self._check_fit(num_prompt, max_tokens, num_slots)
        return max_tokens

    def _check_beams(self, width: int) -> None:
        limit = self._config.max_num_seqs
        if self._config.vocab_size:
            limit = min(limit, self._config.vocab_size)
        if width > limit:
            raise InvalidRequestError(
                f"A beam search must have at most {limit} beams here, not {width}.", param="n"
            )
        if self._cache.is_contiguous:
            raise InvalidRequestError(
                "use_beam_search needs paged KV, but this engine runs with --kv-reservation "
                f"{self._cache.kv_reservation}.",
                param="use_beam_search",
            )

    def _slots_of_a_beam(self, request: Request) -> int:
        """Return the most tokens that each beam can have KV for while all others have as many.

        Beams that resume after a preemption share what they find in the cache, or nothing.
        """
        size = self._cache.block_size
        is_cached = self._cache.enable_prefix_caching and request.retention.store
        num_shared = len(request.prompt_token_ids) // size if is_cached else 0
        num_left = max(0, self._num_slots // size - num_shared)
        num_blocks = num_shared + num_left // request.sampling.num_branches
        return min(num_blocks * size, self._num_slots)

    def _check_prompt(self, request: Request) -> None:
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("The prompt must have at least one token.", param="prompt")
        self._check_ids("prompt", (min(prompt), max(prompt)))

    def _check_vocabulary(self, request: Request) -> None:
        sampling = request.sampling
        self._check_ids("logit_bias", tuple(sampling.logit_bias))
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        self._check_ids("allowed_token_ids", sampling.allowed_token_ids or ())
        self._check_choice(sampling)

    def _check_choice(self, sampling: SamplingParams) -> None:
        """Refuse to ban every token: nothing could be chosen."""
        banned = {token_id for token_id, bias in sampling.logit_bias.items() if bias <= BAN_BIAS}
        if banned and sampling.min_tokens:  # until then, none of these may be chosen either
            banned |= ending_token_ids(sampling, self._config.end_token_ids)
        if 0 < self._config.vocab_size <= len(banned):
            raise InvalidRequestError(
                f"logit_bias must leave a token to choose: {BAN_BIAS:g} bans it.",
                param="logit_bias",
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

    def _check_fit(self, num_prompt: int, max_tokens: int, num_slots: int) -> None:
        limit = self._config.max_model_len
        if num_prompt + max_tokens > limit:
            raise ContextLengthError(
                f"The prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) exceed the "
                f"model's context of {limit} tokens.",
                param="prompt" if num_prompt >= limit else "max_tokens",
            )
        if num_prompt + max(max_tokens - 1, 0) > num_slots:
            raise ContextLengthError(
                f"The prompt ({num_prompt} tokens) and max_tokens ({max_tokens}) exceed the "
                f"{num_slots} tokens that the KV cache can hold.",
                param="prompt" if num_prompt > num_slots else "max_tokens",
            )

    def _check_room(self, room: int, num_prompt: int, min_tokens: int) -> None:
        if room < 1:
            raise ContextLengthError(
                f"The prompt ({num_prompt} tokens) leaves no room for a token: prompt and output "
                f"must fit {num_prompt + room} tokens.",
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
