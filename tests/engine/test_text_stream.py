"""Text of one completion: detokenizing, stop strings and stop tokens together."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.sampling import SamplingParams
from octavo.engine.text_stream import TextStream
from octavo.models.tokenizer import Tokenizer
from support_engine import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def stream(tokenizer: Tokenizer, **sampling: object) -> TextStream:
    return TextStream(tokenizer, SamplingParams(**sampling))


def test_tokens_past_a_stop_string_do_not_count(tokenizer: Tokenizer) -> None:
    """ST-07: turns red when a token computed past the stop reaches text, logprobs or usage."""
    ids = tokenizer.encode("one, two, three, four, five, six", add_special_tokens=False)
    delta = stream(tokenizer, stop=("five",)).push(ids, last=False)
    assert delta.text == "one, two, three, four, "
    assert delta.stop == "five"
    assert delta.num_tokens == len("one, two, three, four, five")


def test_stop_string_over_several_pushes_never_leaks(tokenizer: Tokenizer) -> None:
    """ST-04: turns red when the start of a stop string is sent before its end is known."""
    text = stream(tokenizer, stop=("DEFGHIJ",))
    pieces = [text.push([ord(c)], last=False) for c in "ABCDEFGHIJ"]
    assert "".join(p.text for p in pieces) == "ABC"
    assert [p.stop for p in pieces][-1] == "DEFGHIJ"


def test_held_text_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    """ST-05: turns red when what was held back for a stop string is lost at the end."""
    text = stream(tokenizer, stop=("XYZWV",))
    first = text.push([*b"abX"], last=False)
    rest = text.push([], last=True)
    assert first.text + rest.text == "abX"
    assert first.text == "ab"


def test_stop_token_leaves_no_text(tokenizer: Tokenizer) -> None:
    """Turns red when the text of the token that ended the output is shown."""
    delta = stream(tokenizer).push([*b"hi!"], last=True, stop_token=True)
    assert delta.text == "hi"
    assert delta.num_tokens == 3
    kept = stream(tokenizer, include_stop_str_in_output=True).push(
        [*b"hi!"], last=True, stop_token=True
    )
    assert kept.text == "hi!"


def test_stop_string_before_min_tokens_is_text(tokenizer: Tokenizer) -> None:
    """Turns red when a stop string ends an output before its min_tokens."""
    text = stream(tokenizer, stop=("b",), min_tokens=3)
    delta = text.push([*b"abcdb!"], last=False)
    assert delta.text == "abcd"
    assert delta.num_tokens == 5


def test_unfinished_character_at_the_limit_becomes_a_mark(tokenizer: Tokenizer) -> None:
    """ST-01: turns red when an output cut inside a character is not valid text."""
    delta = stream(tokenizer).push([*"é".encode()[:1]], last=True)
    assert delta.text == "\ufffd"


@given(
    data=st.binary(max_size=24),
    cuts=st.lists(st.integers(0, 24)),
    stop=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_chunking_changes_nothing(
    tokenizer: Tokenizer, data: bytes, cuts: list[int], stop: list[str]
) -> None:
    """ST-16: turns red when text depends on how many tokens come at once."""
    data = bytes(b"ab!"[byte % 3] for byte in data)

    def run(edges: list[int]) -> tuple[str, int, str | None]:
        text = stream(tokenizer, stop=tuple(stop))
        out, count = "", 0
        for start, end in itertools.pairwise(edges):
            delta = text.push([*data[start:end]], last=end == len(data) and end == edges[-1])
            out, count = out + delta.text, count + delta.num_tokens
            if delta.stop is not None:
                return out, count, delta.stop
        return out, count, None

    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assert run(edges) == run([0, len(data)])
