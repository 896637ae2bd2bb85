"""What a plan looks like, step by step, and what may come between planning and results."""

import random

import pytest

from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.errors import GenerationError, InvalidRequestError, InvariantError, SettingError
from octavo.core.ids import RequestId
from octavo.core.plan import ModelRunnerOutput, SchedulerOutput
from octavo.core.request import FinishReason, Request
from octavo.core.sampling import SamplingParams
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.scheduler import Scheduler
from support_scheduler import IDENTITY, STEP_S, Harness, PagedOracle, Row, expected_output

VOCAB = 97


class ShortestPromptFirst:
    """A user's own queue policy."""

    def rank(self, sequence):
        """Return the prompt's length."""
        return (sequence.num_prompt_tokens,)


def spans(plan):
    """Return sequence id -> (start, number of tokens) in batch order."""
    return [(item.sequence_id, item.start, len(item.token_ids)) for item in plan.scheduled]


def test_chunks_and_decodes_share_one_budget():
    """Law 3: decodes first, then prefills under way, then new ones, all from one budget."""
    harness = Harness(block_size=4, max_num_batched_tokens=10, max_num_seqs=4)
    harness.add("a", range(3), max_tokens=9)
    harness.add("b", range(20, 36), max_tokens=9)
    assert spans(harness.schedule()) == [(0, 0, 3), (1, 0, 7)]
    harness.execute(harness.plans[-1])
    harness.add("c", range(50, 54), max_tokens=9)
    plan = harness.schedule()
    assert spans(plan) == [(0, 3, 1), (1, 7, 8), (2, 0, 1)]
    assert [new.sequence_id for new in plan.new] == [2]
    assert [item.samples for item in plan.scheduled] == [True, False, False]
    harness.execute(plan)
    assert spans(harness.schedule()) == [(0, 4, 1), (1, 15, 1), (2, 1, 3)]
    harness.execute(harness.plans[-1])
    harness.run()
    assert harness.tokens["b"] == expected_output(range(20, 36), 9, VOCAB)


def test_plans_carry_diffs_of_the_block_table():
    """A decode inside a block names no block; the next block is named alone, once."""
    harness = Harness(block_size=4)
    harness.add("r", range(6), max_tokens=8)
    diffs = []
    while harness.scheduler.has_work():
        plan = harness.schedule()
        diffs.append((plan.scheduled[0].first_block, plan.scheduled[0].block_ids))
        harness.execute(plan)
    assert diffs[:5] == [(0, (0, 1)), (2, ()), (2, ()), (2, (2,)), (3, ())]


def test_finished_sequences_are_released_in_the_next_plan():
    """The runner learns once, in the next plan, which rows to drop."""
    harness = Harness()
    harness.add("a", [1], max_tokens=1)
    harness.add("b", [2], max_tokens=3)
    assert harness.step().finished[0].request_id == "a"
    assert harness.schedule().released == (0,)
    harness.execute(harness.plans[-1])
    assert harness.schedule().released == ()
    harness.execute(harness.plans[-1])


def test_without_chunked_prefill_a_prompt_goes_whole_or_waits():
    """A prompt that does not fit what is left of the budget waits, and head of line holds."""
    harness = Harness(max_model_len=10, max_num_batched_tokens=10, max_num_seqs=4, chunked=False)
    harness.add("a", range(6), max_tokens=3)
    harness.add("b", range(10, 18), max_tokens=2)
    harness.add("c", [3], max_tokens=2)
    assert spans(harness.schedule()) == [(0, 0, 6)]
    harness.execute(harness.plans[-1])
    assert spans(harness.schedule()) == [(0, 6, 1), (1, 0, 8), (2, 0, 1)]
    harness.execute(harness.plans[-1])
    harness.run()
    assert harness.tokens["b"] == expected_output(range(10, 18), 2, VOCAB)


def test_a_long_prefill_keeps_to_its_threshold():
    """No sequence gets more prompt tokens in a step than the threshold, also with room left."""
    harness = Harness(max_num_batched_tokens=64, threshold=16)
    harness.add("r", range(40), max_tokens=1)
    harness.run()
    assert [len(plan.scheduled[0].token_ids) for plan in harness.plans] == [16, 16, 8]


def test_the_number_of_running_sequences_is_limited():
    """max_num_seqs holds although budget and blocks are left."""
    harness = Harness(max_num_seqs=2)
    for number in range(5):
        harness.add(f"r{number}", [number, 7], max_tokens=2)
    assert len(harness.schedule().scheduled) == 2
    harness.execute(harness.plans[-1])
    assert harness.scheduler.stats().num_waiting == 3
    harness.run()


