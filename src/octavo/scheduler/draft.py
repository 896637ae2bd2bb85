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
        counts, name = self.counts, sequence.sequence_id
        counts[name] = counts.get(name, 0) + num_tokens

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
        running = roster.running
        for sequence_id, num_tokens in self.counts.items():
            sequence = running[sequence_id]
            start, end = sequence.num_computed, sequence.num_computed + num_tokens
            is_last = end == len(sequence.token_ids)
            if not sequence.is_known:
                _introduce(sequence, new)
            forks: tuple[SequenceId, ...] = ()
            if is_last and sequence.num_reserved and not sequence.in_beam:
                branches = roster.group(sequence).pending[: sequence.num_reserved]
                forks = tuple(branch.sequence_id for branch in branches)
                for branch in branches:
                    if not branch.is_known:
                        _introduce(branch, new)
            first_block, block_ids = cache.take_changes(sequence_id)
            scheduled.append(
                ScheduledSequence(
                    sequence_id,
                    tuple(sequence.token_ids[start:end]),
                    start,
                    first_block,
                    block_ids,
                    is_last and sequence.max_tokens > 0,
                    forks,
                )
            )
        return SchedulerOutput(
            step=step,
            new=tuple(new),
            scheduled=tuple(scheduled),
            copies=cache.take_copies(),
            released=roster.take_released(),
        )


def _introduce(sequence: Sequence, new: list[NewSequence]) -> None:
    """Tell the runner of a sequence."""
    assert sequence.sampling.seed is not None  # checked by Intake
    sequence.is_known = True
    new.append(
        NewSequence(
            sequence_id=sequence.sequence_id,
            prompt_token_ids=sequence.request.prompt_token_ids,
            output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
            sampling=sequence.sampling,
            seed=sequence.sampling.seed,
            ending_token_ids=sequence.ending_token_ids,
        )
    )
