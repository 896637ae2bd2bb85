"""Requests that wait keep the prefix that they will hit, whenever it was computed."""

import random

import pytest

from octavo.core.config import CacheConfig
from octavo.core.errors import InvariantError
from octavo.core.ids import SequenceId
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.invariants import check_scheduler
from support_scheduler import Harness, expected_output

VOCAB = 97
NUM_PREFIXES = 6


def words(*seed):
    """Return 16 tokens, four blocks, that depend on the seed."""
    chance = random.Random(str(seed))
    return [chance.randrange(VOCAB) for _ in range(16)]


def burst():
    """Six requests with long prefixes, twenty one-offs, and six with the same prefixes again."""
    first = {f"a{i}": [*words("prefix", i), 1, i] for i in range(NUM_PREFIXES)}
    others = {f"other {i}": [*words("other", i), 2] for i in range(20)}
    again = {f"b{i}": [*words("prefix", i), 3, i] for i in range(NUM_PREFIXES)}
    return first | others | again


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_a_burst_hits_as_requests_in_turn_do(at_once, weak):
    """Turns red if what is computed while a request waits is not spared for it."""
    config = CacheConfig(num_blocks=40, block_size=4, watermark=0.0)
    digest = {"digest": lambda data: b"same"} if weak else {}
    harness = Harness(manager=KVCacheManager(config, **digest), max_num_seqs=4)
    for number, (name, prompt) in enumerate(burst().items()):
        harness.add(name, prompt)
        if not at_once and number == NUM_PREFIXES:
            harness.run()
    harness.run()
    hits = sum(harness.cached(f"b{i}") // 4 * 4 for i in range(NUM_PREFIXES))
    assert hits >= 80
    for name, prompt in burst().items():
        assert harness.tokens[name] == expected_output(prompt, 4, VOCAB)
    harness.assert_idle()


def expecting(harness):
    """Return the whole blocks that each waiting sequence will hit."""
    return {waiter.sequence_id: waiter.depth for waiter in harness.manager.expecting()}


def test_who_starts_no_longer_waits_and_who_is_preempted_does_again():
    """Turns red if an admission leaves a wish, or a preempted request loses its own prefix."""
    harness = Harness(num_blocks=10, block_size=4, max_num_seqs=2)
    harness.add("first", words("first"), max_tokens=16)
    harness.add("second", words("second"), max_tokens=16)
    assert expecting(harness) == {0: 0, 1: 0}
    harness.step()
    assert expecting(harness) == {}
    while not harness.scheduler.stats().preemptions_total:
        harness.step()
    (depth,) = expecting(harness).values()
    assert depth >= 4
    harness.run()
    for name in ("first", "second"):
        assert harness.tokens[name] == expected_output(words(name), 16, VOCAB)
    assert expecting(harness) == {}
    harness.assert_idle()


def test_an_abort_in_the_queue_leaves_no_wish():
    """Turns red if what aborted requests would have hit is spared for good."""
    harness = Harness(num_blocks=40, block_size=4, max_num_seqs=4)
    for name, prompt in burst().items():
        harness.add(name, prompt)
    harness.step()
    for i in range(NUM_PREFIXES):
        harness.abort(f"b{i}")
    harness.run()
    assert expecting(harness) == {}
    harness.add("again", burst()["b0"])
    harness.run()
    assert harness.cached("again") == 0
    harness.assert_idle()


@pytest.mark.parametrize("breach", ["leaves", "stays"])
def test_the_check_notices_who_is_missing(breach):
    """Turns red if the law of who is expecting cannot be broken."""
    harness = Harness(max_num_seqs=1)
    harness.add("r", words("r"))
    harness.add("w", words("w"))
    harness.step()
    check_scheduler(harness.scheduler)
    if breach == "leaves":
        harness.manager.unexpect(SequenceId(1))
    else:
        harness.manager.expect(SequenceId(0), harness.scheduler.waiting[0].request.identity, [1])
    with pytest.raises(InvariantError, match="other sequences than those that wait"):
        check_scheduler(harness.scheduler)
