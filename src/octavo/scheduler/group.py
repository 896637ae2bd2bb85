"""The branches of one request: completions that share a prompt, or the beams of a search."""

from collections.abc import Iterator
from dataclasses import replace

from octavo.core.ids import SequenceId, TokenId
from octavo.core.request import Request
from octavo.core.sampling import MAX_SEED, SamplingParams
from octavo.scheduler.beam_search import BeamSearch, num_candidates
from octavo.scheduler.sequence import Sequence


class SequenceGroup:
    """A request while it lives.

    ``n`` (or ``best_of``) completions are branches from the start. The first computes the prompt;
    the others are pending until they fork off it and go their own ways. A beam search begins with
    one branch and forks and prunes at every token.
    """

    __slots__ = ("beam", "branches", "num_preemptions", "pending", "request")

    def __init__(
        self, request: Request, branches: list[Sequence], beam: BeamSearch | None = None
    ) -> None:
        self.request = request
        self.branches = branches
        """Those that have not ended."""
        self.pending = branches[1:]
        """Of them, those that wait for the first to compute the prompt: in no queue."""
        self.beam = beam
        self.num_preemptions = 0
        """Of all its branches, those that have ended included."""

    @property
    def active(self) -> Iterator[Sequence]:
        """Branches that are in the queue or run."""
        return (branch for branch in self.branches if branch not in self.pending)

    @property
    def is_level(self) -> bool:
        """Whether all beams run and have all but their last token computed."""
        return all(branch.is_running and branch.num_uncomputed == 1 for branch in self.branches)

    def branch(self, index: int) -> Sequence | None:
        """Return the completion called ``index`` if it lives and is not a beam."""
        if self.beam is not None:
            return None
        return next((branch for branch in self.branches if branch.index == index), None)

    def reserve(self, max_num_seqs: int) -> None:
        """Let the first branch keep as many places free as the pending ones can take."""
        self.branches[0].num_reserved = min(len(self.pending), max_num_seqs - 1)

    def results(self) -> list[Sequence]:
        """Return stand-ins for the completions of a beam search, without output yet.

        What happened to the beams, whichever they were, is told with the first.
        """
        leader = self.branches[0]
        views = []
        for index in range(self.request.sampling.n):
            view = Sequence(
                leader.sequence_id,
                self.request,
                leader.max_tokens,
                leader.ending_token_ids,
                index=index,
            )
            view.follow(leader)
            del view.token_ids[view.num_prompt_tokens :]
            view.wants_prompt_logprobs = False
            views.append(view)
        views[0].num_preemptions = self.num_preemptions
        if self.beam is not None and self.beam.prompt_logprobs is not None:
            views[0].prompt_logprobs = list(self.beam.prompt_logprobs)
            views[0].wants_prompt_logprobs = True
        return views

    def tell(self) -> str:
        """Return what happened to it, for error messages."""
        return "\n".join(branch.tell() for branch in self.branches)


def make_group(
    request: Request,
    max_tokens: int,
    ending_token_ids: frozenset[TokenId],
    first_id: int,
    max_num_seqs: int,
) -> SequenceGroup:
    """Make the branches of a request; their ids count up from ``first_id``."""
    sampling = request.sampling
    if sampling.use_beam_search:
        root = SequenceId(first_id)
        beam = BeamSearch(root, sampling, max_tokens, ending_token_ids)
        wide = replace(sampling, logprobs=num_candidates(beam.width, len(ending_token_ids)))
        sequence = Sequence(root, request, max_tokens, ending_token_ids, sampling=wide)
        sequence.in_beam = True
        sequence.num_reserved = beam.width - 1
        return SequenceGroup(request, [sequence], beam)
    branches = [
        Sequence(
            SequenceId(first_id + index),
            request,
            max_tokens,
            ending_token_ids,
            index=index,
            sampling=_branch_sampling(sampling, index),
        )
        for index in range(sampling.num_branches)
    ]
    group = SequenceGroup(request, branches)
    group.reserve(max_num_seqs)
    return group


def _branch_sampling(sampling: SamplingParams, index: int) -> SamplingParams:
    """Return what a request for this completion alone would ask."""
    if sampling.num_branches == 1:
        return sampling
    assert sampling.seed is not None  # checked by Intake
    is_ranked = sampling.num_branches > sampling.n
    return replace(
        sampling,
        n=1,
        best_of=None,
        seed=(sampling.seed + index) % MAX_SEED,
        # Ranking needs the logprob of each chosen token, scoring the prompt is done once.
        logprobs=0 if is_ranked and sampling.logprobs is None else sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
    )
