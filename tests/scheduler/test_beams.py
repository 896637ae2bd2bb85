"""Beam search: the right completions, the same whatever happens around the search."""

from itertools import product

import pytest

from octavo.core.errors import ContextLengthError, InvalidRequestError
from octavo.core.ids import RequestId
from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from support_scheduler import Harness, completion, kv_of, likeliest, search_alone

VOCAB = 11


def logprobs_of(tokens) -> dict[int, float]:
    """Return how likely each next token is."""
    return dict(likeliest(kv_of(tokens), VOCAB, VOCAB))


def ids_of(hypotheses) -> list[list[int]]:
    """Return the tokens of each completion."""
    return [[token.token_id for token in hypothesis.tokens] for hypothesis in hypotheses]


def completions(harness: Harness, name: str, count: int) -> list[list[int]]:
    """Return what a request got."""
    return [harness.tokens[completion(name, index)] for index in range(count)]


def test_a_wide_search_finds_the_likeliest_of_all_completions():
    """With a beam for each first token nothing is pruned before the last one."""
    prompt, found = [3, 1, 4], search_alone(VOCAB, [3, 1, 4], n=VOCAB, max_tokens=2)
    totals = {
        (first, second): logprobs_of(prompt)[first] + logprobs_of([*prompt, first])[second]
        for first, second in product(range(VOCAB), repeat=2)
    }
    best = sorted(totals, key=lambda pair: -totals[pair])[:VOCAB]
    assert [tuple(ids) for ids in ids_of(found)] == best
    assert [hypothesis.score for hypothesis in found] == [totals[pair] / 2 for pair in best]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [1, 4, 7])
def test_the_scheduler_finds_what_the_search_alone_finds(width, caching, length):
    """Forks, prunes and copies at every token; nothing leaks into another beam."""
    harness = Harness(vocab_size=VOCAB, caching=caching, end_token_ids=[0])
    prompt = [(i * 5 + 2) % VOCAB for i in range(length)]
    harness.add("r", prompt, n=width, max_tokens=10, use_beam_search=True, temperature=0.0)
    harness.run()
    expected = search_alone(VOCAB, prompt, n=width, max_tokens=10, ends=[0])
    assert completions(harness, "r", width) == ids_of(expected)
    assert [harness.reason(completion("r", i)) for i in range(width)] == [
        hypothesis.reason for hypothesis in expected
    ]
    harness.assert_idle()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_stopping_rules_and_penalties_reach_the_search(early_stopping, length_penalty):
    """Each combination gives what the search alone gives, within max_tokens (KV-16)."""
    asked = {"n": 3, "early_stopping": early_stopping, "length_penalty": length_penalty}
    harness = Harness(vocab_size=VOCAB, end_token_ids=[0, 5])
    harness.add("r", [1, 2, 3], max_tokens=10, use_beam_search=True, temperature=0.0, **asked)
    assert harness.run() <= 10
    expected = search_alone(VOCAB, [1, 2, 3], max_tokens=10, ends=[0, 5], **asked)
    assert completions(harness, "r", 3) == ids_of(expected)
    assert all(len(ids) <= 10 for ids in ids_of(expected))


def test_kv_16_a_search_ends_within_max_tokens():
    """KV-16: at most one step per token, each beam at most max_tokens, a reason for each."""
    harness = Harness(vocab_size=VOCAB)
    harness.add("r", [1], n=2, max_tokens=10, use_beam_search=True, temperature=0.0)
    assert harness.run() == 10
    assert [len(ids) for ids in completions(harness, "r", 2)] == [10, 10]
    assert harness.reason("r") is FinishReason.LENGTH


def test_kv_16_stop_strings_are_refused_by_name():
    """KV-16: the search cannot see text, so it would run past them."""
    with pytest.raises(InvalidRequestError, match="stop must be left") as caught:
        SamplingParams(n=2, use_beam_search=True, temperature=0.0, stop=("###",))
    assert caught.value.param == "stop"


def test_beams_share_the_blocks_of_their_prompt():
    """Four beams of a long prompt hold it once."""
    harness = Harness(vocab_size=VOCAB)
    harness.add("r", [1] * 40, n=4, max_tokens=6, use_beam_search=True, temperature=0.0)
    peak = 0
    while harness.scheduler.has_work():
        harness.step()
        peak = max(peak, harness.manager.usage().num_used)
    assert 10 < peak <= 10 + 4 * 2


def test_a_preempted_search_starts_over_where_it_was():
    """Room is short: beams lose their blocks together, and catch up before any goes on."""
    harness = Harness(vocab_size=VOCAB, num_blocks=14, block_size=2, max_num_batched_tokens=8)
    names = ("a", "b", "c")
    for index, name in enumerate(names):
        harness.add(name, [index + 1] * 5, n=2, max_tokens=8, use_beam_search=True, temperature=0.0)
    harness.run()
    preemptions = harness.scheduler.stats().preemptions_total
    assert preemptions > 0
    assert sum(stats.num_preemptions for stats in harness.finished.values()) == preemptions
    for index, name in enumerate(names):
        expected = search_alone(VOCAB, [index + 1] * 5, n=2, max_tokens=8)
        assert completions(harness, name, 2) == ids_of(expected)
    harness.assert_idle()


