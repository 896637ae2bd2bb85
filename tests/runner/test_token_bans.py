"""Allowed tokens and bad words: what a request itself forbids."""

import numpy as np
import pytest

from octavo.core.ids import SequenceId
from octavo.core.plan import NewSequence
from octavo.core.sampling import SamplingParams
from octavo.runner.token_bans import TokenBans

VOCAB = 21


def bans(
    params: SamplingParams, output: tuple[int, ...] = (), ending: frozenset[int] = frozenset()
) -> TokenBans:
    """Return the bans of a sequence with this output."""
    return TokenBans(
        NewSequence(
            sequence_id=SequenceId(1),
            prompt_token_ids=(7, 8),
            output_token_ids=output,
            sampling=params,
            seed=0,
            ending_token_ids=ending,
        ),
        VOCAB,
    )


def banned(mask: np.ndarray) -> set[int]:
    """Return the tokens that a mask forbids; bits past the vocabulary must not be set."""
    bits = np.unpackbits(mask, bitorder="little")
    assert not bits[VOCAB:].any()
    return set(np.flatnonzero(bits[:VOCAB] == 0).tolist())


def test_only_allowed_tokens() -> None:
    """Turns red when another token may be chosen, or bits past the vocabulary are set."""
    params = SamplingParams(allowed_token_ids=(3, 20))
    assert banned(bans(params).mask(0, None)) == set(range(VOCAB)) - {3, 20}


def test_a_word_of_one_token_is_always_banned() -> None:
    """Turns red when it may come at some place."""
    row = bans(SamplingParams(bad_words_token_ids=((5,), (20,))))
    for k in range(3):
        assert banned(row.mask(k, None)) == {5, 20}
        row.note_output((k,))


def test_a_longer_word_is_banned_where_it_would_be_completed() -> None:
    """Turns red when the last token is banned elsewhere, or the beginning is looked for in the
    prompt, in an output that is too short, or not in one that came with the sequence."""
    row = bans(SamplingParams(bad_words_token_ids=((8, 9), (1, 2, 3), (2, 4))))
    assert banned(row.mask(0, None)) == set()
    row.note_output((2,))
    assert banned(row.mask(1, None)) == {4}
    row.note_output((1, 2))
    assert banned(row.mask(3, None)) == {3, 4}
    row.note_output((5,))
    assert banned(row.mask(4, None)) == set()
    resumed = bans(SamplingParams(bad_words_token_ids=((1, 2, 3),)), output=(9, 1, 2))
    assert banned(resumed.mask(3, None)) == {3}


def test_min_tokens_is_kept() -> None:
    """Turns red when a mask lets an answer end that has too few tokens: samplers leave that to it.
    Where there is a grammar, its own mask has settled it."""
    params = SamplingParams(min_tokens=2, max_tokens=5, bad_words_token_ids=((5,),))
    row = bans(params, ending=frozenset({6, 99}))
    assert banned(row.mask(1, None)) == {5, 6}
    assert banned(row.mask(2, None)) == {5}
    grammar = np.packbits(np.arange(VOCAB) < 8, bitorder="little")
    assert banned(row.mask(1, grammar)) == {5, *range(8, VOCAB)}


@pytest.mark.parametrize("word", [(99,), (1, 99), (99, 1)])
def test_ids_past_the_vocabulary_ban_nothing(word: tuple[int, ...]) -> None:
    """Turns red when a word that cannot be written fails its request."""
    row = bans(SamplingParams(bad_words_token_ids=(word,)), output=(1,))
    assert banned(row.mask(1, None)) == set()
