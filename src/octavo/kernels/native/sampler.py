"""The native sampler: the reference's semantics, bit for bit, as one call a step."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError, RequestError
from octavo.core.ids import TokenId
from octavo.core.plan import NewSequence
from octavo.core.request import TokenLogprobs
from octavo.kernels.native import _native
from octavo.kernels.sampling.failures import all_banned, not_finite, outside_vocab
from octavo.kernels.sampling.interface import (
    BAN_BIAS,
    NO_MASKS,
    Mask,
    SampledTokens,
    check_rows,
)
from octavo.kernels.sampling.logprobs import logprob_of
from octavo.kernels.sampling.penalties import has_penalties
from octavo.kernels.sampling.weights import LOG2_E, check_vocab, log_total

Float32 = NDArray[np.float32]

_OUTSIDE_VOCAB: Final = 4
_ALL_BANNED: Final = 5
_NOT_FINITE: Final = {1: float("nan"), 2: float("inf"), 3: float("-inf")}
"""Numbers of ``SamplingStatus`` in ``sampler.h``, as the largest logit of such a row."""


class NativeState(_native.SamplingState):
    """What the sampler knows of one sequence; only ``note_output`` changes it."""

    def __init__(self, sequence: NewSequence, vocab_size: int) -> None:
        self.params = params = sequence.sampling
        bias = params.logit_bias
        self.outside_vocab = min((i for i in bias if i >= vocab_size), default=None)
        inside = [(i, b) for i, b in bias.items() if i < vocab_size]
        biased = [(i, b) for i, b in inside if b > BAN_BIAS]
        num_top = params.logprobs
        super().__init__(
            vocab=vocab_size,
            factor=0.0 if params.is_greedy else LOG2_E / params.temperature,
            top_k=max(0, min(params.top_k, vocab_size)),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            counts_tokens=has_penalties(params),
            min_tokens=min(params.min_tokens, 2**62),
            num_top=-1 if num_top is None else min(num_top, vocab_size),
            seed=sequence.seed % 2**64,
            ending_ids=[i for i in sequence.ending_token_ids if 0 <= i < vocab_size],
            banned_ids=[i for i, b in inside if b <= BAN_BIAS],
            biased_ids=[i for i, _ in biased],
            biases=[b for _, b in biased],
            outside_vocab=self.outside_vocab is not None,
            prompt=sequence.prompt_token_ids if params.repetition_penalty != 1.0 else (),
        )
        self.note_output(sequence.output_token_ids)


class NativeSampler:
    """Implements ``Sampler``; rows are shared out over the backend's threads, each to one.

    One thread at a time may use it.
    """

    def __init__(self, backend: _native.Backend, vocab_size: int) -> None:
        check_vocab(vocab_size)
        self._vocab_size = vocab_size
        self._native = backend.sampler(vocab_size)

    def state(self, sequence: NewSequence) -> NativeState:
        """Return the state of a sequence."""
        return NativeState(sequence, self._vocab_size)

    def sample(
        self,
        logits: Float32,
        states: Sequence[NativeState],
        num_output_tokens: Sequence[int],
        masks: Mapping[int, Mask] = NO_MASKS,
        rows: Sequence[int] | None = None,
    ) -> SampledTokens:
        """Choose a token for each state; see ``Sampler.sample``."""
        rows = check_rows(logits, self._vocab_size, len(states), rows)
        try:
            token_ids, failed, scores = self._native.sample(
                logits, rows, states, num_output_tokens, list(masks.items())
            )
        except ValueError as error:
            raise InvariantError(str(error)) from error
        return SampledTokens(
            token_ids,
            {i: self._failure(states[i], status) for i, status in failed},
            {i: _logprobs(*score) for i, score in scores},
        )

    def score(
        self, logits: Float32, token_ids: Sequence[TokenId], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Score token i under row i; see ``Sampler.score``."""
        check_rows(logits, self._vocab_size, len(token_ids), None)
        try:
            status, scores = self._native.score(logits, token_ids, min(num_top, self._vocab_size))
        except ValueError as error:
            raise InvariantError(str(error)) from error
        if status:
            raise not_finite(_NOT_FINITE[status])
        return tuple(_logprobs(*score) for score in scores)

    def _failure(self, state: NativeState, status: int) -> RequestError:
        if status == _OUTSIDE_VOCAB:
            assert state.outside_vocab is not None
            return outside_vocab(state.outside_vocab, self._vocab_size)
        if status == _ALL_BANNED:
            return all_banned(state.params)
        return not_finite(_NOT_FINITE[status])


def _logprobs(
    token_id: TokenId,
    best: float,
    logit: float,
    mass: int,
    rank: int,
    likeliest: Sequence[tuple[TokenId, float]],
) -> TokenLogprobs:
    total = log_total(best, mass)
    top = tuple((i, logprob_of(value, total)) for i, value in likeliest)
    return TokenLogprobs(token_id, logprob_of(logit, total), rank, top)
