"""The sampler: every row by itself, in the documented order."""

import math
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import InvalidRequestError, InvariantError
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.kernels.sampling.interface import SamplingState
from support_sampling import GREEDY, MakeSampler, sampling_state

BANNED = -np.inf


def choose(
    make_sampler: MakeSampler, logits: list[float], state: SamplingState, num_output_tokens: int = 0
) -> int | str:
    """Return the token chosen for one row, or why it failed."""
    row = np.array([logits], dtype=np.float32)
    result = make_sampler(len(logits)).sample(row, [state], [num_output_tokens])
    assert np.array_equal(row, np.array([logits], dtype=np.float32), equal_nan=True)
    failure = result.failures.get(0)
    return result.token_ids[0] if failure is None else failure.message


@pytest.mark.parametrize(
    ("logits", "expected"), [([1, 1, 0], 0), ([0, 1, 1], 1), ([-5, -5, -5], 0), ([BANNED, 2, 2], 1)]
)
@pytest.mark.parametrize(
    "greedy",
    [
        GREEDY,
        SamplingParams(temperature=0.0, top_p=0.9),
        SamplingParams(temperature=0.0, top_k=2, min_p=0.3),
        SamplingParams(temperature=1e-6),
    ],
)
def test_greedy_is_the_lowest_id_among_equals_in_any_company(
    make_sampler: MakeSampler, logits: list[float], expected: int, greedy: SamplingParams
) -> None:
    """SA-02: turns red when a greedy row of a mixed batch is sampled instead of taking the max."""
    states = [
        sampling_state(make_sampler(3), greedy),
        sampling_state(make_sampler(3), SamplingParams(), seed=8),
    ]
    rows = np.array([logits, logits], dtype=np.float32)
    mixed = {make_sampler(3).sample(rows, states, [0, k]).token_ids[0] for k in range(200)}
    alone = make_sampler(3).sample(rows[:1], states[:1], [0]).token_ids
    assert mixed == set(alone) == {expected}


def mixed_states(make_sampler: MakeSampler) -> list[SamplingState]:
    """Return rows that differ in every setting, NaN-free."""
    settings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.5),
        SamplingParams(temperature=0.8, top_k=3),
        SamplingParams(temperature=0.8, top_p=0.5),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=0.0, logit_bias={5: 100.0}),
        SamplingParams(temperature=1.0, logit_bias={5: -100.0, 6: 3.0}),
        SamplingParams(temperature=0.0, presence_penalty=2.0),
        SamplingParams(temperature=1.0, frequency_penalty=-1.0, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, min_tokens=9),
    ]
    return [
        sampling_state(
            make_sampler(20), params, seed=i, prompt=[1, 2, 3], output=[3, 4, 4], ending=[0, 7, 19]
        )
        for i, params in enumerate(settings)
    ]


def test_each_row_equals_its_own_single_run(make_sampler: MakeSampler) -> None:
    """SA-04, SA-05: turns red when settings, penalties, bias or seeds leak between rows."""
    states = mixed_states(make_sampler)
    rng = np.random.default_rng(0)
    for k in range(30):
        rows = (2 * rng.standard_normal((len(states), 20))).astype(np.float32)
        together = make_sampler(20).sample(rows, states, [k] * len(states)).token_ids
        order = rng.permutation(len(states))
        shuffled = make_sampler(20).sample(
            rows[order], [states[i] for i in order], [k] * len(states)
        )
        alone = [make_sampler(20).sample(rows[i : i + 1], [s], [k]) for i, s in enumerate(states)]
        assert together == [single.token_ids[0] for single in alone]
        assert shuffled.token_ids == [together[i] for i in order]


