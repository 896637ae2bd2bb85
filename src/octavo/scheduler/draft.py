"""The plan of a step while it is being made."""

from octavo.core.ids import SequenceId
from octavo.core.plan import NewSequence
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.sequence import Sequence


class StepDraft:
    """Who gets how many tokens in this step; made for the step, thrown away with it."""

    __slots__ = ("budget", "counts", "has_preempted", "started")

    def __init__(self, max_num_tokens: int) -> None:
        self.budget = TokenBudget(max_num_tokens)
        self.counts: dict[SequenceId, int] = {}
        """Tokens of each placed sequence, in the order of the batch."""
        self.started: list[Sequence] = []
        """Placed sequences that the runner does not know."""
        self.has_preempted = False

    def place(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a sequence (more) tokens of this step."""
        self.budget.spend(num_tokens)
        counts = self.counts
        counts[sequence.sequence_id] = counts.get(sequence.sequence_id, 0) + num_tokens

    def start(self, sequence: Sequence, num_tokens: int) -> None:
        """Place a sequence that the runner does not know."""
        self.place(sequence, num_tokens)
        self.started.append(sequence)

    def withdraw(self, victim: Sequence) -> None:
        """Take a preempted sequence out, with its budget, if it was placed already."""
        self.has_preempted = True
        placed = self.counts.pop(victim.sequence_id, 0)
        self.budget.refund(placed)

    def new_sequences(self) -> tuple[NewSequence, ...]:
        """Describe the started sequences to the runner."""
        return tuple(map(_describe, self.started))


def _describe(sequence: Sequence) -> NewSequence:
    sampling = sequence.request.sampling
    assert sampling.seed is not None  # checked by Intake
    return NewSequence(
        sequence_id=sequence.sequence_id,
        prompt_token_ids=sequence.request.prompt_token_ids,
        output_token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
        sampling=sampling,
        seed=sampling.seed,
        ending_token_ids=sequence.ending_token_ids,
    )