@pytest.mark.parametrize("caching", [True, False])
def test_a_search_that_fills_the_pool_runs_alone(caching):
    """What intake accepts can run: all beams at their longest, beside nobody."""
    harness = Harness(vocab_size=VOCAB, num_blocks=12, block_size=2, caching=caching)
    largest = 0
    for max_tokens in range(1, 24):
        asked = {"n": 3, "max_tokens": max_tokens, "use_beam_search": True, "temperature": 0.0}
        try:
            harness.add(f"r{max_tokens}", [1, 2, 3, 4, 5], **asked)
        except ContextLengthError:
            break
        largest = max_tokens
        harness.add(f"single{max_tokens}", [6, 7, 8], max_tokens=12)
    assert largest == (6 if caching else 4)
    harness.run()
    for max_tokens in range(1, largest + 1):
        expected = search_alone(VOCAB, [1, 2, 3, 4, 5], n=3, max_tokens=max_tokens)
        assert completions(harness, f"r{max_tokens}", 3) == ids_of(expected)
    harness.assert_idle()


def test_max_tokens_unset_is_what_fits_with_all_beams():
    """The default is cut so that the search can run."""
    harness = Harness(vocab_size=VOCAB, num_blocks=12, block_size=2)
    harness.add("r", [1, 2, 3, 4, 5], n=3, max_tokens=None, use_beam_search=True, temperature=0.0)
    harness.run()
    assert [len(ids) for ids in completions(harness, "r", 3)] == [6, 6, 6]


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_an_abort_ends_the_search(in_flight, steps):
    """KV-17: every beam's blocks come back, and each asked completion is reported once."""
    harness = Harness(vocab_size=VOCAB)
    harness.add("r", [1, 2, 3], n=2, best_of=3, max_tokens=9, use_beam_search=True, temperature=0.0)
    for _ in range(steps):
        harness.step()
    plan = harness.schedule() if in_flight else None
    assert [stats.index for stats in harness.abort("r")] == [0, 1]
    if plan is not None:
        harness.execute(plan)
    assert not harness.scheduler.finish(RequestId("r"), num_tokens=0, now=0.0)
    harness.run()
    harness.assert_idle()


def test_a_failed_beam_fails_its_search_and_nobody_else():
    """The search has no result without it; batch-mates go on."""
    harness = Harness(vocab_size=VOCAB)
    harness.add("r", [1, 2, 3], n=3, max_tokens=9, use_beam_search=True, temperature=0.0)
    harness.add("other", [4, 5], max_tokens=9)
    harness.step()
    harness.oracle.failing = {3: "NaN"}
    assert 3 in harness.scheduler.running
    harness.step()
    harness.run()
    assert [harness.reason(completion("r", i)) for i in range(3)] == [FinishReason.ERROR] * 3
    assert harness.reason("other") is FinishReason.LENGTH
    harness.assert_idle()


def test_logprobs_are_those_of_the_beams_tokens():
    """Asked or not, the search scores with the model's own logprobs; only asked ones come out."""
    for asked in (None, 0, 2):
        harness = Harness(vocab_size=VOCAB)
        harness.add(
            "r", [7, 7], n=2, max_tokens=4, logprobs=asked, use_beam_search=True, temperature=0.0
        )
        harness.run()
        for index in range(2):
            (output,) = harness.outputs[completion("r", index)]
            if asked is None:
                assert output.new_logprobs == ()
                continue
            tokens = [7, 7]
            for entry in output.new_logprobs:
                scores = logprobs_of(tokens)
                assert (entry.logprob, len(entry.top)) == (scores[entry.token_id], asked)
                assert entry.rank == list(scores).index(entry.token_id) + 1
                tokens.append(entry.token_id)


def test_prompt_logprobs_come_with_the_first_completion():
    """They are kept until the search is done, also through a preemption."""
    harness = Harness(vocab_size=VOCAB)
    harness.add(
        "r", [7, 8, 9], n=2, max_tokens=3, prompt_logprobs=1, use_beam_search=True, temperature=0.0
    )
    harness.run()
    scored = [harness.outputs[completion("r", index)][0].prompt_logprobs for index in range(2)]
    assert [entry and entry.token_id for entry in scored[0]] == [None, 8, 9]
    assert scored[1] is None


def test_min_tokens_keeps_a_search_from_ending():
    """No ending token is taken before, however likely."""
    harness = Harness(vocab_size=VOCAB, end_token_ids=range(5))
    harness.add("r", [1, 2], n=3, max_tokens=6, min_tokens=4, use_beam_search=True, temperature=0.0)
    harness.run()
    for ids in completions(harness, "r", 3):
        assert not set(ids[:4]) & set(range(5))
        assert len(ids) >= 5 or ids[-1] not in range(5)


def test_more_beams_than_a_batch_or_a_vocabulary_holds_are_refused():
    """They could never advance together, or not be different."""
    harness = Harness(vocab_size=VOCAB, max_num_seqs=4)
    with pytest.raises(InvalidRequestError, match="at most 4 beams here, not 5"):
        harness.add("r", [1], n=5, use_beam_search=True, temperature=0.0)
    harness = Harness(vocab_size=3)
    with pytest.raises(InvalidRequestError, match="at most 3 beams here, not 4"):
        harness.add("r", [1], n=4, use_beam_search=True, temperature=0.0)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.1},
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {1: 1.0}},
    ],
)
def test_what_a_search_would_ignore_is_refused_by_name(asked):
    """Beams are ranked by the model's own logprobs: nothing may shape them unseen."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{"n": 2, "use_beam_search": True, "temperature": 0.0, **asked})
    assert caught.value.param == next(iter(asked))