def test_a_seed_fixes_the_draws_and_nothing_else_does(make_sampler: MakeSampler) -> None:
    """SA-05: turns red when the stream is advanced by anything but the row's own tokens."""
    logits = np.zeros((2, 1000), dtype=np.float32)
    seeded = sampling_state(make_sampler(1000), SamplingParams(temperature=0.8), seed=42)
    runs = []
    for mate_seed in (None, 42, 43, 7):
        states = [seeded]
        if mate_seed is not None:
            states.append(sampling_state(make_sampler(1000), SamplingParams(), seed=mate_seed))
        sampler = make_sampler(1000)
        runs.append(
            [
                sampler.sample(logits[: len(states)], states, [k] * len(states)).token_ids[0]
                for k in range(20)
            ]
        )
    assert all(run == runs[0] for run in runs)
    assert len(set(runs[0])) > 15


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 4])
@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=1e-4, ignore_eos=True),
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=0.0, logit_bias={0: -100.0, 1: -100.0, 4: -100.0}),
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
    ],
)
def test_nan_or_infinity_fails_its_row_alone(
    make_sampler: MakeSampler, bad: float, place: int, params: SamplingParams
) -> None:
    """SA-07: turns red when NaN logits pick token 0, or hurt a batch-mate."""
    rows = np.array([[0.0, 3.0, 1.0, 2.0, 0.5]] * 3, dtype=np.float32)
    rows[1, place] = bad
    states = [
        sampling_state(make_sampler(5)),
        sampling_state(make_sampler(5), params),
        sampling_state(make_sampler(5)),
    ]
    result = make_sampler(5).sample(rows, states, [0, 0, 0])
    assert [result.token_ids[0], result.token_ids[2]] == [1, 1]
    assert list(result.failures) == [1]
    assert ("NaN" if math.isnan(bad) else "infinity") in result.failures[1].message


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=1, top_p=0.5)])
def test_a_row_without_any_token_left_fails_with_a_sentence(
    make_sampler: MakeSampler, params: SamplingParams
) -> None:
    """Turns red when a row whose tokens are all banned silently yields token 0."""
    assert "banned" in str(
        choose(make_sampler, [BANNED] * 4, sampling_state(make_sampler(4), params))
    )
    everything = SamplingParams(
        temperature=params.temperature, logit_bias=dict.fromkeys(range(4), -100.0)
    )
    assert "banned" in str(
        choose(make_sampler, [1.0] * 4, sampling_state(make_sampler(4), everything))
    )


ALL = dict.fromkeys(range(4), -100.0)
LETTER = StructuredOutput.regex("a", param="response_format")


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"logit_bias": ALL}, ["logit_bias"]),
        ({"logit_bias": {0: 5.0}, "bad_words_token_ids": ((0,), (1,))}, ["bad_words"]),
        (
            {"bad_words_token_ids": ((0,),), "allowed_token_ids": (0,)},
            ["bad_words", "allowed_token_ids"],
        ),
        ({"structured_output": LETTER}, ["response_format"]),
        ({"structured_output": LETTER, "logit_bias": ALL}, ["logit_bias", "response_format"]),
        ({}, ["min_tokens"]),
    ],
    ids=str,
)
def test_what_bans_every_token_is_named(
    make_sampler: MakeSampler, settings: dict[str, Any], names: list[str]
) -> None:
    """Turns red when a user is sent to a setting that has no part in it."""
    sampler = make_sampler(4)
    state = sampling_state(sampler, SamplingParams(**settings))
    nothing = {0: np.zeros(1, np.uint8)}
    failure = sampler.sample(np.ones((1, 4), np.float32), [state], [0], nothing).failures[0]
    assert failure.param == names[0]
    assert failure.message.endswith(f"banned by its {' and '.join(names)}.")


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "presence_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_settings_are_refused_by_name(name: str, value: float) -> None:
    """SA-08: turns red when a range check is written so that NaN, which compares false, passes."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinite_penalties_are_refused_by_name(name: str, value: float) -> None:
    """SA-08: the neighbours, logit_bias values among them."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    with pytest.raises(InvalidRequestError):
        SamplingParams(logit_bias={1: value})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_bans_and_forces(make_sampler: MakeSampler, temperature: float) -> None:
    """SA-10: turns red when -100 is not a ban or +100 does not decide, up to the last token."""
    ban = SamplingParams(temperature=temperature, logit_bias={1: -100.0, 3: -100})
    force = SamplingParams(temperature=temperature, logit_bias={3: 100.0})
    for k in range(50):
        assert choose(make_sampler, [0, 500, 1, 400], sampling_state(make_sampler(4), ban), k) in (
            0,
            2,
        )
        assert choose(make_sampler, [0, 9, 1, -30], sampling_state(make_sampler(4), force), k) == 3


@pytest.mark.parametrize("token_id", [4, 5, 10**9])
def test_a_bias_outside_the_vocabulary_fails_its_row_alone(
    make_sampler: MakeSampler, token_id: int
) -> None:
    """SA-10: turns red when an id past the vocabulary raises, which would end the whole step."""
    state = sampling_state(
        make_sampler(4), SamplingParams(temperature=0.0, logit_bias={token_id: 5.0})
    )
    rows = np.array([[0, 1, 2, 3]] * 2, dtype=np.float32)
    result = make_sampler(4).sample(rows, [state, sampling_state(make_sampler(4))], [0, 0])
    assert result.token_ids[1] == 3
    assert str(token_id) in result.failures[0].message


