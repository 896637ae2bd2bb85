"""Faults of scheduling, stopping and counting that users of other engines met."""

import random

import pytest

from octavo.core.errors import ContextLengthError, InvalidRequestError
from octavo.core.request import FinishReason
from support_scheduler import STEP_S, Harness, expected_output

VOCAB = 97


def prompt_of(seed, length):
    """Return a random prompt."""
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]


def test_a_request_that_can_never_fit_is_refused_at_once():
    """SC-01: 2,000 tokens in a pool of 1,024 are refused; the next request is served."""
    harness = Harness(num_blocks=64, block_size=16, max_model_len=4096)
    with pytest.raises(ContextLengthError, match="KV cache can hold"):
        harness.add("big", [1] * 2000, max_tokens=1)
    with pytest.raises(ContextLengthError, match="KV cache can hold"):
        harness.add("grows", [1] * 1000, max_tokens=26)
    harness.add("edge", [1] * 1000, max_tokens=25)
    harness.add("small", [2] * 10)
    harness.run()
    assert len(harness.tokens["edge"]) == 25
    assert len(harness.tokens["small"]) == 4


def test_a_victim_of_this_very_step_leaves_the_plan():
    """SC-02: three priorities all need a block at once; budget comes back, all texts are right."""
    harness = Harness(num_blocks=7, block_size=2, max_num_seqs=3, policy="priority")
    prompts = {name: prompt_of(name, 3) for name in "abc"}
    for name, priority in (("a", 2), ("b", 1), ("c", 0)):
        harness.add(name, prompts[name], priority=priority, max_tokens=8)
        harness.step()
    harness.run()
    assert harness.scheduler.stats().preemptions_total > 0
    assert harness.finished["c"].num_preemptions == 0
    for name, prompt in prompts.items():
        assert harness.tokens[name] == expected_output(prompt, 8, VOCAB)
    harness.assert_idle()


def test_the_withdrawn_budget_is_spent_in_the_same_step():
    """SC-02: the victim's token is not lost to the step: the prefill behind it gets it."""
    harness = Harness(
        num_blocks=23, block_size=2, max_num_batched_tokens=4, max_num_seqs=4, policy="priority"
    )
    harness.add("low", prompt_of(1, 2), priority=9, max_tokens=20)
    harness.step()
    harness.add("high", prompt_of(2, 3), priority=0, max_tokens=20)
    harness.step()
    harness.add("prefill", prompt_of(3, 36), priority=5, max_tokens=1)
    while not harness.scheduler.stats().preemptions_total:
        plan = harness.schedule()
        harness.execute(plan)
    placed = {item.sequence_id: len(item.token_ids) for item in plan.scheduled}
    assert plan.released == (0,)
    assert placed == {1: 1, 2: 3}
    harness.run()
    harness.assert_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_preempted_request_keeps_its_place(policy):
    """SC-04: it resumes before never-started equals, even those that arrived before it."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=2, policy=policy)
    harness.clock.advance(10)
    harness.add("old", prompt_of(1, 4), max_tokens=10)
    harness.add("a", prompt_of(2, 4), max_tokens=10)
    harness.step()
    harness.add("b", prompt_of(3, 4), max_tokens=2, arrival_time=1.0)
    harness.add("c", prompt_of(4, 4), max_tokens=2)
    while not harness.scheduler.stats().preemptions_total:
        harness.step()
    assert [s.request_id for s in harness.scheduler.waiting] == ["a", "b", "c"]
    harness.run()
    started = [new.sequence_id for plan in harness.plans for new in plan.new]
    assert started[:3] == [0, 1, 1], "a resumes before b and c start"
    assert harness.finished["a"].num_preemptions == 1
    harness.assert_idle()


def test_a_better_priority_still_goes_before_a_preempted_one():
    """SC-04: the kept place is among equals; a better priority is not held up by it."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=2, policy="priority")
    harness.add("old", prompt_of(1, 4), max_tokens=10, priority=1)
    harness.add("a", prompt_of(2, 4), max_tokens=10, priority=2)
    harness.step()
    harness.add("urgent", prompt_of(3, 4), priority=0)
    while not harness.scheduler.stats().preemptions_total:
        harness.step()
    assert [s.request_id for s in harness.scheduler.waiting] == ["urgent", "a"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [False, True])
