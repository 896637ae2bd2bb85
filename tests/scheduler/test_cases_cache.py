"""Faults of the KV cache that users of other engines met, on the scheduler with paged memory."""

import random

import pytest

from octavo.core.config import CacheConfig
from octavo.core.errors import GenerationError
from octavo.core.request import CacheIdentity, FinishReason
from octavo.kvcache.manager import KVCacheManager
from support_scheduler import IDENTITY, Harness, expected_output

VOCAB = 97


def prompt_of(seed, length):
    """Return a random prompt."""
    return [random.Random(seed).randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_a_fully_cached_prompt_recomputes_at_least_one_token(block_size, offset):
    """KV-01: twice the same prompt of kB-1, kB, kB+1 tokens; the chain stays whole for a third."""
    harness = Harness(block_size=block_size)
    length = 3 * block_size + offset
    prompt = prompt_of(1, length or 1)
    for name in ("cold", "warm"):
        harness.add(name, prompt, logprobs=0)
        harness.run()
    assert harness.tokens["cold"] == harness.tokens["warm"] == expected_output(prompt, 4, VOCAB)
    logprobs = {
        name: [entry for output in harness.outputs[name] for entry in output.new_logprobs]
        for name in ("cold", "warm")
    }
    assert logprobs["cold"] == logprobs["warm"]
    assert len(logprobs["warm"]) == 4
    assert harness.cached("cold") == 0
    assert harness.cached("warm") == len(prompt) - 1
    harness.add("longer", [*prompt, 96, 95, 94])
    harness.run()
    assert harness.cached("longer") >= len(prompt) // block_size * block_size
    harness.assert_idle()


def test_the_next_chat_turn_hits_the_answer_too():
    """Generated tokens are cached in full blocks: a follow-up turn computes only what is new."""
    harness = Harness(block_size=4)
    prompt = prompt_of(2, 10)
    harness.add("turn 1", prompt, max_tokens=11)
    harness.run()
    history = prompt + harness.tokens["turn 1"]
    harness.add("turn 2", [*history, 1, 2, 3])
    harness.run()
    assert harness.cached("turn 2") == 20  # the last sampled token's KV was never computed


@pytest.mark.parametrize("caching", [False, True])
def test_hundreds_of_requests_leave_no_block_behind(caching):
    """KV-02: 200 requests, exact block multiples among them; afterwards nothing is used."""
    harness = Harness(num_blocks=40, block_size=4, caching=caching)
    for number in range(200):
        harness.add(
            f"r{number}", prompt_of(number, 4 * (1 + number % 5)), max_tokens=1 + number % 9
        )
    harness.run()
    assert len(harness.finished) == 200
    harness.assert_idle()
    if not caching:
        assert harness.manager.usage().num_free == 40


@pytest.mark.parametrize("block_size", [1, 16])
def test_one_plain_request_ends_with_a_balanced_pool(block_size):
    """KV-03: the finish path frees each block once, whatever the block size."""
    harness = Harness(num_blocks=300, block_size=block_size)
    harness.add("r", [1, 2, 3], max_tokens=200)
    harness.run()
    assert len(harness.tokens["r"]) == 200
    harness.assert_idle()
    assert not harness.abort("r")
    harness.assert_idle()


def test_shared_prefixes_with_random_aborts_never_break_the_free_list():
    """KV-03: every step of a soak is checked for duplicates, lost blocks and wrong KV."""
    rng = random.Random(3)
    harness = Harness(num_blocks=24, block_size=2, max_num_batched_tokens=16)
    prefix = prompt_of(0, 8)
    for number in range(80):
        harness.add(f"r{number}", prefix + prompt_of(number, rng.randrange(1, 6)), max_tokens=6)
        for _ in range(rng.randrange(3)):
            harness.step()
        if rng.random() < 0.4:
            harness.abort(f"r{rng.randrange(number + 1)}")
    harness.run()
    harness.assert_idle()


def test_a_salt_an_adapter_and_a_tenant_of_one_name_do_not_share():
    """KV-05: equal strings in different fields of the identity are different caches."""
    harness = Harness(block_size=4)
    prompt = prompt_of(5, 12)
    for kind in ("adapter", "salt", "tenant"):
        fields = {"model": "m", "tokenizer": "t", "kv_dtype": "float32", kind: "X"}
        harness.add(kind, prompt, identity=CacheIdentity(**fields))
        harness.run()
        assert harness.cached(kind) == 0
    harness.add("again", prompt, identity=CacheIdentity("m", "t", "float32", salt="X"))
    harness.run()
    assert harness.cached("again") == 11


@pytest.mark.parametrize("bits", [0, 1])
def test_colliding_hashes_change_no_output(bits):
    """KV-08: with a constant or one-bit digest every KV that is read is still the right one."""
    config = CacheConfig(num_blocks=32, block_size=2)
    manager = KVCacheManager(config, digest=lambda data: bytes([sum(data) & bits]))
    harness = Harness(manager=manager)
    prompts = [prompt_of(seed, 9) for seed in range(6)]
    for round_number in range(2):
        for number, prompt in enumerate(prompts):
            harness.add(f"{round_number}.{number}", prompt)
            harness.run()
            assert harness.tokens[f"{round_number}.{number}"] == expected_output(prompt, 4, VOCAB)
    assert harness.cached("1.5") == 8
    harness.assert_idle()


def test_prompts_computed_at_once_keep_one_copy():
    """KV-11: both miss and compute; the duplicate is freed once, eviction spares the live one.

    Prompt logprobs bypass the cache, so these two do compute the same blocks at once.
    """
    harness = Harness(num_blocks=14, block_size=4, max_num_seqs=3)
    prompt = prompt_of(11, 13)
    harness.add("a", prompt, max_tokens=2, prompt_logprobs=0)
    harness.add("b", prompt, max_tokens=4, prompt_logprobs=0)
    harness.step()
    assert harness.manager.usage().num_used == 3 + 2
    harness.add("c", prompt, max_tokens=20)
    harness.step()
    assert harness.reason("a") is FinishReason.LENGTH
    while harness.scheduler.has_work():
        name = f"filler {len(harness.plans)}"
        harness.add(name, prompt_of(name, 17), max_tokens=1)
        harness.step()
        if len(harness.tokens["c"]) == 20:
            break
    harness.run()
    assert harness.cached("c") == 12
    assert harness.manager.evictions_total > 0
    for name, count in (("a", 2), ("b", 4), ("c", 20)):
        assert harness.tokens[name] == expected_output(prompt, count, VOCAB)
    harness.assert_idle()


def test_ten_times_the_pool_passes_by_eviction():
    """KV-12: distinct prompts one after another all succeed, and the evictions are counted."""
    harness = Harness(num_blocks=16, block_size=4)
    for number in range(20):
        harness.add(f"r{number}", prompt_of(number, 30))
        harness.run()
    assert len(harness.finished) == 20
    assert harness.scheduler.stats().evictions_total > 0
    harness.assert_idle()


def test_a_hit_is_looked_up_when_blocks_are_taken():
    """KV-14: B's prefix is evicted while B waits; it computes the prefix again, rightly."""
    harness = Harness(num_blocks=8, block_size=2, max_num_seqs=1)
    prompt = prompt_of(14, 9)
    harness.add("warm", prompt, max_tokens=1)
    harness.run()
    harness.add("blocker", prompt_of(99, 8), max_tokens=8)
    harness.step()
    harness.add("b", prompt)
    harness.run()
    assert harness.cached("b") < 8
    assert harness.tokens["b"] == expected_output(prompt, 4, VOCAB)
    harness.assert_idle()


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "finished"])
@pytest.mark.parametrize("in_flight", [False, True])
def test_an_abort_in_any_state_returns_everything(state, in_flight):
    """KV-17: nothing leaks if a request leaves while waiting, computing, preempted or done."""
    harness = Harness(num_blocks=10, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    prompt = prompt_of(17, 10)
    harness.add("other", prompt_of(18, 4), max_tokens=12)
    harness.step()
    harness.add("r", prompt, max_tokens=1 if state == "finished" else 6)
    if state != "waiting":
        harness.step()
    while state in ("decode", "finished") and not harness.tokens["r"]:
        harness.step()
    while state == "preempted" and not harness.scheduler.stats().preemptions_total:
        harness.step()
    plan = harness.schedule() if in_flight else None
    assert bool(harness.abort("r")) == (state != "finished")
    if plan is not None:
        got = list(harness.tokens["r"])
        harness.execute(plan)
        assert harness.tokens["r"] == got
    harness.run()
    assert harness.tokens["other"] == expected_output(prompt_of(18, 4), 12, VOCAB)
    harness.assert_idle()


def test_requests_that_do_not_fit_hold_nothing():
    """KV-17: an admission that is refused step after step locks no prefix and no block."""
    harness = Harness(num_blocks=8, block_size=2)
    prefix = prompt_of(20, 4)
    harness.add("warm", [*prefix, 1], max_tokens=1)
    harness.run()
    harness.add("blocker", prompt_of(21, 7), max_tokens=6)
    harness.step()
    used = harness.manager.usage().num_used
    harness.add("big", prefix + prompt_of(22, 10), max_tokens=1)
    harness.step()
    assert harness.scheduler.stats().num_waiting == 1
    assert harness.manager.usage().num_used <= used + 1
    harness.run()
    assert harness.reason("big") is FinishReason.LENGTH
    harness.assert_idle()


def test_failed_kv_is_never_reused():
    """The KV of a step that failed is not cached, not even whole blocks of it."""
    harness = Harness(block_size=2, max_num_batched_tokens=8)
    prompt = prompt_of(23, 12)
    harness.add("r", prompt)
    harness.step()
    plan = harness.schedule()
    update = harness.record(
        harness.scheduler.fail(plan, GenerationError("The runner broke."), harness.clock())
    )
    assert str(update.outputs[0].error) == "The runner broke."
    assert harness.manager.match(IDENTITY, [*prompt, 1]).num_tokens == 8
    harness.oracle.execute(plan)
    harness.add("again", prompt)
    harness.run()
    assert harness.cached("again") == 8
    assert harness.tokens["again"] == expected_output(prompt, 4, VOCAB)
    harness.assert_idle()
