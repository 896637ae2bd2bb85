"""Who waits, who runs and who is gone: the moves between them, each done in one place."""

from collections.abc import Collection, Mapping
from types import MappingProxyType

from octavo.core.ids import RequestId, SequenceId
from octavo.core.request import FinishReason, RequestStats
from octavo.kvcache.manager import CacheHit, KVCacheManager
from octavo.scheduler.beam_search import Beam
from octavo.scheduler.group import SequenceGroup
from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.policies import QueuePolicy
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.sequence import Sequence


class Roster:
    """Keeps the queue, the running set, the block tables and the runner's rows in step.

    It decides nothing: the scheduler says who moves.
    """

    def __init__(self, cache: KVCacheManager, policy: QueuePolicy, max_num_seqs: int) -> None:
        self.queue = WaitingQueue(policy)
        """All and only sequences that wait or are preempted, but for pending branches."""
        self._cache = cache
        self._max_num_seqs = max_num_seqs
        self._running: dict[SequenceId, Sequence] = {}
        self._groups: dict[RequestId, SequenceGroup] = {}
        self._released: list[SequenceId] = []
        self._next_id = 0

    @property
    def running(self) -> Mapping[SequenceId, Sequence]:
        """All and only sequences with status RUNNING, in order of start."""
        return MappingProxyType(self._running)

    @property
    def groups(self) -> Mapping[RequestId, SequenceGroup]:
        """All requests that have not ended."""
        return MappingProxyType(self._groups)

    @property
    def next_id(self) -> int:
        """The lowest sequence id that was never used."""
        return self._next_id

    @property
    def num_taken(self) -> int:
        """Places in the batch that are taken, or kept free for branches to come."""
        reserved = sum(sequence.num_reserved for sequence in self._running.values())
        return len(self._running) + reserved

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, and branches that wait for their prompt to be computed."""
        return len(self.queue) + sum(len(group.pending) for group in self._groups.values())

    def num_outside(self, group: SequenceGroup) -> int:
        """Count the running sequences of other requests."""
        inside = sum(branch.is_running for branch in group.branches)
        return len(self._running) - inside

    def group(self, sequence: Sequence) -> SequenceGroup:
        """Return the branches of the sequence's request."""
        return self._groups[sequence.request_id]

    def add(self, group: SequenceGroup) -> None:
        """Take in a new request."""
        self._groups[group.request.request_id] = group
        self._next_id += len(group.branches)
        if not self._cache.can_fork:
            group.pending.clear()
            group.branches[0].num_reserved = 0
        for branch in list(group.active):
            self.wait(branch)

    def wait(self, sequence: Sequence) -> None:
        """Queue a sequence, and spare what it will hit from eviction."""
        self.queue.push(sequence)
        if sequence.may_read_cache:
            self._cache.expect(sequence.sequence_id, sequence.request.identity, sequence.token_ids)

    def start(self, sequence: Sequence, hit: CacheHit, why: str) -> None:
        """Let a queued sequence run, whose blocks are there."""
        self.queue.remove(sequence)
        sequence.move(SequenceStatus.RUNNING, why)
        sequence.num_computed = hit.num_tokens
        self._running[sequence.sequence_id] = sequence

    def preempt(self, sequence: Sequence, why: str) -> None:
        """Take a running sequence's blocks and queue it again."""
        sequence.move(SequenceStatus.PREEMPTED, why)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.group(sequence).num_preemptions += 1
        sequence.holds_last = sequence.in_beam and sequence.num_output_tokens > 0
        self._drop(sequence)
        self.wait(sequence)

    def branch_off(self, parent: Sequence, forks: Collection[SequenceId]) -> list[Sequence]:
        """Fork the pending branches that were planned; the others queue as sequences of their own.

        To be called when the parent has computed the prompt, and before it has output.
        """
        group = self.group(parent)
        pending, group.pending = group.pending, []
        parent.num_reserved = 0
        children = [branch for branch in pending if branch.sequence_id in forks]
        for child in children:
            self._fork(parent, child)
        for branch in pending:
            if branch.status is SequenceStatus.WAITING:
                self.wait(branch)
        return children

    def grow(self, group: SequenceGroup, beams: Collection[Beam]) -> dict[SequenceId, Beam]:
        """Fork and prune the running beams of a search into its next ones.

        The first beam that continues a sequence stays in it, the others fork off; a sequence that
        none continues is dropped. Forks come first, so nothing that is still needed is let go.
        """
        parents = {branch.sequence_id: branch for branch in group.branches}
        placed: dict[SequenceId, Beam] = {}
        branches: list[Sequence] = []
        for beam in beams:
            branch = parents[beam.parent]
            if branch.sequence_id in placed:
                child = self._new_beam(branch)
                self._fork(branch, child)
                branch = child
            placed[branch.sequence_id] = beam
            branches.append(branch)
        for sequence_id, parent in parents.items():
            if sequence_id not in placed:
                self._leave(parent, "pruned")
        for branch, beam in zip(branches, beams, strict=True):
            branch.token_ids.append(beam.tokens[-1].token_id)
            branch.num_reserved = 0
        assert group.beam is not None
        branches[0].num_reserved = group.beam.width - len(branches)
        group.branches = branches
        return placed

    def level_beams(self) -> None:
        """Let searches go on whose beams have all caught up after a preemption."""
        for sequence in self._running.values():
            if sequence.holds_last and (group := self.group(sequence)).is_level:
                for branch in group.branches:
                    branch.holds_last = False

    def end(
        self, sequence: Sequence, reason: FinishReason, now: float, num_tokens: int
    ) -> RequestStats:
        """Let a completion go; its request goes with the last of them.

        If it was to compute the prompt for pending branches, the next of them does.
        """
        group = self.group(sequence)
        self._leave(sequence, reason.value)
        group.branches.remove(sequence)
        if sequence in group.pending:
            group.pending.remove(sequence)
        if not group.branches:
            del self._groups[sequence.request_id]
        elif len(group.pending) == len(group.branches):
            self._promote(group)
        return sequence.final_stats(reason, now, num_tokens)

    def end_group(self, group: SequenceGroup, why: str) -> None:
        """Let all branches of a request go."""
        for branch in group.branches:
            self._leave(branch, why)
        del self._groups[group.request.request_id]

    def take_released(self) -> tuple[SequenceId, ...]:
        """Return the rows that the runner must drop, once."""
        released = tuple(self._released)
        self._released.clear()
        return released

    def _fork(self, parent: Sequence, child: Sequence) -> None:
        self._cache.fork(parent.sequence_id, child.sequence_id, parent.num_computed)
        child.follow(parent)
        child.move(SequenceStatus.RUNNING, f"forked off sequence {parent.sequence_id}")
        self._running[child.sequence_id] = child

    def _new_beam(self, parent: Sequence) -> Sequence:
        child = Sequence(
            SequenceId(self._next_id),
            parent.request,
            parent.max_tokens,
            parent.ending_token_ids,
            sampling=parent.sampling,
        )
        child.in_beam = True
        child.place = parent.place
        child.wants_prompt_logprobs = False
        self._next_id += 1
        return child

    def _promote(self, group: SequenceGroup) -> None:
        """Let the first of the pending branches compute the prompt."""
        for branch in group.pending:
            self._forget_row(branch)
        del group.pending[0]
        group.reserve(self._max_num_seqs)
        self.wait(group.branches[0])

    def _leave(self, sequence: Sequence, why: str) -> None:
        """Take a sequence out of the collection that holds it, for good."""
        if sequence.is_running:
            self._drop(sequence)
        elif sequence not in self.group(sequence).pending:
            self.queue.remove(sequence)
            self._cache.unexpect(sequence.sequence_id)
        self._forget_row(sequence)
        sequence.move(SequenceStatus.FINISHED, why)

    def _drop(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks and its row in the runner."""
        self._cache.free(sequence.sequence_id)
        del self._running[sequence.sequence_id]
        self._forget_row(sequence)

    def _forget_row(self, sequence: Sequence) -> None:
        if sequence.is_known:
            sequence.is_known = False
            self._released.append(sequence.sequence_id)