def test_an_undersized_pool_always_makes_progress(policy, caching):
    """SC-05: pool of 1.2 peaks, four equal requests at once; few preemptions, all finish."""
    peak = (128 + 64) // 4
    harness = Harness(
        num_blocks=int(1.2 * peak), block_size=4, max_num_seqs=4, policy=policy, caching=caching
    )
    for number in range(4):
        harness.add(f"r{number}", prompt_of(number, 128), max_tokens=64)
    harness.run(max_steps=600)
    assert harness.finished["r0"].num_preemptions == 0
    assert harness.scheduler.stats().preemptions_total <= 3 * 4
    for number in range(4):
        assert harness.tokens[f"r{number}"] == expected_output(prompt_of(number, 128), 64, VOCAB)
    harness.assert_idle()


@pytest.mark.parametrize("threshold", [0, 16])
def test_a_long_prefill_lets_a_short_request_through(threshold):
    """SC-07: a 20-token prompt behind a prompt of 100 chunks answers within a few steps."""
    harness = Harness(
        num_blocks=900,
        block_size=4,
        max_model_len=3500,
        max_num_batched_tokens=32,
        threshold=threshold,
    )
    harness.add("long", prompt_of(1, 3200), max_tokens=1)
    harness.step()
    harness.step()
    before = len(harness.plans)
    harness.add("short", prompt_of(2, 20), max_tokens=1)
    while not harness.tokens["short"]:
        harness.step()
    assert len(harness.plans) - before <= 5
    harness.run()
    assert len(harness.plans) <= 1.1 * 3200 / (threshold or 32)


def test_a_prefill_takes_back_what_nobody_behind_it_used():
    """SC-07: the share for others costs nothing if they cannot start or need less."""
    harness = Harness(
        num_blocks=60, block_size=4, max_num_batched_tokens=64, max_num_seqs=4, watermark=0.0
    )
    harness.add("long", prompt_of(1, 200), max_tokens=1)
    harness.step()
    harness.add("does not fit", prompt_of(2, 80), max_tokens=1)
    plan = harness.schedule()
    assert plan.num_tokens == 64
    assert [item.start for item in plan.scheduled] == [64]
    harness.execute(plan)
    harness.run()


def test_chunks_of_a_prefill_always_have_their_blocks():
    """SC-08: with the pool locked by others a prefill under way still runs to its end."""
    harness = Harness(num_blocks=16, block_size=2, max_num_batched_tokens=4, max_num_seqs=4)
    harness.add("decoder", prompt_of(1, 4), max_tokens=14)
    harness.step()
    harness.add("prefill", prompt_of(2, 14), max_tokens=8)
    harness.add("third", prompt_of(3, 4), max_tokens=4)
    harness.run()
    for name, seed, length, count in (("decoder", 1, 4, 14), ("prefill", 2, 14, 8)):
        assert harness.tokens[name] == expected_output(prompt_of(seed, length), count, VOCAB)
    harness.assert_idle()


@pytest.mark.parametrize("prompt", [[], [-1], [VOCAB], [1, 2, VOCAB + 5, 3], [2**40]])
def test_an_empty_or_foreign_prompt_is_refused(prompt):
    """SC-10: no token, or a token outside the vocabulary, is a 400 and the next request works."""
    harness = Harness()
    with pytest.raises(InvalidRequestError) as caught:
        harness.add("bad", prompt)
    assert caught.value.param == "prompt"
    harness.add("good", [1])
    harness.run()
    assert harness.reason("good") is FinishReason.LENGTH


