"""The numpy sampler: the reference that every other is tested against, bit for bit."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import RequestError
from octavo.core.ids import TokenId
from octavo.core.plan import NewSequence
from octavo.core.request import TokenLogprobs
from octavo.kernels.sampling.distribution import draw_token
from octavo.kernels.sampling.failures import all_banned, check_finite, outside_vocab
from octavo.kernels.sampling.interface import (
    BAN_BIAS,
    NO_MASKS,
    Mask,
    SampledTokens,
    check_rows,
)
from octavo.kernels.sampling.logprobs import score_token
from octavo.kernels.sampling.penalties import TokenCounts, apply_penalties, make_counts
from octavo.kernels.sampling.random_stream import uniform
from octavo.kernels.sampling.weights import check_vocab

Float32 = NDArray[np.float32]
Indices = NDArray[np.intp]


class NumpyState:
    """What the sampler knows of one sequence; only ``note_output`` changes it."""

    def __init__(self, sequence: NewSequence, vocab_size: int) -> None:
        params = sequence.sampling
        self.params = params
        self.seed = sequence.seed
        self.counts: TokenCounts | None = make_counts(params, vocab_size, sequence.prompt_token_ids)
        # Ending ids outside the vocabulary can never be chosen: there is nothing to ban.
        self.ending_ids = _indices(i for i in sequence.ending_token_ids if 0 <= i < vocab_size)
        self.banned_ids = _indices(i for i, b in params.logit_bias.items() if b <= BAN_BIAS)
        self.biased_ids = _indices(i for i, b in params.logit_bias.items() if b > BAN_BIAS)
        self.biases = np.array(
            [b for b in params.logit_bias.values() if b > BAN_BIAS], dtype=np.float32
        )
        self.outside_vocab = min((i for i in params.logit_bias if i >= vocab_size), default=None)
        self.note_output(sequence.output_token_ids)

    def note_output(self, token_ids: Sequence[TokenId]) -> None:
        """Count tokens that became part of the output."""
        if self.counts is not None:
            self.counts.add_output(token_ids)

    def changes_logits(self, num_output_tokens: int) -> bool:
        """Return whether steps 1 to 3 do anything for the next token."""
        return (
            self.counts is not None
            or bool(self.params.logit_bias)
            or (num_output_tokens < self.params.min_tokens and len(self.ending_ids) > 0)
        )


class NumpySampler:
    """Stateless: what it returns for a row depends on the row's logits, state and index alone."""

    def __init__(self, vocab_size: int) -> None:
        check_vocab(vocab_size)
        self._vocab_size = vocab_size

    def state(self, sequence: NewSequence) -> NumpyState:
        """Return the state of a sequence."""
        return NumpyState(sequence, self._vocab_size)

    def sample(
        self,
        logits: Float32,
        states: Sequence[NumpyState],
        num_output_tokens: Sequence[int],
        masks: Mapping[int, Mask] = NO_MASKS,
        rows: Sequence[int] | None = None,
    ) -> SampledTokens:
        """Choose a token for each state; see ``Sampler.sample``."""
        rows = check_rows(logits, self._vocab_size, len(states), rows)
        result = SampledTokens([])
        for i, (row, state, k) in enumerate(zip(rows, states, num_output_tokens, strict=True)):
            try:
                token_id = sample_row(logits[row], state, k, masks.get(i))
                num_top = state.params.logprobs
                if num_top is not None:
                    result.logprobs[i] = score_token(logits[row], token_id, num_top)
            except RequestError as error:
                token_id = -1
                result.failures[i] = error
            result.token_ids.append(token_id)
        return result

    def score(
        self, logits: Float32, token_ids: Sequence[TokenId], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Score token i under row i; see ``Sampler.score``."""
        check_rows(logits, self._vocab_size, len(token_ids), None)
        return tuple(
            score_token(row, token_id, num_top)
            for row, token_id in zip(logits, token_ids, strict=True)
        )


def sample_row(
    logits: Float32, state: NumpyState, num_output_tokens: int, mask: Mask | None = None
) -> TokenId:
    """Choose the token with index ``num_output_tokens`` of one sequence from ``logits [V]``.

    Raises:
        GenerationError: the logits are NaN or infinite.
        InvalidRequestError: every token is banned.
    """
    params = state.params
    if mask is not None or state.changes_logits(num_output_tokens):
        check_finite(float(logits.max()))  # before a ban can hide what is wrong
        logits = _processed(logits, state, num_output_tokens, mask)
        if np.isneginf(logits.max()):
            raise all_banned(params)
    likeliest = int(logits.argmax())
    check_finite(float(logits[likeliest]))
    if params.is_greedy:
        return likeliest
    return draw_token(logits, params, uniform(state.seed, num_output_tokens))


def _processed(
    logits: Float32, state: NumpyState, num_output_tokens: int, mask: Mask | None
) -> Float32:
    """Return a copy of ``logits [V]`` with mask, bans, bias and penalties applied."""
    params = state.params
    if state.outside_vocab is not None:
        raise outside_vocab(state.outside_vocab, len(logits))
    if mask is not None:
        allowed = np.unpackbits(mask, bitorder="little", count=len(logits)).view(np.bool_)
        logits = np.where(allowed, logits, np.float32(-np.inf))
    else:
        logits = logits.copy()
        if num_output_tokens < params.min_tokens:
            logits[state.ending_ids] = -np.inf
    logits[state.banned_ids] = -np.inf
    logits[state.biased_ids] += state.biases
    if state.counts is not None:
        with np.errstate(over="ignore"):
            apply_penalties(logits, params, state.counts)
    return logits


def _indices(ids: Iterable[TokenId]) -> Indices:
    return np.array(list(ids), dtype=np.intp)
