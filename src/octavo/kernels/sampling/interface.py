"""What a sampler does, whatever computes it.

Order of what shapes a row, the same as vLLM's:

0. The grammar's mask: other tokens are banned. It settles ``min_tokens`` too, see ``GrammarRow``.
1. ``min_tokens``: ids that end the output are banned while too few tokens were generated.
2. ``logit_bias``: added; exactly -100 bans the token whatever its logit (vLLM only adds it).
3. Penalties: repetition (prompt and output), frequency and presence (output only).
4. Greedy rows (temperature 0) take the largest logit, the lowest id among equals, and stop here.
5. Temperature, top_k, min_p, top_p, then one draw from the sequence's own random stream.

Guaranteed: a row's token and logprobs are a function of its logits, its state and the number of
its draw, bit for bit the same in every backend, on every machine, in any company (see ``weights``;
the logarithm in a logprob is the platform's).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError, RequestError
from octavo.core.ids import TokenId
from octavo.core.plan import NewSequence
from octavo.core.request import TokenLogprobs

Float32 = NDArray[np.float32]
Mask = NDArray[np.uint8]
"""``[ceil(V / 8)]``: a bit a token, the lowest first, set where the token is allowed."""

BAN_BIAS: Final = -100.0
"""The lowest ``logit_bias``: a ban, however large the logit."""
NO_MASKS: Final[Mapping[int, Mask]] = MappingProxyType({})


class SamplingState(Protocol):
    """What a sampler knows of one sequence: opaque, made by ``Sampler.state``."""

    def note_output(self, token_ids: Sequence[TokenId]) -> None:
        """Count tokens that became part of the output."""


State = Any
"""A state that goes back to the sampler that made it."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token per row; where sampling failed, -1 and a sentence."""

    token_ids: list[TokenId]
    failures: dict[int, RequestError] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Of rows that did not fail and whose sequences asked (``SamplingParams.logprobs``)."""


def check_rows(
    logits: Float32, vocab_size: int, num_states: int, rows: Sequence[int] | None
) -> Sequence[int]:
    """Return the row of each state.

    Raises:
        InvariantError: ``logits`` do not have these rows, or another vocabulary.
    """
    found = range(num_states) if rows is None else rows
    count = num_states if rows is None else max(rows, default=-1) + 1
    fits = len(logits) == count if rows is None else len(logits) >= count
    if len(found) != num_states or logits.ndim != 2 or logits.shape[1] != vocab_size or not fits:
        raise InvariantError(
            f"The step returned logits of shape {logits.shape}, not {(count, vocab_size)}."
        )
    return found


class Sampler(Protocol):
    """Chooses the next token of rows of logits, strictly row by row."""

    def state(self, sequence: NewSequence) -> SamplingState:
        """Return what the sampler needs to know of a sequence."""

    def sample(
        self,
        logits: Float32,
        states: Sequence[State],
        num_output_tokens: Sequence[int],
        masks: Mapping[int, Mask] = NO_MASKS,
        rows: Sequence[int] | None = None,
    ) -> SampledTokens:
        """Choose a token for each state, from ``logits [R, V]``, which are not changed.

        ``num_output_tokens[i]`` tokens of state i were generated before: the index of this draw.
        ``masks[i]`` is what the grammar of state i allows, if it has one. ``rows[i]`` is the row
        of its logits, which several may share; None stands for 0, 1, 2 …
        """

    def score(
        self, logits: Float32, token_ids: Sequence[TokenId], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Return how likely token i is under row i, and the ``num_top`` likeliest of that row.

        A token's rank counts the likelier ones and, among equals, those of lower id.

        Raises:
            GenerationError: logits contain NaN or plus infinity, or are all minus infinity.
        """