@pytest.mark.parametrize("key", [-1, "abc", None, True, 1.0])
def test_a_bias_on_what_is_no_token_id_is_refused(key: object) -> None:
    """SA-10: turns red when a negative or non-integer key reaches the sampler."""
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(logit_bias={key: 5.0})  # type: ignore[dict-item]
    assert caught.value.param == "logit_bias"
    for value in (1000, None, "1"):
        with pytest.raises(InvalidRequestError):
            SamplingParams(logit_bias={0: value})  # type: ignore[dict-item]


def test_presence_and_frequency_count_the_output_alone(make_sampler: MakeSampler) -> None:
    """SA-13: turns red when prompt tokens are penalised, or output from before a preemption not."""
    params = SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5)
    logits = [0.0, 1.2, 0.0]  # token 1 leads by 1.2; once generated it has lost 1.5
    fresh = sampling_state(make_sampler(3), params, prompt=[1] * 50)
    assert choose(make_sampler, logits, fresh) == 1
    fresh.note_output([1])
    assert choose(make_sampler, logits, fresh, 1) == 0
    resumed = sampling_state(make_sampler(3), params, prompt=[1] * 50, output=[1])
    assert choose(make_sampler, logits, resumed, 1) == 0
    assert choose(make_sampler, [0.0, 1.51, 0.0], resumed, 1) == 1
    assert choose(make_sampler, [0.0, 1.49, 0.0], resumed, 1) == 0


@pytest.mark.parametrize(("times", "loss"), [(1, 1.5), (2, 2.0), (5, 3.5)])
def test_frequency_grows_and_presence_does_not(
    make_sampler: MakeSampler, times: int, loss: float
) -> None:
    """SA-13: turns red when presence is counted per occurrence or frequency once."""
    params = SamplingParams(temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5)
    state = sampling_state(make_sampler(3), params, output=[1] * times)
    assert choose(make_sampler, [0.0, loss + 0.01, 0.0], state, times) == 1
    assert choose(make_sampler, [0.0, loss - 0.01, 0.0], state, times) == 0


def test_repetition_includes_the_prompt_and_minds_the_sign(make_sampler: MakeSampler) -> None:
    """SA-13: turns red when repetition skips the prompt, or makes negative logits likelier."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    state = sampling_state(make_sampler(4), params, prompt=[1], output=[2])
    assert choose(make_sampler, [1.0, 1.9, 1.9, 0.0], state, 1) == 0
    assert choose(make_sampler, [1.0, 2.1, 0.0, 0.0], state, 1) == 1
    assert choose(make_sampler, [-1.5, -1.0, -1.0, -3.0], state, 1) == 0


def test_penalties_of_many_tokens_stay_with_their_tokens(make_sampler: MakeSampler) -> None:
    """Turns red when growing the counts mixes them up: 300 distinct tokens, one left out."""
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    output = [i for i in range(300) if i != 217]
    state = sampling_state(make_sampler(300), params, output=output)
    assert choose(make_sampler, [1.0] * 300, state, len(output)) == 217


@pytest.mark.parametrize("ending", [[3], [0, 3], [3, 7, -1], []])
@pytest.mark.parametrize("params_ignore_eos", [False, True])
def test_min_tokens_bans_the_ending_ids_and_for_the_first_tokens_only(
    make_sampler: MakeSampler, ending: list[int], params_ignore_eos: bool
) -> None:
    """SA-14: turns red when min_tokens counts the prompt, or an end id of -1 masks the last row."""
    params = SamplingParams(
        temperature=0.0, min_tokens=64, max_tokens=64, ignore_eos=params_ignore_eos
    )
    state = sampling_state(make_sampler(8), params, prompt=[5] * 1024, ending=ending)
    wants_end = [1.0, 0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.5]
    for k in (0, 1, 63):
        assert choose(make_sampler, wants_end, state, k) == (
            3 if 3 not in ending else 7 if 0 in ending else 0
        )
    assert choose(make_sampler, wants_end, state, 64) == 3
    wants_last = [0.0] * 7 + [1.0]
    assert choose(make_sampler, wants_last, state, 0) == (0 if 7 in ending else 7)


def test_logits_of_another_shape_are_a_bug(make_sampler: MakeSampler) -> None:
    """Turns red when logits of a wrong vocabulary are sampled without a word."""
    with pytest.raises(InvariantError):
        make_sampler(5).sample(
            np.zeros((1, 4), dtype=np.float32), [sampling_state(make_sampler(5))], [0]
        )
    with pytest.raises(InvariantError):
        make_sampler(4).sample(
            np.zeros((2, 4), dtype=np.float32), [sampling_state(make_sampler(4))], [0]
        )
