"""Sequences under a grammar: which tokens may come next, and which must."""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from octavo.core.errors import InvalidRequestError, InvariantError
from octavo.core.ids import SequenceId, TokenId
from octavo.core.plan import NewSequence
from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.interface import Mask
from octavo.runner.grammar import CompiledGrammar, GrammarCompiler, reason

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED: Final = 1024
"""A longer forced text is appended in pieces, one a step, so that no step takes long."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What follows from a sampled token."""

    forced: tuple[TokenId, ...]
    """Tokens that the grammar leaves no choice about."""
    is_complete: bool
    """Whether nothing may follow them."""


class GrammarRow:
    """One sequence's place in its grammar.

    It moves with the tokens that were sampled and forced. The scheduler takes all of them or ends
    the sequence, so the row never has to go back; after a preemption it is made anew.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        sampling: SamplingParams,
        output_token_ids: tuple[TokenId, ...],
        end_bits: Mask,
        *,
        vocab_size: int,
        jump_forward: bool,
    ) -> None:
        self._grammar = grammar
        self._sampling = sampling
        asked = sampling.structured_output
        self._param = None if asked is None else asked.param
        self._end_bits = end_bits
        self._vocab_size = vocab_size
        # A forced token's logprob needs the forward pass that jumping saves, and a ban its mask.
        self._jump_forward = jump_forward and sampling.logprobs is None and not sampling.bans_tokens
        self._past = output_token_ids
        self._num_tokens = len(output_token_ids)
        self._matcher: LLMatcher | None = None

    def mask(self, num_output_tokens: int) -> Mask:
        """Return which tokens of the vocabulary may be output token k.

        Ids that end a turn may come where the grammar may end. ``min_tokens`` and ``ignore_eos``
        take them away, but not where nothing else may come.

        Raises:
            InvalidRequestError: no token may come, or the grammar became too costly.
        """
        if num_output_tokens != self._num_tokens:
            raise InvariantError(
                f"A grammar has seen {self._num_tokens} output tokens of {num_output_tokens}."
            )
        matcher = self._current()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        self._check(matcher)
        allowed = _fitted(bits, self._vocab_size)
        if self._sampling.ignore_eos or num_output_tokens < self._sampling.min_tokens:
            without = allowed & ~self._end_bits
            if without.any():
                allowed = without
        if not allowed.any():
            raise InvalidRequestError(
                "The grammar of this request allows no token here.", param=self._param
            )
        return allowed

    def accept(self, token_id: TokenId) -> Accepted:
        """Move on by a token that the last mask allowed.

        Raises:
            InvalidRequestError: the grammar became too costly.
        """
        matcher = self._current()
        forced: list[TokenId] = []
        if not matcher.consume_token(token_id):
            raise self._failure(matcher)
        while self._jump_forward and len(forced) < MAX_FORCED and not matcher.is_stopped():
            more = matcher.compute_ff_tokens()
            if not more:
                break
            if not matcher.consume_tokens(more):
                raise self._failure(matcher)
            forced += more
        self._check(matcher)
        self._num_tokens += 1 + len(forced)
        return Accepted(tuple(forced), matcher.is_stopped())

    def _current(self) -> "LLMatcher":
        """Return the matcher, made at the first call so that it is made beside the step."""
        if self._matcher is None:
            self._matcher = self._grammar.new_matcher()
            if self._past and not self._matcher.consume_tokens(list(self._past)):
                raise InvariantError("A grammar does not accept the output that it allowed.")
        return self._matcher

    def _failure(self, matcher: "LLMatcher") -> InvalidRequestError:
        why = reason(matcher.get_error())
        return InvalidRequestError(
            f"The grammar of this request cannot be followed further: {why}.", param=self._param
        )

    def _check(self, matcher: "LLMatcher") -> None:
        if matcher.is_error():
            raise self._failure(matcher)


def _fitted(bits: Mask, vocab_size: int) -> Mask:
    """Return a copy of ``bits`` with one bit a token, those past the vocabulary cleared."""
    fitted = np.zeros(-(-vocab_size // 8), dtype=np.uint8)
    count = min(len(bits), len(fitted))
    fitted[:count] = bits[:count]
    if vocab_size % 8:
        fitted[-1] &= (1 << vocab_size % 8) - 1
    return fitted


class GrammarRows:
    """The grammars of the sequences that have one.

    Masks are computed on a thread of its own, so that they are ready when the step function, which
    holds the interpreter only now and then, returns the logits.
    """

    def __init__(
        self, compiler: GrammarCompiler, *, vocab_size: int, jump_forward: bool = True
    ) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._jump_forward = jump_forward
        ends = np.zeros(vocab_size, dtype=np.bool_)
        ends[list(compiler.end_ids)] = True
        self._end_bits = np.packbits(ends, bitorder="little")
        self._rows: dict[SequenceId, GrammarRow] = {}
        self._masks: dict[SequenceId, Future[Mask]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-masks")

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, new: NewSequence) -> None:
        """Begin with a sequence, if it has a grammar."""
        spec = new.sampling.structured_output
        if spec is None:
            return
        self._rows[new.sequence_id] = GrammarRow(
            self._compiler.compile(spec),
            new.sampling,
            new.output_token_ids,
            self._end_bits,
            vocab_size=self._vocab_size,
            jump_forward=self._jump_forward,
        )

    def release(self, sequence_id: SequenceId) -> None:
        """Forget a sequence."""
        self._rows.pop(sequence_id, None)
        self._masks.pop(sequence_id, None)

    def prepare(self, sampling: Iterable[tuple[SequenceId, int]]) -> None:
        """Start to compute masks for sequences that sample in this step.

        Each comes with the number of its output tokens; those without a grammar are passed over.
        """
        for sequence_id, num_output_tokens in sampling:
            row = self._rows.get(sequence_id)
            if row is not None:
                self._masks[sequence_id] = self._thread.submit(row.mask, num_output_tokens)

    def mask(self, sequence_id: SequenceId) -> Mask | None:
        """Return the mask ``[V]`` of a prepared sequence; None without a grammar.

        Raises:
            InvalidRequestError: see ``GrammarRow.mask``.
        """
        prepared = self._masks.pop(sequence_id, None)
        return None if prepared is None else prepared.result()

    def accept(self, sequence_id: SequenceId, token_id: TokenId) -> Accepted | None:
        """Move a sequence on by its sampled token; None without a grammar.

        Raises:
            InvalidRequestError: see ``GrammarRow.accept``.
        """
        row = self._rows.get(sequence_id)
        return None if row is None else row.accept(token_id)
