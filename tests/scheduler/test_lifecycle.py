"""The small parts: transitions, budget, queue order, chunk sizes, and checks that can fail."""

from itertools import product

import pytest

from octavo.core.config import SchedulerConfig
from octavo.core.errors import InvariantError
from octavo.core.ids import RequestId, SequenceId
from octavo.core.request import Request
from octavo.core.sampling import SamplingParams
from octavo.scheduler.budget import TokenBudget
from octavo.scheduler.chunking import Chunking
from octavo.scheduler.invariants import check_plan, check_scheduler
from octavo.scheduler.lifecycle import TRANSITIONS, SequenceStatus, check_transition
from octavo.scheduler.policies import ByPriority, FirstComeFirstServed
from octavo.scheduler.preemption import WorstRankedLast
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.sequence import Sequence
from support_scheduler import IDENTITY, Harness

WAITING, RUNNING, PREEMPTED, FINISHED = SequenceStatus


def make(number, *, priority=0, arrival_time=0.0):
    """Return a fresh sequence."""
    request = Request(
        RequestId(f"r{number}"), (1, 2), SamplingParams(seed=0), IDENTITY, arrival_time, priority
    )
    return Sequence(SequenceId(number), request, 4, frozenset())


@pytest.mark.parametrize(("old", "new"), list(product(SequenceStatus, SequenceStatus)))
def test_only_the_tables_moves_are_legal(old, new):
    """Anything else raises with the story: a finished sequence can never run again."""
    legal = {
        (WAITING, RUNNING),
        (RUNNING, PREEMPTED),
        (PREEMPTED, RUNNING),
        (WAITING, FINISHED),
        (RUNNING, FINISHED),
        (PREEMPTED, FINISHED),
    }
    assert legal == TRANSITIONS
    if (old, new) in legal:
        check_transition(old, new, "")
    else:
        with pytest.raises(InvariantError, match=f"a {old.value} sequence") as caught:
            check_transition(old, new, "the story")
        assert caught.value.story == "the story"


def test_a_story_is_bounded():
    """A sequence that is preempted for ever does not grow without limit."""
    sequence = make(0)
    for _ in range(100):
        sequence.move(RUNNING, "again")
        sequence.move(PREEMPTED, "again")
    assert len(sequence.story) == 32
    assert "running -> preempted: again" in sequence.tell()


def test_the_budget_balances():
    """Spending more than is left and refunding more than was spent are bugs."""
    budget = TokenBudget(5)
    budget.spend(3)
    for wrong in (3, 0, -1):
        with pytest.raises(InvariantError):
            budget.spend(wrong)
    budget.refund(3)
    with pytest.raises(InvariantError):
        budget.refund(1)
    assert budget.left == 5


def test_the_queue_is_sorted_by_rank_then_preempted_then_arrival():
    """The order of insertion does not matter; removal finds its entry among equals."""
    queue = WaitingQueue(ByPriority())
    late, early = make(0, arrival_time=2.0), make(1, arrival_time=1.0)
    urgent = make(2, priority=-1, arrival_time=3.0)
    resumed = make(3, arrival_time=4.0)
    resumed.move(RUNNING, "")
    resumed.move(PREEMPTED, "")
    for sequence in (late, early, urgent, resumed):
        queue.push(sequence)
    assert [s.sequence_id for s in queue] == [2, 3, 1, 0]
    queue.remove(early)
    with pytest.raises(InvariantError, match="not in"):
        queue.remove(early)
    assert [s.sequence_id for s in queue] == [2, 3, 0]


def test_the_queue_may_lose_the_yielded_entry_while_iterated():
    """Admission removes as it goes; nobody is skipped or tried twice."""
    queue = WaitingQueue(FirstComeFirstServed())
    for number in range(5):
        queue.push(make(number))
    seen = []
    for sequence in queue:
        seen.append(sequence.sequence_id)
        if sequence.sequence_id in (0, 1, 3):
            queue.remove(sequence)
    assert seen == [0, 1, 2, 3, 4]
    assert [s.sequence_id for s in queue] == [2, 4]


