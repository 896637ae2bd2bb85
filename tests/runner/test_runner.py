"""The runner: what it returns does not depend on chunks, company, preemption or failures."""

import math
from dataclasses import replace

import pytest

from octavo.core.errors import InvariantError
from octavo.core.ids import BlockId, SequenceId
from octavo.core.plan import BlockCopy, ModelRunnerOutput, ScheduledSequence, SchedulerOutput
from octavo.core.request import TokenLogprobs
from octavo.core.sampling import SamplingParams
from support_runner import Driver, toy_driver, toy_runner
from support_sampling import GREEDY, MakeSampler, new_sequence

SETTINGS = [
    GREEDY,
    SamplingParams(temperature=1.5, max_tokens=None),
    SamplingParams(temperature=0.8, top_k=10, top_p=0.9, max_tokens=None),
    SamplingParams(
        temperature=0.7, repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.5
    ),
    SamplingParams(temperature=0.0, frequency_penalty=1.0, logit_bias={7: -100.0, 9: 2.0}),
    SamplingParams(temperature=1.0, min_tokens=8, min_p=0.05),
]


def prompt_of(key: int) -> list[int]:
    """Return a prompt of its own length for each key."""
    return [(7 * key + 3 * i) % 50 for i in range(3 + 5 * key)]


def start(driver: Driver, key: int) -> None:
    """Start the sequence whose settings, seed and prompt belong to this key."""
    driver.start(new_sequence(key, prompt_of(key), SETTINGS[key], seed=40 + key, ending=[3, 4, 49]))


@pytest.fixture(scope="module")
def alone(make_sampler: MakeSampler) -> list[list[int]]:
    """The output of each sequence when nothing else runs."""
    outputs = []
    for key in range(len(SETTINGS)):
        driver = toy_driver(make_sampler=make_sampler)
        start(driver, key)
        outputs.append(driver.generate(key, num_tokens=12)[0])
    return outputs


@pytest.mark.parametrize("chunk", [1, 3, 4, 100])
def test_chunked_and_batched_equals_alone(
    make_sampler: MakeSampler, alone: list[list[int]], chunk: int
) -> None:
    """SA-01, SA-04: turns red when chunk size or batch-mates reach into a sequence's tokens."""
    driver = toy_driver(make_sampler=make_sampler)
    for key in range(len(SETTINGS)):
        start(driver, key)
    assert driver.generate(*range(len(SETTINGS)), num_tokens=12, chunk=chunk) == alone


def test_company_that_comes_and_goes_changes_nothing(
    make_sampler: MakeSampler, alone: list[list[int]]
) -> None:
    """SA-01: turns red when unrelated sequences that join and leave contaminate five others."""
    driver = toy_driver(make_sampler=make_sampler, max_num_seqs=8)
    for key in range(5):
        start(driver, key)
    running: list[int] = []
    for step in range(12):
        joining = range(100 + 4 * step, 100 + 4 * step + 4)
        for key in joining:
            driver.start(new_sequence(key, [key % 50] * (key % 9 + 1), SETTINGS[key % 6]))
        running.extend(joining)
        driver.step(*running, *range(5))
        while len(running) > 6:
            driver.stop(running.pop(0))
    assert [driver.output(key) for key in range(5)] == alone[:5]


@pytest.mark.parametrize("at", [1, 5, 11])
def test_preempted_equals_undisturbed(
    make_sampler: MakeSampler, alone: list[list[int]], at: int
) -> None:
    """SA-05, SA-13: turns red when a resumed sequence restarts its stream or forgets its output."""
    driver = toy_driver(make_sampler=make_sampler)
    keys = range(len(SETTINGS))
    for key in keys:
        start(driver, key)
    driver.generate(*keys, num_tokens=at)
    for key in keys:
        driver.preempt(key)
    assert driver.generate(*keys, num_tokens=12, chunk=5) == alone


class PromptScores:
    """Collects prompt logprobs over the steps of a driver."""

    def __init__(self) -> None:
        self.scores: list[TokenLogprobs] = []

    def take(self, result: ModelRunnerOutput, key: int) -> None:
        """Append what a step brought for a sequence."""
        self.scores.extend(result.prompt_logprobs.get(SequenceId(key), ()))


