"""Logprobs: of the raw distribution, ranked, finite and JSON."""

import json
import math

import numpy as np
import pytest

from octavo.core.errors import GenerationError, InvariantError
from octavo.core.request import TokenLogprobs
from octavo.kernels.sampling.logprobs import LOWEST_LOGPROB
from support_sampling import MakeSampler


def row(*logits: float) -> np.ndarray:
    """Return a row of logits."""
    return np.array(logits, dtype=np.float32)


def score(
    make_sampler: MakeSampler, logits: np.ndarray, token_id: int, num_top: int
) -> TokenLogprobs:
    """Return the score of one token."""
    return make_sampler(len(logits)).score(logits[None], [token_id], num_top)[0]


def test_equals_a_float64_log_softmax(make_sampler: MakeSampler) -> None:
    """Turns red when the normalisation, the order or the ranks are wrong."""
    logits = (4 * np.random.default_rng(1).standard_normal(3000)).astype(np.float32)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = np.argsort(-exact)
    for token_id in (0, int(order[0]), int(order[1500]), 2999):
        scored = score(make_sampler, logits, token_id, 5)
        assert scored.token_id == token_id
        assert scored.logprob == pytest.approx(exact[token_id], abs=1e-6)
        assert order[scored.rank - 1] == token_id
        assert [i for i, _ in scored.top] == order[:5].tolist()
        assert [p for _, p in scored.top] == pytest.approx(exact[order[:5]], abs=1e-6)


@pytest.mark.parametrize("num_top", [3, 4, 5, 20, 10**6])
def test_a_small_vocabulary_gives_fewer_entries(make_sampler: MakeSampler, num_top: int) -> None:
    """SA-12: turns red when asking for more entries than there are tokens raises."""
    scored = score(make_sampler, row(1.0, 3.0, 2.0), 0, num_top)
    assert [token_id for token_id, _ in scored.top] == [1, 2, 0]


def test_no_top_entries_when_none_are_asked(make_sampler: MakeSampler) -> None:
    """SA-12: the other end: logprobs 0 scores the chosen token alone."""
    assert score(make_sampler, row(0.0, 0.0), 1, 0) == TokenLogprobs(1, math.log(0.5), 2)


@pytest.mark.parametrize(
    "logits",
    [
        row(0.0, -np.inf, -np.inf),
        row(3e38, -3e38, -np.inf),
        row(-3e38, -np.inf, -np.inf),
        row(0.0, -20000.0, -1e9),
    ],
)
def test_impossible_tokens_get_a_number_that_json_has(
    make_sampler: MakeSampler, logits: np.ndarray
) -> None:
    """SA-16: turns red when minus infinity or NaN reaches the JSON encoder."""
    for token_id in range(3):
        scored = score(make_sampler, logits, token_id, 5)
        values = [scored.logprob, *(value for _, value in scored.top)]
        json.dumps(values, allow_nan=False)
        assert all(LOWEST_LOGPROB <= value <= 0.0 for value in values)
    assert score(make_sampler, logits, 2, 0).logprob == LOWEST_LOGPROB


def test_equal_tokens_rank_by_id_like_greedy_does(make_sampler: MakeSampler) -> None:
    """Turns red when the greedy choice among equals does not have rank 1."""
    logits = row(1.0, 2.0, 2.0, 2.0)
    assert [score(make_sampler, logits, i, 2).rank for i in range(4)] == [4, 1, 2, 3]
    assert [i for i, _ in score(make_sampler, logits, 0, 2).top] == [1, 2]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_unusable_logits_are_refused(make_sampler: MakeSampler, bad: float) -> None:
    """SA-07: turns red when NaN logits are reported as logprobs."""
    with pytest.raises(GenerationError):
        score(make_sampler, row(0.0, bad), 0, 1)
    with pytest.raises(GenerationError):
        score(make_sampler, row(-np.inf, -np.inf), 0, 1)


def test_scores_row_i_for_token_i(make_sampler: MakeSampler) -> None:
    """Turns red when prompt scores are shifted by one."""
    logits = np.stack([row(0.0, 5.0), row(5.0, 0.0)])
    assert [score.rank for score in make_sampler(2).score(logits, [1, 0], 0)] == [1, 1]
    with pytest.raises(InvariantError):
        make_sampler(2).score(logits, [1], 0)
