"""What a request asks of the sampler and of the stop rules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, get_args

from octavo.core.errors import InvalidRequestError
from octavo.core.ids import TokenId
from octavo.core.structured import StructuredOutput

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow float32."""

MAX_STOP_STRINGS: Final = 16
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_CHARS: Final = 256
MAX_SEED: Final = 2**64

Pooling = Literal["last", "mean"]
"""How a prompt's hidden states become one vector: its last token's, or the mean of all."""
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and meanings are vLLM's.

    Raises:
        InvalidRequestError: a value is out of range, NaN included; ``param`` names it.
    """

    n: int = 1
    """Number of completions of the prompt, 1 to 128."""
    best_of: int | None = None
    """Number of completions computed, of which the ``n`` with the highest sum of logprobs are
    returned; with beam search the number of beams. None means ``n``."""
    use_beam_search: bool = False
    """Whether to search for the likeliest completions instead of sampling them."""
    length_penalty: float = 1.0
    """A beam's sum of logprobs is divided by its length to this power: above 0 favours long."""
    early_stopping: bool | Literal["never"] = False
    """When a beam search with enough finished beams ends: True at once, False when no running
    beam is ahead at its present length, ``"never"`` when none can get ahead any more."""
    max_tokens: int | None = 16
    """Most tokens to generate; 0 only scores the prompt, None means up to the context's end."""
    min_tokens: int = 0
    """No end-of-turn id, stop id or stop string ends the output before so many tokens."""
    temperature: float = 1.0
    """0 is greedy; ties go to the lowest token id."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens whose probabilities sum to p (nucleus sampling)."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    repetition_penalty: float = 1.0
    """Divides (or multiplies, if negative) logits of tokens in the prompt or output."""
    logit_bias: Mapping[TokenId, float] = field(default_factory=lambda: MappingProxyType({}))
    """Added to the logits of these tokens, -100 (ban) to 100 (force)."""
    allowed_token_ids: tuple[TokenId, ...] | None = None
    """The only tokens that may be chosen; an end-of-turn id that is not among them never is."""
    bad_words: tuple[str, ...] = ()
    """Texts that the output must not have, as tokens begin and end: their last token is banned
    where those before it were chosen. What is forbidden is how the tokenizer writes a word, with
    and without a space before it; the output may spell it in other tokens."""
    bad_words_token_ids: tuple[tuple[TokenId, ...], ...] = ()
    """The same as token ids; the engine adds those of ``bad_words``."""
    seed: int | None = None
    """Seed of the request's own random stream; None draws one for the request."""
    stop: tuple[str, ...] = ()
    """Text that ends the output; it is not part of the output."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end the output, besides the model's own end-of-turn ids."""
    include_stop_str_in_output: bool = False
    """Whether the stop string that ended the output is kept in its text."""
    ignore_eos: bool = False
    """Whether the model's own end-of-turn ids do not end the output."""
    skip_special_tokens: bool = True
    """Whether control tokens leave no text."""
    logprobs: int | None = None
    """Number of likeliest tokens reported with each output token, besides the chosen one."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    pooling: Pooling | None = None
    """Report an embedding of the prompt, pooled so; nothing is generated (``max_tokens`` is 0)."""
    structured_output: StructuredOutput | None = None
    """The shape that the output must have. It wins over ``min_tokens`` and ``ignore_eos``: an
    output that can have no more tokens ends."""

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, 128)
        self._check_branches()
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        _check_real("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1)
        _check_real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1, not 0.", param="top_p")
        _check_real("min_p", self.min_p, 0.0, 1.0)
        _check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.pooling is not None and (self.pooling not in POOLINGS or self.max_tokens != 0):
            raise InvalidRequestError(
                f"pooling must be one of {', '.join(POOLINGS)}, with max_tokens 0.", param="pooling"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED - 1)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_real("logit_bias", bias, -100.0, 100.0)
        _check_words(self.bad_words)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError(
                "allowed_token_ids must not be empty: no token could be chosen.",
                param="allowed_token_ids",
            )
        _check_stop(self.stop)
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)
        for token_id in self.allowed_token_ids or ():
            _check_int("allowed_token_ids", token_id, 0)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0)

    @property
    def num_branches(self) -> int:
        """Number of completions computed at once: ``best_of``, or ``n``."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_reported(self) -> int:
        """Number of completions that the engine reports on: a beam search keeps the others."""
        return self.n if self.use_beam_search else self.num_branches

    def _check_branches(self) -> None:
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, 128)
        _check_real("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f'early_stopping must be true, false or "never", not {self.early_stopping!r:.100}.',
                param="early_stopping",
            )
        if self.pooling is not None and self.num_branches > 1:
            raise InvalidRequestError("pooling needs n to be 1.", param="n")
        if self.use_beam_search:
            self._check_beam_search()
        elif self.length_penalty != 1.0 or self.early_stopping is not False:
            name = "early_stopping" if self.length_penalty == 1.0 else "length_penalty"
            raise InvalidRequestError(f"{name} has no effect without use_beam_search.", param=name)

    def _check_beam_search(self) -> None:
        """Refuse what would be ignored: beams are ranked by the model's own logprobs."""
        neutral: dict[str, tuple[object, ...]] = {
            "temperature": (0,),
            "top_k": (0, -1),
            "top_p": (1,),
            "min_p": (0,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
            "allowed_token_ids": (None,),
            "bad_words": ((),),
            "stop": ((),),
        }
        for name, values in neutral.items():
            value = getattr(self, name)
            if value not in values:
                hint = ": use stop_token_ids" if name == "stop" else ""
                raise InvalidRequestError(
                    f"{name} must be left at {values[0]!r} with use_beam_search{hint}.", param=name
                )
        if self.structured_output is not None:
            name = self.structured_output.param
            raise InvalidRequestError(f"{name} excludes use_beam_search.", param=name)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def bans_tokens(self) -> bool:
        """Whether some tokens may not be chosen, whatever their logits."""
        return self.allowed_token_ids is not None or bool(self.bad_words_token_ids)


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r:.100}.", param=name)
    if value < low or (high is not None and value > high):
        wanted = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name} must be {wanted}, not {value!s:.100}.", param=name)


def _check_real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequestError(f"{name} must be a number, not {value!r:.100}.", param=name)
    if not low <= value <= high:  # written so that NaN, which compares false, is refused
        raise InvalidRequestError(
            f"{name} must be between {low:g} and {high:g}, not {value}.", param=name
        )


def _check_words(words: Sequence[str]) -> None:
    if isinstance(words, str) or not all(isinstance(w, str) and w.strip() for w in words):
        raise InvalidRequestError("bad_words must be a list of words.", param="bad_words")
    if len(words) > MAX_BAD_WORDS or any(len(word) > MAX_BAD_WORD_CHARS for word in words):
        raise InvalidRequestError(
            f"bad_words must be at most {MAX_BAD_WORDS} words of at most {MAX_BAD_WORD_CHARS} "
            "characters.",
            param="bad_words",
        )


def _check_stop(stop: Sequence[str]) -> None:
    if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
        raise InvalidRequestError("stop must be a list of non-empty strings.", param="stop")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop must have at most {MAX_STOP_STRINGS} strings, not {len(stop)}.", param="stop"
        )