def test_the_watermark_holds_only_while_something_runs():
    """Alone a request may fill the pool; beside others admission leaves the reserve free."""
    harness = Harness(num_blocks=10, block_size=2, watermark=0.2)
    harness.add("a", range(8), max_tokens=3)
    harness.step()
    harness.add("b", range(10, 20), max_tokens=1)
    assert [i for i, _, _ in spans(harness.schedule())] == [0]
    harness.execute(harness.plans[-1])
    harness.run()
    harness.add("alone", range(30, 50), max_tokens=1)
    assert len(harness.schedule().scheduled) == 1
    harness.execute(harness.plans[-1])


def test_the_watermark_leaves_a_block_for_each_that_runs():
    """Ten blocks, two a prompt: a fourth would leave two free beside three; 0 leaves none."""
    for watermark, expected in ((0.01, 3), (0.0, 5)):
        harness = Harness(num_blocks=10, block_size=2, max_num_seqs=8, watermark=watermark)
        for number in range(5):
            harness.add(f"r{number}", range(4 * number, 4 * number + 4), max_tokens=2)
        assert len(harness.schedule().scheduled) == expected
        harness.execute(harness.plans[-1])
        harness.run()


def test_priority_orders_the_queue():
    """Lower runs first; equals run by arrival; fcfs ignores it."""
    for policy, expected in (("priority", ["c", "a", "b"]), ("fcfs", ["a", "b", "c"])):
        harness = Harness(policy=policy)
        for name, priority in (("a", 1), ("b", 1), ("c", 0)):
            harness.add(name, [1, 2], priority=priority)
        assert [s.request_id for s in harness.scheduler.waiting] == expected


def test_a_users_own_queue_policy_is_named_by_module_and_class():
    """``module:Class`` chooses the order; a wrong name stops the start with one sentence."""
    harness = Harness(policy=f"{__name__}:ShortestPromptFirst")
    for name, length in (("a", 3), ("b", 1), ("c", 2)):
        harness.add(name, [1] * length)
    assert [s.request_id for s in harness.scheduler.waiting] == ["b", "c", "a"]
    harness.run()
    with pytest.raises(SettingError, match="fcfs, priority, cache-aware or module:Class"):
        Harness(policy="random")


def test_a_live_id_cannot_be_used_twice_but_a_finished_one_can():
    """Two live requests of one id would mix their streams."""
    harness = Harness()
    harness.add("r", [1], max_tokens=1)
    with pytest.raises(InvalidRequestError) as caught:
        harness.add("r", [2])
    assert caught.value.param == "request_id"
    harness.run()
    harness.add("r", [2], max_tokens=1)
    harness.run()
    assert harness.tokens["r"] == expected_output([2], 1, VOCAB)


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_results_of_a_sequence_that_left_while_computing_are_dropped(end):
    """Between schedule and update a client may leave: no output, no error, nobody else hurt."""
    harness = Harness()
    harness.add("a", [1, 2], max_tokens=4)
    harness.add("b", [3, 4], max_tokens=4)
    harness.step()
    plan = harness.schedule()
    if end == "abort":
        (stats,) = harness.scheduler.abort(RequestId("a"), harness.clock())
    else:
        stats = harness.scheduler.finish(RequestId("a"), num_tokens=0, now=harness.clock())
    assert stats.finish_reason is (FinishReason.ABORT if end == "abort" else FinishReason.STOP)
    assert stats.num_generation_tokens == (1 if end == "abort" else 0)
    update = harness.execute(plan)
    assert [output.request_id for output in update.outputs] == ["b"]
    assert harness.schedule().released == (0,)
    harness.execute(harness.plans[-1])
    harness.run()
    assert harness.tokens["b"] == expected_output([3, 4], 4, VOCAB)
    harness.assert_idle()


def test_a_request_id_reused_while_its_old_plan_runs_gets_none_of_it():
    """The old sequence's tokens must not reach a new request of the same id."""
    harness = Harness()
    harness.add("r", [1, 2], max_tokens=4)
    plan = harness.schedule()
    harness.abort("r")
    harness.add("r", [5, 6], max_tokens=4)
    harness.execute(plan)
    assert harness.tokens["r"] == []
    harness.run()
    assert harness.tokens["r"] == expected_output([5, 6], 4, VOCAB)


def test_abort_and_finish_of_unknown_requests_do_nothing():
    """Both are idempotent: the front end may be late."""
    harness = Harness()
    assert harness.scheduler.abort(RequestId("x"), 0.0) == ()
    assert harness.scheduler.finish(RequestId("x"), num_tokens=1, now=0.0) is None