def test_victims_are_the_worst_ranked_then_the_latest():
    """fcfs: the last arrived; priority: the worst priority, then the last arrived."""
    running = [
        make(0, priority=1, arrival_time=1.0),
        make(1, priority=5, arrival_time=0.0),
        make(2, priority=5, arrival_time=0.5),
        make(3, priority=0, arrival_time=9.0),
    ]
    assert WorstRankedLast(FirstComeFirstServed()).victim(running).sequence_id == 3
    assert WorstRankedLast(ByPriority()).victim(running).sequence_id == 2


@pytest.mark.parametrize("left", [1, 2, 3, 8, 9, 100])
def test_nobody_behind_a_prefill_is_shut_out(left):
    """With others behind it a prefill takes something and leaves something, where there is any."""
    chunking = Chunking(SchedulerConfig(max_model_len=512, max_num_batched_tokens=128))
    size = chunking.first(1000, left, others_behind=True)
    assert 1 <= size <= left
    assert left == 1 or left - size >= 1
    assert chunking.first(1000, left, others_behind=False) == left
    assert chunking.more(1000, size, left - size) == left - size


def break_table(harness):
    """Lose a sequence's blocks behind the scheduler's back."""
    harness.manager.free(SequenceId(0))


def break_reference(harness):
    """Count a reference that no table has."""
    harness.manager.pool.acquire(0)


def break_progress(harness):
    """Claim more computed tokens than were computed."""
    harness.scheduler.running[SequenceId(0)].num_computed += 4


def break_status(harness):
    """Let a running sequence believe that it waits."""
    harness.scheduler.running[SequenceId(0)].status = WAITING


def break_tree(harness):
    """Cache a block that is not full."""
    next(node for node in harness.manager.tree.nodes() if node.chunks).chunks[0] = (1,)


def break_waiting(harness):
    """Let a waiting sequence keep its progress."""
    harness.scheduler.waiting[0].num_computed = 1


@pytest.mark.parametrize(
    "breakage",
    [break_table, break_reference, break_progress, break_status, break_tree, break_waiting],
)
def test_the_checks_can_fail(breakage):
    """Each law is really checked: a state broken by hand is noticed."""
    harness = Harness(block_size=4, max_num_seqs=1)
    harness.add("r", range(6))
    harness.add("w", range(6))
    harness.step()
    check_scheduler(harness.scheduler)
    breakage(harness)
    with pytest.raises(InvariantError):
        check_scheduler(harness.scheduler)


def test_the_check_of_plans_can_fail():
    """A plan over the limits is noticed before it reaches the runner."""
    harness = Harness(block_size=4)
    harness.add("r", range(6))
    plan = harness.schedule()
    tight = SchedulerConfig(max_model_len=8, max_num_batched_tokens=5, max_num_seqs=4)
    with pytest.raises(InvariantError, match="exceeds the token budget"):
        check_plan(plan, tight, harness.scheduler)
    harness.scheduler.running[SequenceId(0)].token_ids[0] = 50
    with pytest.raises(InvariantError, match="wrong tokens"):
        check_plan(plan, harness.config, harness.scheduler)


def test_a_request_that_cannot_read_the_cache_spares_nothing() -> None:
    """Turns red if a mean over the prompt, computed whole, keeps others' blocks from eviction."""
    harness = Harness()
    harness.add("warm", [1, 2, 3, 4, 5])
    harness.run()
    harness.add("mean", [1, 2, 3, 4, 5], max_tokens=0, pooling="mean")
    assert not list(harness.manager.expecting())
    harness.add("last", [1, 2, 3, 4, 5], max_tokens=0, pooling="last")
    assert len(list(harness.manager.expecting())) == 1
