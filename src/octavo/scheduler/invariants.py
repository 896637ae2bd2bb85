"""The laws of the scheduler as functions; each raises InvariantError at the first breach."""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Protocol

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvariantError
from octavo.core.ids import RequestId, SequenceId
from octavo.core.plan import SchedulerOutput
from octavo.kvcache.invariants import check_cache
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.group import SequenceGroup
from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.sequence import Sequence


class SchedulerState(Protocol):
    """The collections that the laws speak of."""

    @property
    def running(self) -> Mapping[SequenceId, Sequence]: ...
    @property
    def waiting(self) -> tuple[Sequence, ...]: ...
    @property
    def live(self) -> Mapping[RequestId, SequenceGroup]: ...
    @property
    def cache(self) -> KVCacheManager: ...


def check_scheduler(state: SchedulerState) -> None:
    """Every live sequence is in the one collection of its status, and the cache agrees."""
    check_cache(state.cache)
    waiting, running = state.waiting, tuple(state.running.values())
    groups = state.live.values()
    live = [branch for group in groups for branch in group.branches]
    held = [*waiting, *running, *(branch for group in groups for branch in group.pending)]
    if sorted(s.sequence_id for s in live) != sorted(s.sequence_id for s in held):
        raise InvariantError("waiting and running differ from the live sequences")
    if set(state.running) != set(state.cache.tables):
        raise InvariantError("other sequences hold blocks than those that run")
    _check_expecting(waiting, state.cache)
    for sequence in waiting:
        _check_waiting(sequence)
    for group in groups:
        _check_group(group)
    for sequence in running:
        _check_running(sequence, state.cache)


def _require(condition: bool, sequence: Sequence, message: str) -> None:
    if not condition:
        raise InvariantError(message, story=sequence.tell())


def _check_group(group: SequenceGroup) -> None:
    """Branches are pending only while one computes their prompt; beams keep in step."""
    active = list(group.active)
    _require(bool(active), group.branches[0], "all branches of its request are pending")
    if group.pending:
        _require(len(active) == 1, active[0], "it is active beside pending branches")
        _require(not active[0].num_output_tokens, active[0], "it has output, but did not fork")
    for branch in group.pending:
        _require(branch.status is SequenceStatus.WAITING, branch, "it is pending, but ran")
    if group.beam is not None:
        _require(len(active) <= group.beam.width, active[0], "its search has too many beams")
        lengths = {len(branch.token_ids) for branch in active}
        _require(len(lengths) == 1, active[0], "beams of one search differ in length")


def _check_expecting(waiting: Collection[Sequence], cache: KVCacheManager) -> None:
    """Those that wait, and they alone, have spared what they will hit."""
    expecting = {waiter.sequence_id: waiter.token_ids for waiter in cache.expecting()}
    expected = {s.sequence_id: s.token_ids for s in waiting if s.may_read_cache}
    if expecting != (expected if cache.looks_ahead else {}):
        raise InvariantError("prefixes are spared for other sequences than those that wait")


def _check_waiting(sequence: Sequence) -> None:
    preempted = sequence.status is SequenceStatus.PREEMPTED
    _require(
        preempted or sequence.status is SequenceStatus.WAITING,
        sequence,
        "it waits in a wrong state",
    )
    _require(sequence.num_computed == 0, sequence, "a waiting sequence has computed tokens")
    _require(
        preempted == (sequence.num_preemptions > 0), sequence, "its preemptions are miscounted"
    )


def _check_running(sequence: Sequence, cache: KVCacheManager) -> None:
    table = cache.tables[sequence.sequence_id]
    size = cache.config.block_size
    _require(sequence.status is SequenceStatus.RUNNING, sequence, "it runs in a wrong state")
    _require(sequence.num_uncomputed >= 1, sequence, "a running sequence has nothing to compute")
    _require(sequence.num_computed <= len(table.block_ids) * size, sequence, "its KV has no blocks")
    if cache.config.enable_prefix_caching and sequence.request.retention.store:
        _require(
            table.num_committed == sequence.num_computed // size,
            sequence,
            "its full computed blocks are not those that it committed",
        )
    _require(
        sequence.num_output_tokens < max(sequence.max_tokens, 1), sequence, "it ran past its end"
    )


def check_plan(plan: SchedulerOutput, config: SchedulerConfig, state: SchedulerState) -> None:
    """The plan keeps the limits, and its blocks cover exactly what it computes."""
    ids = [item.sequence_id for item in plan.scheduled]
    if len(set(ids)) != len(ids) or len(ids) > config.max_num_seqs:
        raise InvariantError(f"plan {plan.step} has a sequence twice, or too many")
    if plan.num_tokens > config.max_num_batched_tokens:
        raise InvariantError(f"plan {plan.step} exceeds the token budget")
    if state.live and not ids:
        raise InvariantError(f"plan {plan.step} is empty although {len(state.live)} requests live")
    forks = [sequence_id for item in plan.scheduled for sequence_id in item.forks]
    if not {new.sequence_id for new in plan.new} <= {*ids, *forks}:
        raise InvariantError(f"plan {plan.step} has a new sequence that computes nothing")
    if len(state.running) + len(forks) > config.max_num_seqs:
        raise InvariantError(f"plan {plan.step} forks more sequences than may run")
    holders = Counter(
        block_id for table in state.cache.tables.values() for block_id in table.block_ids
    )
    for item in plan.scheduled:
        sequence = state.running[item.sequence_id]
        table = state.cache.tables[item.sequence_id]
        end = item.start + len(item.token_ids)
        _require(item.start == sequence.num_computed, sequence, "its chunk starts elsewhere")
        _require(bool(item.token_ids), sequence, "it is planned without tokens")
        _require(
            list(item.token_ids) == sequence.token_ids[item.start : end], sequence, "wrong tokens"
        )
        size = state.cache.config.block_size
        _require(end <= len(table.block_ids) * size, sequence, "its chunk has no blocks")
        _require(
            all(holders[b] == 1 for b in table.block_ids[item.start // size : -(-end // size)]),
            sequence,
            "its chunk would write a block that others hold",
        )
        _require(
            item.start // size >= table.num_committed
            or not state.cache.config.enable_prefix_caching,
            sequence,
            "its chunk would overwrite a cached block",
        )
