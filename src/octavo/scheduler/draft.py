"""The plan of a step while it is being made."""

from octavo.core.ids import SequenceId
from octavo.core.plan import NewSequence, ScheduledSequence, SchedulerOutput
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.roster import Roster
from octavo.scheduler.sequence import Sequence


class StepDraft:
    """Who gets how many tokens in this step; made for the step, thrown away with it."""

    __slots__ = ("budget", "counts", "has_preempted", "started")

    def __init__(self, max_num_tokens: int) -> None:
        self.budget = TokenBudget(max_num_tokens)
        self.counts: dict[SequenceId, int] = {}
        """Tokens of each placed sequence, in the order of the batch."""
        self.started: list[Sequence] = []
        """Sequences that start in this step."""
        self.has_preempted = False

    def place(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence (more) tokens of this step."""
        self.budget.spend(num_tokens)
        counts = self.counts
        counts[sequence.sequence_id] = counts.get(sequence.sequence_id, 0) + num_tokens

    def start(self, sequence: Sequence, num_tokens: int) -> None:
        """Place a sequence that starts; without tokens if it found all that it may compute."""
        if num_tokens:
            self.place(sequence, num_tokens)
        self.started.append(sequence)

    def withdraw(self, victim: Sequence) -> None:
        """Take a preempted sequence out, with its budget, if it was placed already."""
        self.has_preempted = True
        placed = self.counts.pop(victim.sequence_id, 0)
        self.budget.refund(placed)

    def build(self, step: int, roster: Roster, cache: KVCacheManager) -> SchedulerOutput:
        """Return the plan, and note that the runner will know its sequences."""
        new: list[NewSequence] = []
        scheduled: list[ScheduledSequence] = []
        for sequence_id, num_tokens in self.counts.items():
            sequence = roster.running[sequence_id]
            start, end = sequence.num_computed, sequence.num_computed + num_tokens
            is_last = end == len(sequence.token_ids)
            forks: tuple[Sequence, ...] = ()
            if is_last and sequence.num_reserved and not sequence.in_beam:
                forks = tuple(roster.group(sequence).pending[: sequence.num_reserved])
            for known in (sequence, *forks):
                if not known.is_known:
                    known.is_known = True
                    new.append(_describe(known))
            first_block, block_ids = cache.take_changes(sequence_id)
            scheduled.append(
                ScheduledSequence(
                    sequence_id,
                    tuple(sequence.token_ids[start:end]),
                    start,
                    first_block,
                    block_ids,
                    is_last and sequence.max_tokens > 0,
                    tuple(fork.sequence_id for fork in forks),
                )
            )
        return SchedulerOutput(
            step=step,
            new=tuple(new),
            scheduled=tuple(scheduled),
            copies=cache.take_copies(),
            released=roster.take_released(),
        )


def _describe(sequence: Sequence) -> NewSequence:
    assert sequence.sampling.seed is not None  # checked by Intake
    return NewSequence(
        sequence_id=sequence.sequence_id,
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
        sampling=sequence.sampling,
        seed=sequence.sampling.seed,
        ending_token_ids=sequence.ending_token_ids,
    )