CONTEXT = 32


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_output"),
    [
        (CONTEXT - 1, 1, 1),
        (CONTEXT - 1, None, 1),
        (CONTEXT - 2, 2, 2),
        (CONTEXT - 10, None, 10),
        (CONTEXT, 0, 0),
        (CONTEXT, 1, None),
        (CONTEXT, None, None),
        (CONTEXT - 1, 2, None),
        (CONTEXT + 1, 1, None),
        (CONTEXT + 1, 0, None),
        (CONTEXT + 1, None, None),
        (CONTEXT + 500, 1, None),
    ],
)
def test_prompt_and_output_fit_the_context_exactly(length, max_tokens, num_output):
    """SC-11, SC-13, SC-14: P + max_tokens <= context, unset means what is left, else 400."""
    harness = Harness(max_model_len=CONTEXT, max_num_batched_tokens=64)
    if num_output is None:
        with pytest.raises(ContextLengthError) as caught:
            harness.add("r", [1] * length, max_tokens=max_tokens)
        assert caught.value.param in ("prompt", "max_tokens")
        assert not harness.scheduler.has_work()
        return
    harness.add("r", [1] * length, max_tokens=max_tokens)
    harness.run()
    assert len(harness.tokens["r"]) == num_output
    assert harness.reason("r") is FinishReason.LENGTH


@pytest.mark.parametrize(("length", "num_output"), [(16, 1), (15, 2), (10, 7), (17, None)])
def test_unset_max_tokens_is_capped_by_the_pool(length, num_output):
    """SC-13: where the pool is smaller than the context, growth stops at the pool: length."""
    harness = Harness(num_blocks=4, block_size=4, max_model_len=400)
    if num_output is None:
        with pytest.raises(ContextLengthError):
            harness.add("r", [1] * length, max_tokens=None)
        return
    harness.add("r", [1] * length, max_tokens=None)
    harness.run()
    assert len(harness.tokens["r"]) == num_output
    assert harness.finished["r"].max_tokens == num_output
    assert harness.reason("r") is FinishReason.LENGTH


def test_min_tokens_must_fit_where_max_tokens_is_unset():
    """min_tokens beyond the room that is left is refused, not silently cut."""
    harness = Harness(max_model_len=CONTEXT, max_num_batched_tokens=64)
    with pytest.raises(ContextLengthError) as caught:
        harness.add("r", [1] * 20, max_tokens=None, min_tokens=13)
    assert caught.value.param == "min_tokens"
    harness.add("r", [1] * 20, max_tokens=None, min_tokens=12)


@pytest.mark.parametrize("scores", [None, 1])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_max_tokens_zero_scores_the_prompt(scores, length):
    """SC-16: no output token, finish reason length, prompt logprobs if asked for."""
    harness = Harness(block_size=16, max_num_batched_tokens=8)
    prompt = prompt_of(16, length)
    harness.add("r", prompt, max_tokens=0, prompt_logprobs=scores)
    harness.run()
    (output,) = harness.outputs["r"]
    assert output.new_token_ids == ()
    assert output.finish_reason is FinishReason.LENGTH
    assert harness.finished["r"].first_token_time is None
    assert (output.prompt_logprobs is None) == (scores is None)
    if scores is not None:
        assert len(output.prompt_logprobs) == length
    harness.assert_idle()


@pytest.mark.parametrize("length", [15, 16, 17, 33])
@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_logprobs_are_complete_on_a_cached_prefix(length, budget):
    """SA-17: both of two equal requests get one entry per token, None first, same values."""
    harness = Harness(block_size=16, max_num_batched_tokens=budget)
    prompt = prompt_of(17, length)
    for name in ("cold", "warm"):
        harness.add(name, prompt, prompt_logprobs=1)
        harness.run()
    cold, warm = (harness.outputs[name][0].prompt_logprobs for name in ("cold", "warm"))
    assert cold == warm
    assert cold[0] is None
    assert [entry.token_id for entry in cold[1:]] == prompt[1:]
    assert all(output.prompt_logprobs is None for output in harness.outputs["warm"][1:])
    assert harness.cached("warm") == 0


