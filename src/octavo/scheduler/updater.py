"""Takes in what the runner computed for one plan."""

from collections.abc import Iterable
from typing import Final

from octavo.core.errors import InvariantError, RequestError
from octavo.core.ids import RequestId, SequenceId
from octavo.core.plan import ModelRunnerOutput, ScheduledSequence
from octavo.core.request import FinishReason, TokenLogprobs
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.beam_search import BeamSearch, Hypothesis
from octavo.scheduler.group import SequenceGroup
from octavo.scheduler.outcome import StepOutcome, StepUpdate
from octavo.scheduler.roster import Roster
from octavo.scheduler.sequence import Sequence

NOTHING: Final = Hypothesis((), 0.0, FinishReason.LENGTH)
"""What is found when only the prompt is to be scored."""

_Scores = dict[SequenceId, TokenLogprobs]


class StepUpdater:
    """Made for the step, thrown away with it: ``advance`` or ``fail`` each item, then ``build``."""

    def __init__(
        self, roster: Roster, cache: KVCacheManager, result: ModelRunnerOutput, now: float
    ) -> None:
        self._roster = roster
        self._cache = cache
        self._result = result
        self._now = now
        self._outcome = StepOutcome(now)
        self._scored: dict[RequestId, _Scores] = {}

    def advance(self, sequence: Sequence, item: ScheduledSequence) -> None:
        """Record that the planned tokens are computed, and what was sampled after them."""
        error = self._result.failed.get(item.sequence_id)
        if error is not None:
            self.fail(sequence, item, error)
            return
        if item.start < sequence.prefill_end:
            self._outcome.count_prefilled(sequence, item)
        sequence.num_computed += len(item.token_ids)
        self._cache.commit(sequence.sequence_id, sequence.token_ids, sequence.num_computed)
        if sequence.wants_prompt_logprobs:
            entries = self._result.prompt_logprobs.get(item.sequence_id, ())
            sequence.record_prompt_logprobs(item.start, entries)
        if sequence.num_computed < len(sequence.token_ids):
            return
        if sequence.in_beam:
            self._collect(sequence)
            return
        children: list[Sequence] = []
        if not sequence.num_output_tokens and self._roster.group(sequence).pending:
            children = self._roster.branch_off(sequence, item.forks)
        self._sample(sequence)
        for child in children:
            self._sample(child)

    def fail(self, sequence: Sequence, item: ScheduledSequence, error: RequestError) -> None:
        """End a sequence whose result is unusable, and the branches that were to share it."""
        group = self._roster.group(sequence)
        if group.beam is not None:
            self._fail_search(group, error)
            return
        for branch in list(group.pending):
            if branch.sequence_id in item.forks:
                self._fail_one(branch, error)
        self._fail_one(sequence, error)

    def build(self) -> StepUpdate:
        """Let beam searches go on, and return all that the step brought."""
        for request_id, scores in self._scored.items():
            group = self._roster.groups.get(request_id)
            if group is not None and group.beam is not None:
                self._search(group, group.beam, scores)
        return self._outcome.build()

    def _sample(self, branch: Sequence) -> None:
        error = self._result.failed.get(branch.sequence_id)
        if error is not None:
            self._fail_one(branch, error)
            return
        if branch.max_tokens:
            reason = self._outcome.add_tokens(branch, self._result)
        else:
            reason = self._outcome.add_prompt(branch, self._result)
        if reason is not None:
            stats = self._roster.end(branch, reason, self._now, branch.num_output_tokens)
            self._outcome.add_finished(stats)

    def _fail_one(self, sequence: Sequence, error: RequestError) -> None:
        self._outcome.add_error(sequence, error)
        num_tokens = sequence.num_output_tokens
        stats = self._roster.end(sequence, FinishReason.ERROR, self._now, num_tokens)
        self._outcome.add_finished(stats)

    def _collect(self, beam: Sequence) -> None:
        group = self._roster.group(beam)
        assert group.beam is not None
        if beam.wants_prompt_logprobs:
            group.beam.prompt_logprobs = beam.take_prompt_logprobs()
        if not beam.max_tokens:
            self._end_search(group, (NOTHING,) * group.request.sampling.n)
            return
        scores = self._result.logprobs.get(beam.sequence_id)
        if not scores:
            raise InvariantError("the runner left out logprobs", story=beam.tell())
        self._scored.setdefault(beam.request_id, {})[beam.sequence_id] = scores[0]

    def _search(self, group: SequenceGroup, beam: BeamSearch, scores: _Scores) -> None:
        if len(scores) != len(group.branches):
            raise InvariantError("only some beams of a search were computed", story=group.tell())
        beams = beam.advance(scores)
        if beams:
            beam.place(self._roster.grow(group, beams))
        else:
            self._end_search(group, beam.best())

    def _end_search(self, group: SequenceGroup, found: Iterable[Hypothesis]) -> None:
        views = group.results()
        self._roster.end_group(group, "the search is over")
        for view, hypothesis in zip(views, found, strict=True):
            self._outcome.add_found(view, hypothesis.tokens, hypothesis.reason)
            self._outcome.add_finished(
                view.final_stats(hypothesis.reason, self._now, view.num_output_tokens)
            )

    def _fail_search(self, group: SequenceGroup, error: RequestError) -> None:
        views = group.results()
        self._roster.end_group(group, error.message)
        for view in views:
            self._outcome.add_error(view, error)
            self._outcome.add_finished(view.final_stats(FinishReason.ERROR, self._now, 0))