def prompt_scores(
    make_sampler: MakeSampler, length: int, *, chunk: int, max_logits: int, start_at: int = 0
) -> PromptScores:
    """Return the prompt logprobs of a prompt, computed in chunks and in bounded memory."""
    driver = toy_driver(make_sampler=make_sampler, max_num_seqs=1, max_logits=max_logits)
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    driver.start(new_sequence(0, [i % 50 for i in range(length)], params))
    collected = PromptScores()
    while not driver.output(0):
        collected.take(driver.step(0, chunk=chunk), 0)
    collected.take(driver.step(0), 0)  # a decode brings none
    return collected


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33])
def test_prompt_logprobs_are_the_same_in_any_chunks_and_memory(
    make_sampler: MakeSampler, length: int
) -> None:
    """SA-17: turns red when a chunk border or the bound on logits shifts, drops or repeats one."""
    whole = prompt_scores(make_sampler, length, chunk=100, max_logits=100).scores
    assert [score.token_id for score in whole] == [i % 50 for i in range(1, length)]
    assert all(len(score.top) == 2 for score in whole)
    for chunk in (1, 7, 16, 100):
        for max_logits in (1, 5, 16):
            assert (
                prompt_scores(make_sampler, length, chunk=chunk, max_logits=max_logits).scores
                == whole
            )


def test_the_logits_of_one_call_are_bounded(make_sampler: MakeSampler) -> None:
    """Turns red when prompt logprobs of a long prompt want all their logits at once."""
    runner, model = toy_runner(make_sampler=make_sampler, max_num_seqs=2, max_logits=10)
    driver = Driver(runner)
    driver.start(new_sequence(0, [1] * 90, SamplingParams(prompt_logprobs=0)))
    driver.start(new_sequence(1, [2] * 90))
    driver.step(0, 1)
    assert max(len(batch.logits_rows) for batch in model.batches) == 10
    assert sum(batch.num_tokens for batch in model.batches) == 180


def test_a_resumed_sequence_does_not_score_its_prompt_again(make_sampler: MakeSampler) -> None:
    """Turns red when a preemption after the first token sends prompt logprobs twice."""
    driver = toy_driver(make_sampler=make_sampler)
    driver.start(new_sequence(0, [1] * 9, SamplingParams(temperature=0.0, prompt_logprobs=1)))
    assert len(driver.step(0).prompt_logprobs[SequenceId(0)]) == 8
    driver.preempt(0)
    assert driver.step(0).prompt_logprobs == {}


def test_logprobs_are_raw_and_only_for_those_who_ask(make_sampler: MakeSampler) -> None:
    """Turns red when temperature or bias reach the reported logprobs, or all rows pay for one."""
    driver = toy_driver(make_sampler=make_sampler)
    plain = SamplingParams(temperature=0.0, logprobs=3)
    driver.start(new_sequence(0, [1, 2], plain))
    driver.start(new_sequence(1, [1, 2], SamplingParams(temperature=2.0, logprobs=3), seed=4))
    driver.start(new_sequence(2, [1, 2]))
    result = driver.step(0, 1, 2)
    greedy, hot = (result.logprobs[SequenceId(key)][0] for key in (0, 1))
    assert set(result.logprobs) == {0, 1}
    assert greedy.top == hot.top
    assert greedy.token_id == result.sampled[SequenceId(2)][0] == greedy.top[0][0]
    assert hot.token_id == result.sampled[SequenceId(1)][0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(prompt_logprobs=1, logprobs=1)])
@pytest.mark.parametrize("max_logits", [3, 100])
def test_nan_fails_one_sequence(
    make_sampler: MakeSampler, bad: float, params: SamplingParams, max_logits: int
) -> None:
    """SA-07: turns red when NaN logits yield a token, or take the batch with them."""
    runner, model = toy_runner(make_sampler=make_sampler, max_num_seqs=3, max_logits=max_logits)
    model.spoiled[13] = bad
    driver = Driver(runner)
    driver.start(new_sequence(0, [1, 2]))
    driver.start(new_sequence(1, [1, 2, 3, 13], params))
    driver.start(new_sequence(2, [1, 2]))
    result = driver.step(0, 1, 2)
    assert set(result.failed) == {1}
    assert "logits" in result.failed[SequenceId(1)].message
    assert set(result.sampled) == {0, 2}
    assert result.logprobs == result.prompt_logprobs == {}


def test_nan_inside_a_prompt_fails_its_scores_even_if_the_last_row_is_fine(
    make_sampler: MakeSampler,
) -> None:
    """SA-07: turns red when a broken prompt logprob is reported, or its sequence goes on."""
    runner, model = toy_runner(make_sampler=make_sampler, max_logits=4)
    model.spoiled[13] = math.nan
    driver = Driver(runner)
    driver.start(new_sequence(0, [13, 1, 2, 3, 4, 5], SamplingParams(prompt_logprobs=1)))
    result = driver.step(0)
    assert set(result.failed) == {0}
    assert result.sampled == result.prompt_logprobs == {}