def test_prompt_logprobs_survive_preemption():
    """A prefill that is preempted half way delivers the same entries once, after it resumed."""
    prompt = prompt_of(18, 20)
    alone = Harness(block_size=2)
    alone.add("r", prompt, prompt_logprobs=0)
    alone.run()
    harness = Harness(num_blocks=14, block_size=2, max_num_batched_tokens=4, max_num_seqs=4)
    harness.add("old", prompt_of(1, 7), max_tokens=14)
    harness.step()
    harness.step()
    harness.add("r", prompt, prompt_logprobs=0)
    harness.run()
    assert harness.finished["r"].num_preemptions > 0
    assert harness.outputs["r"][0].prompt_logprobs == alone.outputs["r"][0].prompt_logprobs
    assert harness.tokens["r"] == alone.tokens["r"]


END = 5


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length", [1, 40])
def test_min_tokens_counts_output_only(ignore_eos, length):
    """SA-14: with min = max = 16 a model that wants to end at once gives 16 tokens."""
    harness = Harness(end_token_ids=[END], choose=lambda row, kv: END)
    harness.add("r", [1] * length, min_tokens=16, max_tokens=16, ignore_eos=ignore_eos)
    harness.run()
    assert len(harness.tokens["r"]) == 16
    assert harness.reason("r") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("sampling", "num_tokens", "reason"),
    [
        ({}, 1, FinishReason.STOP),
        ({"min_tokens": 3}, 4, FinishReason.STOP),
        ({"ignore_eos": True}, 8, FinishReason.LENGTH),
        ({"ignore_eos": True, "stop_token_ids": (END,)}, 1, FinishReason.STOP),
        ({"max_tokens": 1}, 1, FinishReason.STOP),
    ],
)
def test_ends_by_token(sampling, num_tokens, reason):
    """SA-14: end ids and stop ids end the output after min_tokens; ignore_eos spares stop ids."""
    harness = Harness(end_token_ids=[END], choose=lambda row, kv: END)
    harness.add("r", [1, 2], **{"max_tokens": 8, **sampling})
    harness.run()
    assert len(harness.tokens["r"]) == num_tokens
    assert harness.reason("r") is reason
    expected = END if reason is FinishReason.STOP else None
    assert harness.outputs["r"][-1].stop_token_id == expected


@pytest.mark.parametrize("end", [END, 6, 7])
def test_every_end_id_of_the_model_counts(end):
    """All end-of-turn ids end the output, and the runner is told all of them."""
    harness = Harness(end_token_ids=[END, 6], choose=lambda row, kv: end)
    harness.add("r", [1, 2], stop_token_ids=(7,))
    plan = harness.schedule()
    assert plan.new[0].ending_token_ids == {END, 6, 7}
    harness.execute(plan)
    assert harness.reason("r") is FinishReason.STOP


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"logit_bias": {VOCAB: 5.0}}, "logit_bias"),
        ({"logit_bias": {0: 1.0, VOCAB + 7: 5.0}}, "logit_bias"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ({"logit_bias": dict.fromkeys(range(VOCAB), -100.0)}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(1, VOCAB), -100.0), "min_tokens": 1}, "logit_bias"),
    ],
)
def test_ids_beyond_the_vocabulary_and_bans_of_all_of_it_are_refused(sampling, param):
    """SA-10: refused by name before they reach the batch; others keep running."""
    harness = Harness(end_token_ids=[0])
    with pytest.raises(InvalidRequestError) as caught:
        harness.add("bad", [1], **sampling)
    assert caught.value.param == param
    harness.add("edge", [VOCAB - 1], logit_bias={VOCAB - 1: 1.0}, stop_token_ids=(0,), logprobs=1)
    harness.run()


@pytest.mark.parametrize("count", [VOCAB - 1, VOCAB, VOCAB + 1, 10**6])
def test_more_logprobs_than_tokens_are_as_many_as_there_are(count):
    """SA-12: with a vocabulary smaller than asked for, fewer entries; of prompts too."""
    harness = Harness()
    harness.add("r", [1, 2, 3], logprobs=count, prompt_logprobs=count, max_tokens=2)
    harness.run()
    scored = [entry for output in harness.outputs["r"] for entry in output.new_logprobs]
    assert [len(entry.top) for entry in scored] == [min(count, VOCAB)] * 2
    assert len(harness.outputs["r"][0].prompt_logprobs) == 3


