"""The fake runner: it notices every way in which KV can be another sequence's."""

import subprocess
import sys

import pytest

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.plan import BlockCopy, NewSequence, ScheduledSequence, SchedulerOutput
from octavo.core.sampling import SamplingParams
from octavo.runner.fake import FakeRunner, Faults, InjectedFault
from support_runner import BLOCK_SIZE, Driver
from support_sampling import GREEDY, new_sequence


def fake(**changes: object) -> FakeRunner:
    """Return a fake runner with 20 blocks."""
    return FakeRunner(block_size=BLOCK_SIZE, num_blocks=20, vocab_size=50, **changes)  # type: ignore[arg-type]


def work(
    new: NewSequence, start: int, blocks: list[int], *, samples: bool = True
) -> ScheduledSequence:
    """Schedule a prompt from ``start`` to its end."""
    ids = tuple(BlockId(block) for block in blocks)
    return ScheduledSequence(new.sequence_id, new.prompt_token_ids[start:], start, 0, ids, samples)


FIRST = new_sequence(0, [1, 2, 3, 4, 5, 6])
SECOND = new_sequence(1, [9, 2, 3, 4, 5, 6])
SHORT = new_sequence(1, [1, 2, 3, 4])


def after_first(second: NewSequence, item: ScheduledSequence, **plan: object) -> None:
    """Compute FIRST in blocks 3 and 4, then one more sequence."""
    runner = fake()
    runner.execute(SchedulerOutput(0, (FIRST,), (work(FIRST, 0, [3, 4]),)))
    runner.execute(SchedulerOutput(1, (second,), (item,), **plan))  # type: ignore[arg-type]


def test_reads_a_shared_prefix() -> None:
    """Turns red when right sharing is refused: a full block of equal tokens."""
    twin = new_sequence(1, [1, 2, 3, 4, 7])
    after_first(twin, work(twin, 4, [3, 5]))


def test_notices_a_stale_prefix() -> None:
    """Turns red when KV of other tokens passes, even where position and token agree."""
    with pytest.raises(InvariantError, match="other tokens in block 3"):
        after_first(SECOND, work(SECOND, 4, [3, 5]))


def test_notices_a_prefix_that_was_never_computed() -> None:
    """Turns red when a hit on an empty block passes."""
    with pytest.raises(InvariantError, match="nothing in block 6"):
        after_first(SECOND, work(SECOND, 4, [6, 5]))


def test_notices_a_write_into_a_shared_block() -> None:
    """Turns red when a sequence may overwrite KV that another one of the batch holds."""
    items = (work(FIRST, 0, [3, 4]), work(SECOND, 0, [5, 4]))
    with pytest.raises(InvariantError, match="writes block 4"):
        fake().execute(SchedulerOutput(0, (FIRST, SECOND), items))


def test_notices_that_its_kv_was_overwritten_while_it_did_not_run() -> None:
    """Turns red when a block can be taken from a sequence that misses a step."""
    runner = fake()
    runner.execute(SchedulerOutput(0, (FIRST,), (work(FIRST, 0, [3, 4]),)))
    runner.execute(SchedulerOutput(1, (SECOND,), (work(SECOND, 0, [5, 4]),)))
    again = work(FIRST, 5, [3, 4])
    with pytest.raises(InvariantError, match="other tokens in block 4"):
        runner.execute(SchedulerOutput(2, (), (again,)))


def test_notices_a_missed_and_a_wrong_copy() -> None:
    """Turns red when copy-on-write can be forgotten, or copy the wrong block."""
    copy = BlockCopy(BlockId(3), BlockId(5))
    after_first(SHORT, work(SHORT, 3, [5]), copies=(copy,))
    with pytest.raises(InvariantError, match="nothing in block 5"):
        after_first(SHORT, work(SHORT, 3, [5]))
    with pytest.raises(InvariantError, match="other tokens in block 5"):
        after_first(SHORT, work(SHORT, 3, [5]), copies=(BlockCopy(BlockId(4), BlockId(5)),))
    with pytest.raises(InvariantError, match="outside the pool"):
        after_first(SHORT, work(SHORT, 3, [5]), copies=(BlockCopy(BlockId(3), BlockId(20)),))