def test_is_usable_after_an_exception(make_sampler: MakeSampler, alone: list[list[int]]) -> None:
    """Turns red when a failed step leaves rows behind that break the sequences after it."""
    runner, model = toy_runner(make_sampler=make_sampler, max_num_seqs=2)
    model.error = MemoryError("no room")
    driver = Driver(runner)
    for key in (0, 1):
        start(driver, key)
    with pytest.raises(MemoryError):
        driver.step(0, 1)
    model.error = None
    for key in (0, 1):
        driver.preempt(key)  # the scheduler's fail(): the next plan releases them
    assert driver.generate(0, 1, num_tokens=12) == alone[:2]
    for key in (0, 1):
        driver.stop(key)
    driver.step()
    assert runner.num_sequences == 0


def test_copies_come_before_the_step_writes(make_sampler: MakeSampler) -> None:
    """Turns red when copy-on-write copies after computing, or the copied block is not read."""
    runner, model = toy_runner(make_sampler=make_sampler)
    first = new_sequence(0, [1, 2, 3, 4, 5, 6])
    second = new_sequence(1, [1, 2, 3, 9])
    one = SequenceId(0), SequenceId(1)
    runner.execute(
        SchedulerOutput(
            0, (first,), (ScheduledSequence(one[0], first.prompt_token_ids, 0, 0, (3, 4), True),)
        )
    )
    copied = runner.execute(
        SchedulerOutput(
            1,
            (second,),
            (ScheduledSequence(one[1], (9,), 3, 0, (BlockId(5),), True),),
            copies=(BlockCopy(BlockId(3), BlockId(5)),),
        )
    )
    driver = toy_driver(make_sampler=make_sampler)
    driver.start(second)
    assert copied.sampled == driver.step(1).sampled
    assert model.batches[-1].kv_lens.tolist() == [4]


def test_a_plan_without_work_only_releases(make_sampler: MakeSampler) -> None:
    """Turns red when an empty plan calls the model or forgets the releases."""
    runner, model = toy_runner(make_sampler=make_sampler)
    driver = Driver(runner)
    driver.start(new_sequence(0))
    driver.step(0)
    driver.stop(0)
    assert driver.step() == ModelRunnerOutput()
    assert len(model.batches) == 1
    assert runner.num_sequences == 0


def fork_plan(runner_params: SamplingParams, *, forks: tuple[int, ...] = (1, 2)) -> SchedulerOutput:
    """Compute a prompt of six tokens once for three sequences."""
    prompt = tuple(prompt_of(1)[:6])
    new = tuple(new_sequence(key, prompt, runner_params, seed=60 + key) for key in range(3))
    names = tuple(SequenceId(key) for key in forks)
    blocks = (BlockId(0), BlockId(1))
    item = ScheduledSequence(SequenceId(0), prompt, 0, 0, blocks, True, names)
    return SchedulerOutput(0, new, (item,))


@pytest.mark.parametrize("params", SETTINGS)
def test_forks_sample_from_the_same_logits_by_their_own_seeds(
    make_sampler: MakeSampler, params: SamplingParams
) -> None:
    """Turns red when a branch draws with the seed, bans or penalties of another."""
    runner, _ = toy_runner(make_sampler=make_sampler)
    result = runner.execute(fork_plan(params))
    separate = toy_driver(make_sampler=make_sampler)
    for key in range(3):
        separate.start(new_sequence(key, prompt_of(1)[:6], params, seed=60 + key))
    wanted = separate.generate(0, 1, 2, num_tokens=2)
    first = [list(result.sampled[SequenceId(key)]) for key in range(3)]
    assert first == [tokens[:1] for tokens in wanted]
    # From then on each is a sequence of its own; two of them copy the block that they write.
    scheduled = tuple(
        ScheduledSequence(SequenceId(key), tuple(first[key]), 6, at, blocks, True)
        for key, at, blocks in (
            (0, 1, (BlockId(2),)),
            (1, 0, (BlockId(0), BlockId(3))),
            (2, 0, (BlockId(0), BlockId(1))),
        )
    )
    copies = (BlockCopy(BlockId(1), BlockId(2)), BlockCopy(BlockId(1), BlockId(3)))
    result = runner.execute(SchedulerOutput(1, (), scheduled, copies))
    assert [list(result.sampled[SequenceId(key)]) for key in range(3)] == [
        tokens[1:] for tokens in wanted
    ]


def test_a_fork_must_be_known_and_have_the_same_tokens(make_sampler: MakeSampler) -> None:
    """Turns red when a plan that forks the wrong sequence passes."""
    with pytest.raises(InvariantError, match="is to be forked"):
        toy_runner(make_sampler=make_sampler)[0].execute(fork_plan(GREEDY, forks=(1, 7)))
    plan = fork_plan(GREEDY)
    other = new_sequence(2, [1, 2], GREEDY)
    with pytest.raises(InvariantError, match="not all of these have its 6 tokens"):
        toy_runner(make_sampler=make_sampler)[0].execute(replace(plan, new=(*plan.new[:2], other)))