def test_recompute_hits_do_not_count_as_prefix_hits():
    """ME-01: distinct prompts and preemption: 0 hits for users, the rest is counted apart."""
    harness = Harness(num_blocks=10, block_size=2, max_num_seqs=3)
    for number in range(6):
        harness.add(f"r{number}", [number, *prompt_of(number, 5)], max_tokens=8)
    assert harness.scheduler.stats().prefix_queries_total == 0
    harness.run()
    stats = harness.scheduler.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_hits_total == 0
    assert stats.prefix_queries_total == 6 * 6
    assert 0 < stats.preempted_hits_total <= stats.preempted_queries_total


def test_hits_and_queries_count_prompt_tokens():
    """ME-01: a warm prompt counts its cached tokens; one that may not look counts nothing."""
    harness = Harness(block_size=4)
    for name in ("cold", "warm"):
        harness.add(name, prompt_of(1, 9))
        harness.run()
    harness.add("scored", prompt_of(1, 9), prompt_logprobs=0)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (18, 8)


def test_preemption_after_ten_tokens_hides_no_time():
    """ME-04: TTFT is not reset, E2E covers the stall, and the largest gap shows it."""
    harness = Harness(num_blocks=12, block_size=2, max_num_seqs=2)
    harness.add("old", prompt_of(1, 4), max_tokens=18)
    harness.clock.advance(0.5)
    harness.add("r", prompt_of(2, 4), max_tokens=16)
    arrival = harness.clock()
    harness.step()
    first = harness.clock()
    harness.run()
    stats = harness.finished["r"]
    assert stats.num_preemptions >= 1
    assert (stats.arrival_time, stats.first_scheduled_time) == (arrival, arrival)
    assert stats.first_token_time == first
    assert stats.finish_time == stats.last_token_time == harness.clock()
    gaps = [gap for update in harness.updates for gap in update.inter_token_latencies_s]
    assert max(gaps) > 2 * STEP_S
    firsts = [t for update in harness.updates for t in update.first_token_latencies_s]
    assert firsts == pytest.approx([0.5 + STEP_S, STEP_S])
    total = sum(gaps) + sum(firsts)
    ends = [s.finish_time - s.arrival_time for s in harness.finished.values()]
    assert total == pytest.approx(sum(ends))


def test_preemption_before_the_first_token_counts_into_ttft():
    """ME-04: TTFT runs from arrival to the first token, whatever happened in between."""
    harness = Harness(num_blocks=14, block_size=2, max_num_batched_tokens=4, max_num_seqs=4)
    harness.add("old", prompt_of(1, 7), max_tokens=14)
    harness.step()
    harness.step()
    harness.add("r", prompt_of(2, 20), max_tokens=1)
    arrival = harness.clock()
    harness.run()
    stats = harness.finished["r"]
    assert stats.num_preemptions > 0
    assert stats.first_scheduled_time == arrival
    assert stats.first_token_time == stats.finish_time
    latencies = [t for update in harness.updates for t in update.first_token_latencies_s]
    assert latencies[-1] == pytest.approx(stats.first_token_time - arrival)


def test_every_accepted_request_ends_with_one_reason():
    """ME-03: aborts, stops, errors and refusals: reasons of accepted requests sum up."""
    harness = Harness(end_token_ids=[END])
    for number in range(8):
        harness.add(f"r{number}", prompt_of(number, 6), max_tokens=3)
    with pytest.raises(InvalidRequestError, match="in use"):
        harness.add("r0", [1])
    harness.abort("r7")
    harness.step()
    harness.abort("r6")
    harness.oracle.failing = {5: "NaN logits"}
    harness.run()
    reasons = [harness.reason(f"r{number}") for number in range(8)]
    assert reasons.count(FinishReason.ABORT) == 2
    assert reasons.count(FinishReason.ERROR) == 1
    assert harness.outputs["r5"][-1].error.message == "NaN logits"
    harness.assert_idle()
