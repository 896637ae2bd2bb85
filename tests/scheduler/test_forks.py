"""n and best_of: completions share their prompt's blocks, and equal those of separate requests."""

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.ids import BlockId, RequestId
from octavo.core.plan import BlockCopy
from octavo.core.request import FinishReason
from support_scheduler import Harness, Row, chain, completion

VOCAB = 97


def seeded(row: Row, kv: int) -> int:
    """Choose by the sequence's own seed, so that branches part at once."""
    return chain(kv, row.new.seed) % VOCAB


def prompt_of(seed: int, length: int) -> list[int]:
    """Return a prompt that no other seed begins like."""
    return [(seed * 31 + i * 7) % VOCAB for i in range(length)]


def separate(prompt, *, seed: int, max_tokens: int) -> list[int]:
    """Return what a request of its own gives with this seed."""
    harness = Harness(choose=seeded)
    harness.add("r", prompt, seed=seed, max_tokens=max_tokens)
    harness.run()
    return harness.tokens["r"]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("caching", [True, False])
def test_completions_equal_those_of_separate_requests(length, caching):
    """Completion i is the request with seed + i, wherever in a block the prompt ends."""
    harness = Harness(choose=seeded, caching=caching)
    harness.add("r", prompt_of(1, length), n=4, seed=10, max_tokens=9)
    harness.run()
    got = [harness.tokens[completion("r", index)] for index in range(4)]
    assert got == [separate(prompt_of(1, length), seed=10 + i, max_tokens=9) for i in range(4)]
    assert len(set(map(tuple, got))) == 4
    harness.assert_idle()


def test_the_prompt_is_computed_once_and_its_blocks_are_shared():
    """Only the block that the prompt ends in is copied, for all branches but the last to write."""
    harness = Harness(choose=seeded)
    harness.add("r", prompt_of(2, 10), n=3, max_tokens=3)
    plan = harness.schedule()
    assert plan.num_tokens == 10
    assert (len(plan.new), plan.scheduled[0].forks) == (3, (1, 2))
    assert harness.scheduler.stats().num_waiting == 2  # for the prompt, in no queue
    update = harness.execute(plan)
    assert harness.scheduler.stats().num_waiting == 0
    assert [output.index for output in update.outputs] == [0, 1, 2]
    assert harness.manager.usage().num_used == 3
    plan = harness.schedule()
    assert plan.num_tokens == 3
    assert plan.copies == (
        BlockCopy(BlockId(2), BlockId(3)),
        BlockCopy(BlockId(2), BlockId(4)),
    )
    assert harness.manager.usage().num_used == 5
    harness.execute(plan)
    harness.run()
    harness.assert_idle()


def test_no_block_is_copied_where_the_prompt_fills_its_last_one():
    """A full block is never written again, so branches begin new ones."""
    harness = Harness(choose=seeded)
    harness.add("r", prompt_of(3, 8), n=4, max_tokens=4)
    harness.run()
    assert not any(plan.copies for plan in harness.plans)


def test_common_output_is_shared_block_by_block():
    """Branches that sample the same tokens end up with the same blocks: greedy needs one set."""
    harness = Harness()
    harness.add("r", prompt_of(4, 6), n=3, max_tokens=12, temperature=0.0)
    for _ in range(9):
        harness.step()
    tables = [table.block_ids[:3] for table in harness.manager.tables.values()]
    assert tables[0] == tables[1] == tables[2]


def test_more_completions_than_places_run_one_after_the_other():
    """n above --max-num-seqs is served: those without a place find the prompt in the cache."""
    harness = Harness(choose=seeded, max_num_seqs=3)
    harness.add("r", prompt_of(5, 9), n=8, seed=0, max_tokens=6)
    harness.run()
    assert max(len(plan.scheduled) for plan in harness.plans) == 3
    for index in range(8):
        got = harness.tokens[completion("r", index)]
        assert got == separate(prompt_of(5, 9), seed=index, max_tokens=6)
    assert harness.oracle.num_computed_total < 9 + 5 * 3 + 8 * 9
    harness.assert_idle()


def test_a_group_waits_until_all_its_branches_have_a_place():
    """Otherwise the branches that find none would compute what they could have shared."""
    harness = Harness(choose=seeded, max_num_seqs=4)
    harness.add("a", prompt_of(6, 4), max_tokens=5)
    harness.add("b", prompt_of(7, 4), n=4, max_tokens=3)
    harness.add("c", prompt_of(8, 4), max_tokens=3)
    harness.step()
    assert [s.request_id for s in harness.scheduler.waiting] == ["b", "c"]
    harness.run()
    forks = [len(item.forks) for plan in harness.plans for item in plan.scheduled if item.forks]
    assert forks == [3]


