"""The native sampler equals the numpy one: tokens, logprobs and failures, bit for bit."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray

from octavo.core.errors import InvariantError
from octavo.core.plan import NewSequence
from octavo.core.sampling import SamplingParams
from octavo.kernels.sampling.interface import Mask, Sampler
from octavo.kernels.sampling.numpy_sampler import NumpySampler
from octavo.kernels.sampling.weights import MAX_VOCAB, token_masses, token_weights
from support_native import ISAS, backend_of
from support_sampling import new_sequence

Float32 = NDArray[np.float32]

VOCABS = [1, 2, 7, 33, 64, 65, 200, 4099]
LARGE_VOCABS = [49_152, 152_064]
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.0, logprobs=0),
    SamplingParams(temperature=0.8, top_k=50),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, logprobs=20),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(temperature=0.9, top_p=0.999, frequency_penalty=0.3, min_tokens=5),
]


@functools.cache
def sampler_of(isa: str, vocab: int) -> Sampler:
    """Return a sampler on two threads."""
    return backend_of(isa).sampler(vocab)


def make_row(rng: Generator, vocab: int) -> Float32:
    """Return logits of a random shape: flat, tied, peaked, banned in part, huge."""
    kind = rng.integers(8)
    row = rng.standard_normal(vocab).astype(np.float32)
    if kind == 0:
        row[:] = rng.choice([-3.0, 0.0, 7.5])
    elif kind == 1:
        row = rng.integers(-3, 4, vocab).astype(np.float32)
    elif kind == 2:
        row *= rng.choice([1e-6, 0.1, 30.0, 1e5, 1e37])
    elif kind == 3:
        row[rng.random(vocab) < rng.choice([0.1, 0.9])] = -np.inf
        row[rng.integers(vocab)] = 0.5
    elif kind == 4:
        row[rng.integers(vocab)] += 12.0
    elif kind == 5:
        row = np.sort(3.0 * row)[:: rng.choice([-1, 1])].copy()
    else:
        row *= 3.0
    return row


def make_params(rng: Generator, vocab: int) -> SamplingParams:
    """Return random settings, each of them neutral half of the time."""

    def maybe(neutral: float, *values: float) -> float:
        return neutral if rng.random() < 0.5 else float(rng.choice(values))

    ids = rng.integers(0, vocab, 3).tolist()
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1e-5, 1e-3, 0.3, 0.8, 1.0, 2.0])),
        top_k=int(maybe(0, -1, 1, 2, 5, 50, max(1, vocab - 1), vocab, vocab + 3)),
        top_p=maybe(1.0, 1e-7, 0.3, 0.9, 0.999, 0.9999999, 1.0 - 1e-12),
        min_p=maybe(0.0, 1e-35, 1e-9, 0.01, 0.5, 1.0),
        repetition_penalty=maybe(1.0, 0.01, 0.7, 1.1, 3.0),
        frequency_penalty=maybe(0.0, -0.3, 0.7, 2.0),
        presence_penalty=maybe(0.0, -2.0, 0.1),
        logit_bias={i: float(rng.choice([-100.0, -2.5, 1.7, 100.0])) for i in ids}
        if rng.random() < 0.3
        else {},
        min_tokens=int(maybe(0, 4)),
        max_tokens=None,
        logprobs=None if rng.random() < 0.5 else int(rng.choice([0, 1, 5, 20, 10_000])),
    )


def make_sequence(rng: Generator, params: SamplingParams, vocab: int) -> NewSequence:
    """Return a sequence with a prompt, some output and ids that end it, some outside."""
    prompt, output, ending = (
        rng.integers(0, vocab + 2, rng.integers(1, most)).tolist() for most in (300, 50, 4)
    )
    seed = int(rng.integers(2**63))
    return new_sequence(0, prompt, params, seed=seed, output=output, ending=ending)


def make_masks(rng: Generator, rows: int, vocab: int) -> dict[int, Mask]:
    """Return masks for some of the rows, one of which may allow nothing."""
    return {
        i: np.packbits(rng.random(vocab) < rng.choice([0.0, 0.02, 0.7, 1.0]), bitorder="little")
        for i in range(rows)
        if rng.random() < 0.3
    }


def check(
    native: Sampler,
    logits: Float32,
    sequences: list[NewSequence],
    draws: list[int],
    masks: dict[int, Mask],
    rows: list[int] | None = None,
) -> None:
    """Assert that both samplers return the same."""
    results = []
    for sampler in (NumpySampler(logits.shape[1]), native):
        states = [sampler.state(sequence) for sequence in sequences]
        result = sampler.sample(logits, states, draws, masks, rows)
        failures = {i: (type(e), e.message) for i, e in result.failures.items()}
        results.append((result.token_ids, failures, result.logprobs))
    assert results[0] == results[1]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", VOCABS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_rows_and_settings(isa: str, vocab: int, seed: int) -> None:
    """Turns red when a bound, a tie, a rounding or an order of steps differs from the reference."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 9))
    logits = np.stack([make_row(rng, vocab) for _ in range(count)])
    if rng.random() < 0.2:
        logits[rng.integers(count), rng.integers(vocab)] = rng.choice([np.nan, np.inf])
    sequences = [make_sequence(rng, make_params(rng, vocab), vocab) for _ in range(count)]
    draws = rng.integers(0, 9, count).tolist()
    rows = rng.integers(0, count, count).tolist() if rng.random() < 0.3 else None
    check(sampler_of(isa, vocab), logits, sequences, draws, make_masks(rng, count, vocab), rows)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_large_vocabularies(isa: str, vocab: int) -> None:
    """Turns red when a block or a bound goes wrong only in vocabularies of real size."""
    rng = np.random.default_rng(vocab)
    logits = np.stack([make_row(rng, vocab) for _ in range(10)])
    sequences = [make_sequence(rng, params, vocab) for params in PARAMS]
    check(sampler_of(isa, vocab), logits, sequences, list(range(10)), make_masks(rng, 10, vocab))
    for _ in range(3):
        sequences = [make_sequence(rng, make_params(rng, vocab), vocab) for _ in range(10)]
        check(sampler_of(isa, vocab), logits, sequences, list(range(10)), {})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [7, 4099, 49_152])
