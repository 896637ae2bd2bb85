"""The border between the towers: what the scheduler plans for a step, and what came of it.

Diffs, not state: the runner keeps one row per sequence from ``NewSequence`` to ``released``. To the
runner a preemption is a release; when the sequence comes back it is new again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from octavo.core.errors import RequestError
from octavo.core.ids import BlockId, SequenceId, TokenId
from octavo.core.request import TokenLogprobs
from octavo.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the runner does not know (any more)."""

    sequence_id: SequenceId
    prompt_token_ids: tuple[TokenId, ...]
    output_token_ids: tuple[TokenId, ...]
    """Tokens generated before it was preempted; empty for a fresh one."""
    sampling: SamplingParams
    seed: int
    """Seed of its random stream, resolved; draw k of the stream belongs to output token k."""
    ending_token_ids: frozenset[TokenId]
    """All ids that end its output; the sampler bans them for the first ``min_tokens`` tokens."""


class ScheduledSequence(NamedTuple):
    """Tokens of one sequence whose KV is computed in this step.

    A tuple, since every step makes one for each sequence: a frozen dataclass takes four times as
    long to make.
    """

    sequence_id: SequenceId
    token_ids: tuple[TokenId, ...]
    """Tokens at positions ``start`` to ``start + len(token_ids) - 1``; at least one."""
    start: int
    """Number of tokens of this sequence whose KV is there already."""
    first_block: int
    """Index in the block table from which on ``block_ids`` replace what the runner has."""
    block_ids: tuple[BlockId, ...]
    """Only what changed since the sequence's last step; the table then covers all tokens."""
    samples: bool
    """Whether the logits of the last token choose the next one."""
    forks: tuple[SequenceId, ...] = ()
    """New sequences with the same tokens: each samples its own next token from these logits, and
    is scheduled itself from the next plan on, with blocks that hold what is computed here."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """KV of a whole block to copy before the step writes (copy-on-write).

    Copies are made in the order of the plan: a later one may overwrite the source of an earlier.
    """

    source: BlockId
    target: BlockId


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan of one step. The runner first releases, then copies, then computes."""

    step: int
    new: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    """In the order of the packed batch: running sequences first, then resumed, then new."""
    copies: tuple[BlockCopy, ...] = ()
    released: tuple[SequenceId, ...] = ()
    """Sequences that finished, were aborted or were preempted since the last plan."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed by this step."""
        return sum(len(item.token_ids) for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What the runner computed; keys are sequences of the plan."""

    sampled: Mapping[SequenceId, tuple[TokenId, ...]] = field(default_factory=dict)
    """Tokens chosen for each sequence that samples: one, and those that its grammar then forces."""
    logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """One entry per sampled token, for sequences that asked."""
    prompt_logprobs: Mapping[SequenceId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For sequences that asked: entry i scores the prompt token at position ``start + i + 1``."""
    failed: Mapping[SequenceId, RequestError] = field(default_factory=dict)
    """Sequences that have no usable result, and why: the request's own fault (a grammar that
    becomes too costly) or the server's (NaN logits)."""
    completed: frozenset[SequenceId] = frozenset()
    """Sequences whose grammar allows nothing after their sampled tokens."""
    pooled: Mapping[SequenceId, tuple[float, ...]] = field(default_factory=dict)
    """Embeddings of prompts that are complete, for sequences that asked."""


class ModelRunner(Protocol):
    """Executes plans. The engine holds one; the simulator and tests put another in its place."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Release, copy, compute and sample as planned.

        An exception fails every sequence of the plan and nobody else; the runner must still be
        usable afterwards.
        """