def test_preempting_part_of_a_group_leaves_the_shared_blocks():
    """A victim gives back only what is its own; the others go on and all tokens stay the same."""
    harness = Harness(choose=seeded, num_blocks=8)
    harness.add("r", prompt_of(9, 16), n=3, seed=5, max_tokens=14)
    harness.run()
    assert harness.scheduler.stats().preemptions_total > 0
    for index in range(3):
        expected = separate(prompt_of(9, 16), seed=5 + index, max_tokens=14)
        assert harness.tokens[completion("r", index)] == expected
    harness.assert_idle()


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_finishing_one_branch_hurts_no_other(index, in_flight, steps):
    """A stop string ends one completion, at any time: also the one that computes the prompt."""
    harness = Harness(choose=seeded, max_num_batched_tokens=8)
    harness.add("r", prompt_of(10, 11), n=3, seed=1, max_tokens=6)
    for _ in range(steps):
        harness.step()
    plan = harness.schedule() if in_flight else None
    harness.scheduler.finish(RequestId("r"), num_tokens=0, now=harness.clock(), index=index)
    if plan is not None:
        harness.execute(plan)
    harness.run()
    for other in {0, 1, 2} - {index}:
        expected = separate(prompt_of(10, 11), seed=1 + other, max_tokens=6)
        assert harness.tokens[completion("r", other)] == expected
    assert not harness.scheduler.finish(RequestId("r"), num_tokens=0, now=0.0, index=index)
    harness.assert_idle()


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_abort_ends_all_branches(in_flight, steps):
    """KV-17: one entry per completion, pending ones included, and every block comes back."""
    harness = Harness(choose=seeded, max_num_batched_tokens=8)
    harness.add("r", prompt_of(11, 11), n=3, max_tokens=9)
    harness.add("other", prompt_of(12, 5), max_tokens=9)
    for _ in range(steps):
        harness.step()
    plan = harness.schedule() if in_flight else None
    ended = harness.abort("r")
    assert [(stats.index, stats.finish_reason) for stats in ended] == [
        (index, FinishReason.ABORT) for index in range(3)
    ]
    assert not harness.abort("r")
    if plan is not None:
        harness.execute(plan)
    harness.run()
    assert harness.tokens["other"] == separate(prompt_of(12, 5), seed=0, max_tokens=9)
    harness.assert_idle()


def test_a_failed_prompt_fails_the_branches_that_were_to_share_it():
    """Their KV is unusable too; branches that had no place compute their own."""
    harness = Harness(choose=seeded, max_num_seqs=2)
    harness.add("r", prompt_of(13, 6), n=3, seed=0, max_tokens=3)
    harness.oracle.failing = {0: "NaN"}
    update = harness.step()
    assert [(o.index, str(o.error)) for o in update.outputs] == [(1, "NaN"), (0, "NaN")]
    harness.run()
    expected = separate(prompt_of(13, 6), seed=2, max_tokens=3)
    assert harness.tokens[completion("r", 2)] == expected
    harness.assert_idle()


def test_one_failed_branch_ends_alone():
    """NaN in one branch is no reason to end the others."""
    harness = Harness(choose=seeded)
    harness.add("r", prompt_of(14, 6), n=3, seed=0, max_tokens=5)
    harness.step()
    harness.oracle.failing = {1: "NaN"}
    harness.step()
    harness.oracle.failing = {}
    harness.run()
    assert harness.reason(completion("r", 1)) is FinishReason.ERROR
    for index in (0, 2):
        expected = separate(prompt_of(14, 6), seed=index, max_tokens=5)
        assert harness.tokens[completion("r", index)] == expected


def test_prompt_logprobs_come_once():
    """With the first completion only: the prompt is the same for all."""
    harness = Harness(choose=seeded)
    harness.add("r", prompt_of(15, 6), n=3, max_tokens=2, prompt_logprobs=1)
    harness.run()
    scored = [o.index for outputs in harness.outputs.values() for o in outputs if o.prompt_logprobs]
    assert scored == [0]


def test_scoring_only_the_prompt_ends_every_completion():
    """max_tokens 0 with n = 3: three empty completions."""
    harness = Harness()
    harness.add("r", prompt_of(16, 6), n=3, max_tokens=0)
    harness.run()
    assert {s.index: s.num_generation_tokens for s in harness.finished.values()} == {
        0: 0,
        1: 0,
        2: 0,
    }
    harness.assert_idle()


def test_best_of_samples_more_than_it_returns_and_scores_them():
    """The front end ranks by logprobs, so the scheduler gets them unasked."""
    harness = Harness(choose=seeded)
    harness.add("r", prompt_of(17, 6), n=1, best_of=3, max_tokens=4)
    harness.run()
    assert len(harness.finished) == 3
    assert all(len(o.new_logprobs) == 1 for outputs in harness.outputs.values() for o in outputs)


def test_best_of_below_n_is_refused():
    """The parameter is named."""
    harness = Harness()
    with pytest.raises(InvalidRequestError, match="best_of must be between 3") as caught:
        harness.add("r", [1], n=3, best_of=2)
    assert caught.value.param == "best_of"