def test_every_draw_of_a_stream(isa: str, vocab: int) -> None:
    """Turns red when the stream, or where it lands in a long row, differs."""
    rng = np.random.default_rng(1)
    logits = (2.0 * rng.standard_normal((1, vocab))).astype(np.float32)
    for params in PARAMS[2:]:
        sequence = new_sequence(0, sampling=params, seed=-5)
        check(sampler_of(isa, vocab), logits, [sequence] * 40, list(range(40)), {}, [0] * 40)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [1, 65, 4099])
def test_scores(isa: str, vocab: int) -> None:
    """Turns red when ranks, ties or sums of prompt logprobs differ, whatever the token."""
    rng = np.random.default_rng(vocab)
    logits = np.stack([make_row(rng, vocab) for _ in range(20)])
    for num_top in (0, 1, 7, 5000):
        tokens = rng.integers(0, vocab, 20).tolist()
        expected = NumpySampler(vocab).score(logits, tokens, num_top)
        assert sampler_of(isa, vocab).score(logits, tokens, num_top) == expected


@pytest.mark.parametrize("isa", ISAS)
def test_company_and_threads_change_nothing(isa: str) -> None:
    """Turns red when a row's result depends on the other rows, or on the thread that takes it."""
    rng = np.random.default_rng(3)
    vocab = 4099
    logits = np.stack([make_row(rng, vocab) for _ in range(64)])
    sequences = [make_sequence(rng, make_params(rng, vocab), vocab) for _ in range(64)]
    one, many = backend_of(isa, threads=1).sampler(vocab), backend_of(isa, threads=5).sampler(vocab)
    alone = [
        one.sample(logits[i : i + 1], [one.state(sequence)], [3])
        for i, sequence in enumerate(sequences)
    ]
    together = many.sample(logits, [many.state(sequence) for sequence in sequences], [3] * 64)
    assert together.token_ids == [single.token_ids[0] for single in alone]
    assert together.logprobs == {i: s.logprobs[0] for i, s in enumerate(alone) if s.logprobs}


@pytest.mark.parametrize("isa", ISAS)
def test_output_is_counted_as_it_comes(isa: str) -> None:
    """Turns red when tokens noted one by one count differently from those known at the start."""
    rng = np.random.default_rng(4)
    params = SamplingParams(temperature=0.7, frequency_penalty=0.4, repetition_penalty=1.2)
    logits = rng.standard_normal((1, 100)).astype(np.float32)
    output = rng.integers(0, 102, 200).tolist()
    sampler = sampler_of(isa, 100)
    noted = sampler.state(new_sequence(0, sampling=params, output=output[:50]))
    noted.note_output(tuple(output[50:]))
    known = new_sequence(0, sampling=params, output=output)
    tokens = sampler.sample(logits, [noted] * 30, range(30), rows=[0] * 30).token_ids
    assert tokens == [
        NumpySampler(100).sample(logits, [NumpySampler(100).state(known)], [k]).token_ids[0]
        for k in range(30)
    ]


def test_what_does_not_fit_is_refused_without_reading_it() -> None:
    """Turns red when wrong shapes, rows or masks reach memory that is not theirs."""
    sampler = backend_of(ISAS[0]).sampler(40)
    state = sampler.state(new_sequence())
    logits = np.zeros((2, 40), np.float32)
    for arguments in (
        (np.zeros((1, 39), np.float32), [state], [0]),
        (logits, [state], [0]),
        (logits, [state], [0], {}, [2]),
        (logits, [state], [0], {}, [-1]),
        (logits, [state] * 2, [0]),
        (logits, [state] * 2, [0, 1], {0: np.zeros(4, np.uint8)}),
    ):
        with pytest.raises(InvariantError):
            sampler.sample(*arguments)
    with pytest.raises(InvariantError):
        sampler.score(logits, [0, 40], 1)
    with pytest.raises(InvariantError):
        backend_of(ISAS[0]).sampler(MAX_VOCAB + 1)


@pytest.mark.parametrize("isa", ISAS)
def test_the_largest_vocabulary_does_not_overflow(isa: str) -> None:
    """Turns red when masses of a flat row of the most tokens pass 63 bits."""
    logits = np.zeros((1, MAX_VOCAB), np.float32)
    weights = token_weights(logits[0], np.float32(0.0))
    assert int(token_masses(weights).sum()) == MAX_VOCAB * 2**44
    params = replace(PARAMS[5], top_p=0.5, logprobs=1)
    check(backend_of(isa).sampler(MAX_VOCAB), logits, [new_sequence(sampling=params)], [0], {})
