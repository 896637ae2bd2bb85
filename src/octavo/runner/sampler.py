"""Chooses the next token of each row of logits, strictly row by row.

Order of what shapes a row, the same as vLLM's:

0. The grammar's mask: other tokens are banned. It settles ``min_tokens`` too, see ``GrammarRow``.
1. ``min_tokens``: ids that end the output are banned while too few tokens were generated.
2. ``logit_bias``: added; exactly -100 bans the token whatever its logit (vLLM only adds it).
3. Penalties: repetition (prompt and output), frequency and presence (output only).
4. Greedy rows (temperature 0) take the largest logit, the lowest id among equals, and stop here.
5. Temperature, top_k, min_p, top_p, then one draw from the sequence's own random stream.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import GenerationError, InvalidRequestError, InvariantError, RequestError
from octavo.core.ids import TokenId
from octavo.core.plan import NewSequence
from octavo.runner.distribution import draw_token
from octavo.runner.logprobs import check_finite
from octavo.runner.penalties import TokenCounts, apply_penalties, make_counts
from octavo.runner.random_stream import uniform

Float32 = NDArray[np.float32]
Indices = NDArray[np.intp]
Mask = NDArray[np.bool_]

BAN_BIAS: Final = -100.0
"""The lowest ``logit_bias``: a ban, however large the logit."""

NO_MASKS: Final[Mapping[int, Mask]] = MappingProxyType({})


class SamplingState:
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


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row; where sampling failed, -1 and a sentence."""

    token_ids: list[TokenId]
    failures: dict[int, RequestError]


class Sampler:
    """Stateless: what it returns for a row depends on the row's logits, state and index alone."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(
        self,
        logits: Float32,
        states: Sequence[SamplingState],
        num_output_tokens: Sequence[int],
        masks: Mapping[int, Mask] = NO_MASKS,
    ) -> SampledTokens:
        """Choose a token for each row of ``logits [R, V]``, which are not changed.

        ``num_output_tokens[i]`` tokens of row i were generated before: the index of this draw.
        ``masks[i]`` ``[V]`` is what the grammar of row i allows, if it has one.
        """
        if logits.shape != (len(states), self._vocab_size):
            raise InvariantError(
                f"The step returned logits of shape {logits.shape}, "
                f"not {(len(states), self._vocab_size)}."
            )
        if not masks and all(
            state.params.is_greedy and not state.changes_logits(k)
            for state, k in zip(states, num_output_tokens, strict=True)
        ):
            return _largest(logits)
        token_ids: list[TokenId] = []
        failures: dict[int, RequestError] = {}
        for i, (row, state, k) in enumerate(zip(logits, states, num_output_tokens, strict=True)):
            try:
                token_ids.append(sample_row(row, state, k, masks.get(i)))
            except RequestError as error:
                token_ids.append(-1)
                failures[i] = error
        return SampledTokens(token_ids, failures)


def sample_row(
    logits: Float32, state: SamplingState, num_output_tokens: int, mask: Mask | None = None
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
            raise InvalidRequestError(
                "Every token that this request may have next is banned by it.", param="logit_bias"
            )
    likeliest = int(logits.argmax())
    check_finite(float(logits[likeliest]))
    if params.is_greedy:
        return likeliest
    return draw_token(logits, params, uniform(state.seed, num_output_tokens))


def _largest(logits: Float32) -> SampledTokens:
    """Choose greedily for all rows at once; argmax stops at the first NaN and the lowest tie."""
    token_ids: list[TokenId] = logits.argmax(axis=1).tolist()
    best = logits[np.arange(len(token_ids)), token_ids]
    failures: dict[int, RequestError] = {}
    for i in np.flatnonzero(~np.isfinite(best)).tolist():
        try:
            check_finite(float(best[i]))
        except GenerationError as error:
            token_ids[i], failures[i] = -1, error
    return SampledTokens(token_ids, failures)


def _processed(
    logits: Float32, state: SamplingState, num_output_tokens: int, mask: Mask | None
) -> Float32:
    """Return a copy of ``logits [V]`` with mask, bans, bias and penalties applied."""
    params = state.params
    if state.outside_vocab is not None:
        raise GenerationError(
            f"logit_bias names token {state.outside_vocab}, but the vocabulary has {len(logits)}."
        )
    if mask is not None:
        logits = np.where(mask, logits, np.float32(-np.inf))
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
