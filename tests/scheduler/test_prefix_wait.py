"""Requests that share a cold prefix: one computes it, the others wait a bounded time."""

import pytest

from octavo.core.ids import RequestId, SequenceId
from octavo.core.request import CacheIdentity, FinishReason, Request
from octavo.core.sampling import SamplingParams
from octavo.scheduler.lifecycle import SequenceStatus
from octavo.scheduler.prefix_wait import PrefixWait
from octavo.scheduler.sequence import Sequence
from support_scheduler import IDENTITY, Harness, expected_output

VOCAB = 97
PREFIX = list(range(40))


def make(number, prompt):
    """Return a fresh sequence."""
    request = Request(RequestId(f"r{number}"), tuple(prompt), SamplingParams(seed=0), IDENTITY, 0.0)
    return Sequence(SequenceId(number), request, 4, frozenset())


def sharing(harness, count, **sampling):
    """Queue requests that share PREFIX and differ after it."""
    for number in range(count):
        harness.add(f"r{number}", [*PREFIX, 40 + number, 1], **sampling)


def computed_prompt_tokens(harness):
    """Return the prompt tokens that were computed so far."""
    return sum(update.num_prompt_tokens for update in harness.updates)


@pytest.mark.parametrize("budget", [16, 256])
def test_a_cold_prefix_is_computed_once(budget):
    """Five arrive at once: the prefix is computed by the first alone, chunked or whole."""
    harness = Harness(block_size=4, max_num_batched_tokens=budget)
    sharing(harness, 5)
    harness.run()
    assert computed_prompt_tokens(harness) == 40 + 5 * 2
    assert [harness.cached(f"r{number}") for number in range(5)] == [0, 40, 40, 40, 40]
    for number in range(5):
        prompt = [*PREFIX, 40 + number, 1]
        assert harness.tokens[f"r{number}"] == expected_output(prompt, 4, VOCAB)


def test_waiting_lasts_one_step_after_the_prefix_is_there():
    """The wait ends with the shared blocks, not with the leader's whole prompt or output."""
    harness = Harness(block_size=4, max_num_batched_tokens=16)
    harness.add("leader", [*PREFIX, *range(50, 90)], max_tokens=30)
    harness.add("follower", [*PREFIX[:12], 95], max_tokens=1)
    harness.step()
    harness.step()
    assert harness.reason("follower") is FinishReason.LENGTH
    assert harness.cached("follower") == 12


def test_others_pass_a_request_that_waits():
    """A request without the prefix starts at once, although it stands behind waiting ones."""
    harness = Harness(block_size=4, max_num_batched_tokens=16)
    sharing(harness, 2)
    harness.step()
    harness.add("other", [7, 8], max_tokens=1)
    harness.step()
    assert harness.reason("other") is FinishReason.LENGTH
    assert harness.scheduler.stats().num_waiting == 1


@pytest.mark.parametrize("how", ["abort", "error"])
def test_nobody_waits_for_a_leader_that_left(how):
    """When the leader is gone the next one computes the prefix, and the rest wait for it."""
    harness = Harness(block_size=4, max_num_batched_tokens=16)
    sharing(harness, 3)
    harness.step()
    if how == "abort":
        harness.abort("r0")
    else:
        harness.oracle.failing = {0: "NaN"}
        harness.step()
    harness.run()
    assert harness.tokens["r1"] == expected_output([*PREFIX, 41, 1], 4, VOCAB)
    assert harness.tokens["r2"] == expected_output([*PREFIX, 42, 1], 4, VOCAB)
    assert harness.cached("r2") == 40
    harness.assert_idle()


def test_nobody_waits_twice_for_a_preempted_leader():
    """A preempted leader that runs again holds its followers no more: they start beside it."""
    wait = PrefixWait(block_size=4)
    leader, follower = make(0, PREFIX), make(1, [*PREFIX[:20], 90])
    leader.move(SequenceStatus.RUNNING, "")
    assert wait.hold(follower, 0, [leader])
    assert wait.is_held(follower)
    assert follower.wait_target == 20
    leader.move(SequenceStatus.PREEMPTED, "")
    leader.num_preemptions += 1
    leader.move(SequenceStatus.RUNNING, "")
    assert not wait.is_held(follower)
    assert not wait.hold(follower, 0, [leader])
    longer = make(2, [*PREFIX[:20], 90, 1])
    longer.move(SequenceStatus.RUNNING, "")
    assert not wait.hold(follower, 0, [longer]), "no more to gain than it waited for before"


def test_preempted_leaders_and_their_followers_finish():
    """The same with real steps: both are preempted or held at times and end with their tokens."""
    harness = Harness(num_blocks=16, block_size=2, max_num_batched_tokens=4, max_num_seqs=3)
    harness.add("old", [3, 4, 5], max_tokens=14)
    harness.step()
    prompt = list(range(60, 82))
    harness.add("leader", [*prompt, 1], max_tokens=2)
    harness.add("follower", [*prompt, 2], max_tokens=2)
    harness.run()
    assert harness.finished["leader"].num_preemptions > 0
    for name, last in (("leader", 1), ("follower", 2)):
        assert harness.tokens[name] == expected_output([*prompt, last], 2, VOCAB)


def test_an_equal_block_after_another_prefix_is_not_waited_for():
    """Blocks are equal only after equal prefixes: this wait would end without a hit."""
    harness = Harness(block_size=4)
    harness.add("warm", [2, 2, 2, 2, 0], max_tokens=1)
    harness.run()
    harness.add("a", [1, 1, 1, 1, 5, 5, 5, 5, 9])
    harness.add("b", [2, 2, 2, 2, 5, 5, 5, 5, 9])
    assert [(item.sequence_id, item.start) for item in harness.schedule().scheduled] == [
        (1, 0),
        (2, 4),
    ]


def test_only_what_may_be_shared_is_waited_for():
    """Another identity, prompt logprobs, and caching switched off never wait."""
    harness = Harness(block_size=4, max_num_batched_tokens=256)
    sharing(harness, 1)
    harness.add("tenant", [*PREFIX, 1], identity=CacheIdentity("m", "t", "float32", tenant="x"))
    harness.add("scored", [*PREFIX, 2], prompt_logprobs=0)
    assert len(harness.schedule().scheduled) == 3
    harness.execute(harness.plans[-1])
    uncached = Harness(block_size=4, caching=False)
    sharing(uncached, 3)
    assert len(uncached.schedule().scheduled) == 3


def test_less_than_a_block_in_common_is_not_waited_for():
    """Partial blocks are not shared, so nothing is gained by waiting for one."""
    harness = Harness(block_size=4)
    harness.add("a", [1, 2, 3, 4, 5])
    harness.add("b", [1, 2, 3, 9, 5])
    harness.add("c", [1, 2, 3, 4])  # its only block would cover its last token
    assert len(harness.schedule().scheduled) == 3


def test_a_full_queue_of_followers_does_not_shut_others_out_for_long():
    """Hundreds wait for one prefix; a stranger behind them starts once they may."""
    harness = Harness(num_blocks=400, block_size=4, max_num_batched_tokens=16, max_num_seqs=4)
    sharing(harness, 50, max_tokens=1)
    harness.add("stranger", [7], max_tokens=1)
    steps = harness.run()
    assert harness.reason("stranger") is FinishReason.LENGTH
    assert steps < 60