def test_a_failed_sequence_ends_alone():
    """NaN in one row is that request's error; its batch-mates go on undisturbed."""
    harness = Harness()
    harness.add("a", [1, 2])
    harness.add("b", [3, 4])
    harness.oracle.failing = {0: "The logits are NaN."}
    update = harness.step()
    assert [stats.request_id for stats in update.finished] == ["a"]
    assert str(update.outputs[0].error) == "The logits are NaN."
    harness.run()
    assert harness.tokens["b"] == expected_output([3, 4], 4, VOCAB)
    harness.assert_idle()


def test_a_failed_step_ends_its_sequences_and_nobody_else():
    """The runner raised: those of the plan end with an error, those that waited are served."""
    harness = Harness(max_num_seqs=1)
    harness.add("a", [1, 2])
    harness.add("b", [3, 4])
    plan = harness.schedule()
    harness.oracle.execute(plan)
    update = harness.record(harness.scheduler.fail(plan, GenerationError("boom"), harness.clock()))
    assert [(o.request_id, o.finish_reason, str(o.error)) for o in update.outputs] == [
        ("a", FinishReason.ERROR, "boom")
    ]
    harness.run()
    assert harness.tokens["b"] == expected_output([3, 4], 4, VOCAB)
    harness.assert_idle()


def test_several_tokens_in_one_step_stop_at_the_end():
    """A runner may return more than one token (speculation): all count, none past the end."""
    harness = Harness(end_token_ids=[9])
    harness.add("r", [1, 2], max_tokens=8, logprobs=0)
    plan = harness.schedule()
    result = harness.oracle.execute(plan)
    entry = result.logprobs[0][0]
    result.sampled[0] = (4, 5, 9, 6)
    result.logprobs[0] = (entry,) * 4
    harness.clock.advance(STEP_S)
    update = harness.scheduler.update(plan, result, harness.clock())
    assert update.outputs[0].new_token_ids == (4, 5, 9)
    assert len(update.outputs[0].new_logprobs) == 3
    assert update.outputs[0].stop_token_id == 9
    assert update.inter_token_latencies_s == (0.0, 0.0)
    assert update.num_generation_tokens == 3


def test_several_tokens_that_do_not_end_are_computed_next():
    """What was sampled but has no KV is caught up with in the next step, like any prefill."""
    harness = Harness(block_size=2)
    harness.add("r", [1, 2], max_tokens=8)
    plan = harness.schedule()
    result = harness.oracle.execute(plan)
    result.sampled[0] = (4, 5, 6)
    harness.oracle.rows[0].token_ids[2:] = [4, 5, 6]
    harness.record(harness.scheduler.update(plan, result, harness.clock()))
    assert spans(harness.schedule()) == [(0, 2, 3)]
    harness.execute(harness.plans[-1])
    harness.run()
    assert harness.tokens["r"][:3] == [4, 5, 6]
    assert len(harness.tokens["r"]) == 8


def test_computed_tokens_are_counted_as_prompt_or_generation():
    """Chunks and recompute count as prompt tokens, a decode's input does not."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=2)
    harness.add("old", range(4), max_tokens=10)
    harness.add("r", range(50, 54), max_tokens=10)
    harness.run()
    assert harness.scheduler.stats().preemptions_total == 1
    generated = sum(update.num_generation_tokens for update in harness.updates)
    computed = sum(update.num_prompt_tokens for update in harness.updates)
    assert generated == 20
    assert computed + 18 == harness.oracle.num_computed_total
    assert computed > 8


def test_a_preempted_sequence_is_new_again_with_its_output():
    """To the runner preemption is a release; its output tokens come back apart from its prompt."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=2)
    harness.add("old", range(4), max_tokens=10)
    harness.add("r", range(50, 54), max_tokens=10, seed=42)
    harness.run()
    first, again = [new for plan in harness.plans for new in plan.new if new.sequence_id == 1]
    assert first.output_token_ids == ()
    assert again.prompt_token_ids == tuple(range(50, 54))
    assert list(again.output_token_ids) == harness.tokens["r"][: len(again.output_token_ids)]
    assert again.output_token_ids
    assert again.seed == 42


def test_schedule_and_update_must_alternate():
    """Two plans at once, or a result for another plan, are bugs of the engine."""
    harness = Harness()
    harness.add("r", [1, 2])
    plan = harness.schedule()
    with pytest.raises(InvariantError, match="not taken in"):
        harness.schedule()
    other = SchedulerOutput(step=99, scheduled=plan.scheduled)
    with pytest.raises(InvariantError, match="not the one under way"):
        harness.scheduler.update(other, ModelRunnerOutput(), 0.0)
    harness.execute(plan)
    with pytest.raises(InvariantError, match="not the one under way"):
        harness.scheduler.fail(plan, GenerationError("late"), 0.0)


