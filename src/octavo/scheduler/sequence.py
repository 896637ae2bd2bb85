"""One branch of a request while it lives in the scheduler."""

from collections import deque
from typing import Final, Protocol

from octavo.core.errors import InvariantError
from octavo.core.ids import RequestId, SequenceId, TokenId
from octavo.core.request import FinishReason, Request, RequestStats, TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.scheduler.lifecycle import SequenceStatus, check_transition

STORY_LENGTH: Final = 32
"""Moves that a sequence remembers."""


class SequenceView(Protocol):
    """What a policy may know of a sequence."""

    @property
    def sequence_id(self) -> SequenceId:
        """Unique."""

    @property
    def place(self) -> SequenceId:
        """Grows in the order of ``Scheduler.add``; the beams of one search share it."""

    @property
    def priority(self) -> int:
        """Lower runs first."""

    @property
    def arrival_time(self) -> float:
        """Seconds on the engine's clock."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that it may generate."""

    @property
    def num_preemptions(self) -> int:
        """Times it lost its blocks."""


class Sequence:
    """Tokens, progress and times of one sequence. Only the scheduler writes it.

    ::

        | prompt tokens      | output tokens |  = token_ids
        | computed: KV is there | uncomputed |
        0             num_computed       num_tokens

    Law: while it runs, its block table covers at least ``num_computed`` tokens; while it does not,
    ``num_computed`` is 0.
    """

    __slots__ = (
        "arrival_time",
        "ending_token_ids",
        "first_scheduled_time",
        "first_token_time",
        "holds_last",
        "in_beam",
        "index",
        "is_known",
        "last_token_time",
        "leader",
        "leader_preemptions",
        "max_tokens",
        "num_cached_tokens",
        "num_computed",
        "num_passed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_reserved",
        "place",
        "prefill_end",
        "priority",
        "prompt_logprobs",
        "request",
        "sampling",
        "sequence_id",
        "status",
        "story",
        "token_ids",
        "wait_target",
        "wants_prompt_logprobs",
    )

    def __init__(
        self,
        sequence_id: SequenceId,
        request: Request,
        max_tokens: int,
        ending_token_ids: frozenset[TokenId],
        *,
        index: int = 0,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.index = index
        """Which of the request's completions; 0 for a beam."""
        self.sampling = sampling or request.sampling
        """What the request asks of this branch."""
        self.max_tokens = max_tokens
        """Resolved: never None."""
        self.ending_token_ids = ending_token_ids
        """Ids that end the output once ``min_tokens`` tokens are there."""
        self.priority = request.priority
        self.arrival_time = request.arrival_time
        self.status = SequenceStatus.WAITING
        self.is_known = False
        """Whether the runner has a row for it."""
        self.in_beam = False
        self.place = sequence_id
        """Settles ties of arrival; that of the first beam for the others, so that a search is
        before or behind another as a whole."""
        self.holds_last = False
        """Whether it must not compute its last token before all beams of its search can."""
        self.num_passed = 0
        """Sequences behind it in the queue that a cache-aware policy started before it."""
        self.num_reserved = 0
        """Places in the batch that it keeps free for branches of its request, while it runs."""
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed = 0
        """Tokens whose KV is in the sequence's blocks."""
        self.num_cached_tokens = 0
        """Of them, those found in the cache when it first ran."""
        self.num_preemptions = 0
        self.prefill_end = self.num_prompt_tokens
        """Tokens that are prefilled: the prompt, and after a preemption what it computes again."""
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        """One entry per prompt token scored so far; the first token has no score."""
        self.wants_prompt_logprobs = self.sampling.prompt_logprobs is not None
        """Whether prompt logprobs were asked for and not delivered yet."""
        self.leader: Sequence | None = None
        """The running sequence whose prefix it waits for; None once it stops waiting."""
        self.leader_preemptions = 0
        """The leader's ``num_preemptions`` when the wait began."""
        self.wait_target = 0
        """Tokens that the leader must have computed for the wait to end."""
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.story: deque[str] = deque((f"added with {max_tokens=}",), maxlen=STORY_LENGTH)

    @property
    def request_id(self) -> RequestId:
        """The client's name for it."""
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is still to be computed: 1 for a decode, more if some were forced."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_running(self) -> bool:
        """Whether it has blocks and a place in the batch."""
        return self.status is SequenceStatus.RUNNING

    @property
    def num_due(self) -> int:
        """Tokens that may be computed now."""
        return len(self.token_ids) - self.num_computed - self.holds_last

    def follow(self, parent: "Sequence") -> None:
        """Take over the tokens and the progress of the branch that it is forked off."""
        self.token_ids = list(parent.token_ids)
        self.num_computed = parent.num_computed
        self.num_cached_tokens = parent.num_cached_tokens
        self.prefill_end = parent.prefill_end
        self.first_scheduled_time = parent.first_scheduled_time

    def move(self, new: SequenceStatus, why: str) -> None:
        """Change status.

        Raises:
            InvariantError: the lifecycle has no such move.
        """
        check_transition(self.status, new, self.tell())
        self.story.append(f"{self.status.value} -> {new.value}: {why}")
        self.status = new

    def tell(self) -> str:
        """Return what happened to it, for error messages."""
        lines = "\n".join(f"  {line}" for line in self.story)
        return (
            f"request {self.request_id!r}, completion {self.index} (sequence {self.sequence_id}): "
            f"{self.status.value}, "
            f"{self.num_computed} of {self.num_tokens} tokens computed, "
            f"{self.num_output_tokens} of {self.max_tokens} generated\n{lines}"
        )

    @property
    def may_read_cache(self) -> bool:
        """Whether what is asked of its prompt does not need every position computed."""
        return not self.wants_prompt_logprobs and self.sampling.pooling != "mean"

    def record_prompt_logprobs(self, start: int, entries: tuple[TokenLogprobs, ...]) -> None:
        """Keep the scores of prompt positions ``start + 1`` and following.

        A chunk that is computed again after a preemption replaces what it said before.

        Raises:
            InvariantError: an earlier position has no score yet, so the cache was read.
        """
        if start + 1 > len(self.prompt_logprobs):
            raise InvariantError(f"prompt logprobs skip to {start + 1}", story=self.tell())
        del self.prompt_logprobs[start + 1 :]
        self.prompt_logprobs += entries
        if len(self.prompt_logprobs) > self.num_prompt_tokens:
            raise InvariantError("more prompt logprobs than prompt tokens", story=self.tell())

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...] | None:
        """Return the prompt logprobs once, when the first output leaves; None otherwise."""
        if not self.wants_prompt_logprobs:
            return None
        if len(self.prompt_logprobs) != self.num_prompt_tokens:
            raise InvariantError("prompt logprobs are missing", story=self.tell())
        self.wants_prompt_logprobs = False
        taken = tuple(self.prompt_logprobs)
        self.prompt_logprobs = [None]
        return taken

    def final_stats(
        self, reason: FinishReason, now: float, num_generation_tokens: int
    ) -> RequestStats:
        """Return its life, as it ends now."""
        return RequestStats(
            request_id=self.request_id,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=num_generation_tokens,
            max_tokens=self.max_tokens,
            finish_reason=reason,
            num_preemptions=self.num_preemptions,
            arrival_time=self.arrival_time,
            first_scheduled_time=self.first_scheduled_time,
            first_token_time=self.first_token_time,
            last_token_time=self.last_token_time,
            finish_time=now,
            index=self.index,
        )