def test_notices_inconsistent_plans() -> None:
    """Turns red when the border between scheduler and runner loosens: one line per rule."""
    item = work(FIRST, 0, [3, 4])
    for plan, message in (
        (SchedulerOutput(0, released=(SequenceId(0),)), "was not known"),
        (SchedulerOutput(0, (FIRST, FIRST)), "was known already"),
        (SchedulerOutput(0, (), (item,)), "was never new"),
        (SchedulerOutput(0, (FIRST,), (item, item)), "twice"),
        (SchedulerOutput(0, (FIRST,), (work(FIRST, 0, [3]),)), "does not cover"),
        (SchedulerOutput(0, (FIRST,), (work(FIRST, 0, [3, 20]),)), "leaves the pool"),
        (SchedulerOutput(0, (FIRST,), (work(SHORT, 0, [3]),)), "was never new"),
        (
            SchedulerOutput(
                0, (FIRST,), (ScheduledSequence(SequenceId(0), (1,), 0, 1, (BlockId(1),), False),)
            ),
            "leave a gap",
        ),
        (
            SchedulerOutput(
                0, (FIRST,), (ScheduledSequence(SequenceId(0), (1,), 0, 0, (BlockId(1),), True),)
            ),
            "before all its tokens",
        ),
        (
            SchedulerOutput(
                0, (FIRST,), (ScheduledSequence(SequenceId(0), (8,), 0, 0, (BlockId(1),), False),)
            ),
            "are not those",
        ),
    ):
        with pytest.raises(InvariantError, match=message):
            fake().execute(plan)


def test_output_is_a_pure_function_of_the_sequence() -> None:
    """Turns red when chunks, company or preemption change what the fake runner says."""
    sampled = SamplingParams(temperature=1.0, max_tokens=None)
    outputs = []
    for chunk in (1, 3, 100):
        driver = Driver(fake())
        for key, params in enumerate((GREEDY, sampled, sampled)):
            driver.start(new_sequence(key, [1, 2, 3, 4, 5], params, seed=key))
        driver.generate(0, 1, 2, num_tokens=3, chunk=chunk)
        driver.preempt(1)
        outputs.append(driver.generate(0, 1, 2, num_tokens=8, chunk=chunk))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({tuple(output) for output in outputs[0]}) == 3


def test_ending_ids_wait_for_min_tokens() -> None:
    """SA-14: turns red when the fake model may end before min_tokens, as no real one may."""
    driver = Driver(FakeRunner(block_size=BLOCK_SIZE, num_blocks=20, vocab_size=3))
    driver.start(
        new_sequence(0, [1], SamplingParams(temperature=0.0, min_tokens=10), ending=[0, 2])
    )
    [output] = driver.generate(0, num_tokens=40)
    assert set(output[:10]) == {1}
    assert {0, 2} <= set(output[10:])


def test_prompt_logprobs_come_in_any_chunks() -> None:
    """SA-17: turns red when the fake runner's prompt scores depend on chunks."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1)
    runs = []
    for chunk in (1, 4, 100):
        driver = Driver(fake())
        driver.start(new_sequence(0, range(17), params))
        steps = [driver.step(0, chunk=chunk) for _ in range(-(-17 // chunk))]
        runs.append([s for step in steps for s in step.prompt_logprobs.get(SequenceId(0), ())])
        assert len(steps[-1].logprobs[SequenceId(0)]) == 1
    assert runs[0] == runs[1] == runs[2]
    assert [score.token_id for score in runs[0]] == list(range(1, 17))


def test_failed_work_ruins_its_kv() -> None:
    """Turns red when blocks that a failed step wrote can be hit as if they were whole."""
    for faults, raises in (
        (Faults(raises=lambda call: call == 0), True),
        (Faults(fails=lambda call, sequence_id: sequence_id == 0), False),
    ):
        runner = fake(faults=faults)
        plan = SchedulerOutput(0, (FIRST,), (work(FIRST, 0, [3, 4]),))
        if raises:
            with pytest.raises(InjectedFault):
                runner.execute(plan)
        else:
            assert set(runner.execute(plan).failed) == {0}
        twin = new_sequence(1, [1, 2, 3, 4, 7])
        with pytest.raises(InvariantError, match="failed work left"):
            runner.execute(
                SchedulerOutput(1, (twin,), (work(twin, 4, [3, 5]),), released=(SequenceId(0),))
            )
        assert runner.sequence_ids == {1}


def test_needs_no_numpy() -> None:
    """Turns red when the simulator, which puts the fake runner in the tensor tower's place, is
    made to load it."""
    code = "import sys, octavo.runner.fake; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