def test_an_empty_plan_needs_no_result():
    """With nothing to do a plan is empty; taking it in, or not, changes nothing."""
    harness = Harness()
    plan = harness.schedule()
    assert plan.scheduled == ()
    harness.schedule()
    assert harness.scheduler.update(plan, ModelRunnerOutput(), 0.0).outputs == ()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (ModelRunnerOutput(), "sampled nothing"),
        (ModelRunnerOutput({0: (1,)}), "left out logprobs"),
        (ModelRunnerOutput({0: (1,)}, {0: ()}), "left out logprobs"),
    ],
)
def test_an_incomplete_result_is_a_bug_with_a_story(result, message):
    """A runner that leaves something out is told so, with what the request went through."""
    harness = Harness()
    harness.add("r", [1, 2], logprobs=0)
    plan = harness.schedule()
    with pytest.raises(InvariantError, match=message) as caught:
        harness.scheduler.update(plan, result, 0.0)
    assert "request 'r'" in str(caught.value)
    assert "waiting -> running: step 1" in caught.value.story


def test_a_request_needs_its_seed_before_it_comes_here():
    """Chance is an argument: the scheduler never invents a seed."""
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), KVCacheManager(CacheConfig(8)))
    with pytest.raises(InvariantError, match="without a seed"):
        scheduler.add(Request(RequestId("r"), (1,), SamplingParams(), IDENTITY, 0.0))


@pytest.mark.parametrize("policy", ["fcfs", "priority", f"{__name__}:ShortestPromptFirst"])
@pytest.mark.parametrize("seed", range(4))
def test_any_policy_finishes_everything_undisturbed(policy, seed):
    """Batched, chunked, cached and preempted outputs equal those of a request alone."""
    rng = random.Random(seed)
    harness = Harness(
        num_blocks=16, block_size=3, max_num_batched_tokens=12, max_num_seqs=4, policy=policy
    )
    prompts = {}
    for number in range(25):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 25))]
        count = rng.randrange(1, 12)
        name = f"r{number}"
        harness.add(name, prompt, max_tokens=count, priority=rng.randrange(3))
        prompts[name] = (prompt, count)
        for _ in range(rng.randrange(3)):
            harness.step()
    harness.run()
    for name, (prompt, count) in prompts.items():
        assert harness.tokens[name] == expected_output(prompt, count, VOCAB)
    assert harness.scheduler.stats().preemptions_total > 0
    harness.assert_idle()


def test_the_oracle_notices_wrong_kv():
    """The proof of the proofs: a block overwritten by another sequence fails the oracle."""
    harness = Harness(block_size=2)
    harness.add("r", range(8), max_tokens=4)
    harness.step()
    harness.oracle.memory[(1, 0)] += 1
    with pytest.raises(AssertionError, match="wrong KV at position 2"):
        harness.step()
    assert isinstance(harness.oracle, PagedOracle)
    assert isinstance(harness.oracle.rows[0], Row)


@pytest.mark.parametrize(
    ("entries", "message"),
    [(0, "are missing"), (3, "more prompt logprobs than prompt tokens")],
)
def test_wrong_numbers_of_prompt_logprobs_are_bugs(entries, message):
    """One entry per scored position: a runner that gives fewer or more is told so."""
    harness = Harness()
    harness.add("r", [1, 2, 3], prompt_logprobs=0)
    plan = harness.schedule()
    result = harness.oracle.execute(plan)
    result.prompt_logprobs[0] = (result.prompt_logprobs[0][0],) * entries
    with pytest.raises(InvariantError, match=message):
        harness.scheduler.update(plan, result, 0.0)


class Never:
    """A broken admission policy."""

    def may_admit(self, need, num_running):
        """Refuse everything."""
        return False


def test_an_admission_policy_that_refuses_an_idle_cache_is_a_bug():
    """Waiting for ever with nothing running must end in an error, not in silence."""
    config = SchedulerConfig(max_model_len=64)
    scheduler = Scheduler(config, KVCacheManager(CacheConfig(8)), admission=Never())
    scheduler.add(Request(RequestId("r"), (1,), SamplingParams(seed=0), IDENTITY, 0.0))
    with pytest.raises(InvariantError, match="does not fit an idle cache"):
        scheduler.schedule(0.0)
