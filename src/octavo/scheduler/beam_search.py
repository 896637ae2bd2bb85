"""The search for the likeliest completions: which beams live on, which are done, when to stop.

It follows the beam search of Hugging Face's ``generate`` decision by decision, so it returns the
same completions; only ties are settled by its own rule (better beam first, then likelier token).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from octavo.core.errors import InvariantError
from octavo.core.ids import SequenceId, TokenId
from octavo.core.request import FinishReason, TokenLogprobs
from octavo.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A completion under way."""

    parent: SequenceId
    """The sequence that it continues."""
    tokens: tuple[TokenLogprobs, ...]
    """Its output, with the model's own logprobs."""
    total: float
    """Sum of the logprobs."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A completion that is done."""

    tokens: tuple[TokenLogprobs, ...]
    score: float
    """Sum of its logprobs over its length to the power of the length penalty."""
    reason: FinishReason


def num_candidates(width: int, num_endings: int) -> int:
    """Return how many continuations are looked at: so many that ``width`` of them do not end."""
    return max(2, 1 + num_endings) * width


class BeamSearch:
    """The state of one search, in output tokens; it knows no blocks and no steps."""

    def __init__(
        self,
        root: SequenceId,
        sampling: SamplingParams,
        max_tokens: int,
        ending_token_ids: frozenset[TokenId],
    ) -> None:
        self.width = sampling.num_branches
        self.num_candidates = num_candidates(self.width, len(ending_token_ids))
        self.prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
        """Kept for the first completion, which comes when the search is done."""
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._ending = ending_token_ids
        self._beams: dict[SequenceId, Beam] = {root: Beam(root, (), 0.0)}
        self._length = 0
        self._finished: list[Hypothesis] = []

    def advance(self, scores: Mapping[SequenceId, TokenLogprobs]) -> list[Beam]:
        """Take in the likeliest next tokens (``top``) of every beam; choose the next beams.

        Returns:
            The beams that go on, best first, at most ``width``; none when the search is done. The
            caller names their sequences with ``place``.

        Raises:
            InvariantError: a beam was not scored.
        """
        if scores.keys() != self._beams.keys():
            raise InvariantError(f"beams {list(self._beams)} have scores for {list(scores)}")
        running: list[Beam] = []
        ended: list[Hypothesis] = []
        candidates = self._candidates(scores)
        self._length += 1
        for rank, beam in enumerate(candidates):
            reason = self._reason(beam)
            if reason is None:
                running.append(beam)
            elif rank < self.width:  # a worse one must not end a better one's chances
                ended.append(Hypothesis(beam.tokens, self._score(beam.total, self._length), reason))
        running = running[: self.width]
        self._keep(ended)
        return [] if self._is_done(running) else running

    def place(self, beams: Mapping[SequenceId, Beam]) -> None:
        """Say which sequence holds which of the beams that ``advance`` returned."""
        self._beams = dict(beams)

    def best(self) -> list[Hypothesis]:
        """Return the ``n`` best completions, best first.

        Where there are not so many different ones (a tiny vocabulary) the best is repeated.
        """
        best = self._finished[: self._sampling.n]
        return best + best[:1] * (self._sampling.n - len(best))

    def _candidates(self, scores: Mapping[SequenceId, TokenLogprobs]) -> list[Beam]:
        """Return the likeliest continuations of all beams together, best first."""
        banned = self._ending if self._length < self._sampling.min_tokens else frozenset()
        ranked = (
            (-(beam.total + logprob), order, rank, sequence_id, token_id, logprob)
            for order, (sequence_id, beam) in enumerate(self._beams.items())
            for rank, (token_id, logprob) in enumerate(scores[sequence_id].top, start=1)
            if token_id not in banned
        )
        num_top = self._sampling.logprobs or 0
        return [
            Beam(
                sequence_id,
                (
                    *self._beams[sequence_id].tokens,
                    TokenLogprobs(token_id, logprob, rank, scores[sequence_id].top[:num_top]),
                ),
                -negative,
            )
            for negative, _, rank, sequence_id, token_id, logprob in nsmallest(
                self.num_candidates, ranked
            )
        ]

    def _reason(self, beam: Beam) -> FinishReason | None:
        if beam.tokens[-1].token_id in self._ending:
            return FinishReason.STOP
        return FinishReason.LENGTH if self._length >= self._max_tokens else None

    def _keep(self, ended: Sequence[Hypothesis]) -> None:
        """Keep the ``width`` best of all that are done."""
        if self._is_full and self._sampling.early_stopping is True:
            return
        kept = sorted([*self._finished, *ended], key=lambda item: -item.score)
        self._finished = kept[: self.width]

    @property
    def _is_full(self) -> bool:
        return len(self._finished) == self.width

    def _is_done(self, running: Sequence[Beam]) -> bool:
        if not running or (self._is_full and self._sampling.early_stopping is True):
            return True
        if not self._is_full:
            return False
        length = self._length
        if self._sampling.early_stopping == "never" and self._sampling.length_penalty > 0.0:
            length = self._max_tokens
        return self._score(running[0].total, length) <= self._finished[-1].score

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self._sampling.length_penalty)
