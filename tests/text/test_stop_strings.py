"""Stop strings across tokens: nothing leaks, nothing is held longer than needed."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.detokenizer import IncrementalDetokenizer
from octavo.engine.stop_strings import StopStringMatcher
from support_text import byte_level, chunked, quick

tiny_text = st.text("ab", max_size=14)
tiny_stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(stop: Sequence[str], pieces: Sequence[str], *, include: bool = False):
    """Return the deltas (the flush last) and the stop string that matched."""
    matcher = StopStringMatcher(stop, include=include)
    deltas, matched = [], None
    for piece in pieces:
        delta, found = matcher.push(piece)
        deltas.append(delta)
        matched = matched or found
    return [*deltas, matcher.finish()], matched


def brute_force(stop: Sequence[str], text: str, include: bool) -> tuple[str, str | None]:
    """Look at every beginning of the text: the first that ends with a stop string wins."""
    for end in range(len(text) + 1):
        found = [s for s in stop if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@quick
@given(stop=tiny_stops, pieces=chunked(tiny_text), include=st.booleans())
def test_any_cut_gives_the_text_of_a_plain_search(
    stop: list[str], pieces: list[str], include: bool
) -> None:
    """ST-04, ST-07, ST-16: red when how a text is cut changes what is shown, or what matched."""
    deltas, matched = run(stop, pieces, include=include)
    assert ("".join(deltas), matched) == brute_force(stop, "".join(pieces), include)


@quick
@given(stop=tiny_stops, pieces=chunked(tiny_text))
def test_only_the_longest_possible_start_is_held(stop: list[str], pieces: list[str]) -> None:
    """ST-05: red when text is held that no stop string starts with."""
    matcher = StopStringMatcher(stop)
    text = shown = ""
    for piece in pieces:
        delta, matched = matcher.push(piece)
        if matched:
            return
        text, shown = text + piece, shown + delta
        starts = {s[:length] for s in stop for length in range(1, len(s))}
        held = max((len(s) for s in starts if text.endswith(s)), default=0)
        assert shown == text[: len(text) - held]


def test_a_stop_string_over_several_tokens() -> None:
    """ST-04: red when DEF leaks before J completes the match."""
    for pieces in (list("ABCDEFGHIJKL"), ["ABC", "DEF", "G", "HI", "J"], ["ABCDEFGHIJ"]):
        deltas, matched = run(["DEFGHIJ"], pieces)
        assert "".join(deltas) == "ABC"
        assert matched == "DEFGHIJ"


@pytest.mark.parametrize(
    ("stop", "text", "shown", "matched"),
    [
        (["ab", "abc"], "xabcy", "x", "ab"),
        (["abc", "bc"], "xabcy", "x", "abc"),
        (["bc", "abc"], "xabcy", "x", "abc"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "one\n\n\ntwo", "one", "\n\n"),
        (["."], "", "", None),
        (["end"], "the en", "the en", None),
        (["é😀"], "caf\u00e9\U0001f600!", "caf", "é😀"),
        ([], "anything", "anything", None),
    ],
)
def test_overlapping_stop_strings(
    stop: list[str], text: str, shown: str, matched: str | None
) -> None:
    """ST-04: red when another than the first complete match wins (ties: the earliest start)."""
    for pieces in ([text], list(text)):
        deltas, found = run(stop, pieces)
        assert ("".join(deltas), found) == (shown, matched)


def test_the_stop_string_is_kept_if_asked() -> None:
    """Red when ``include_stop_str_in_output`` loses the stop string or keeps what follows."""
    for pieces in (["one ST", "OP two"], list("one STOP two")):
        assert "".join(run(["STOP"], pieces, include=True)[0]) == "one STOP"


def test_ordinary_text_is_not_delayed() -> None:
    """ST-05: red when the last characters of any text wait; the held one comes at the end."""
    deltas, matched = run(["XYZWV"], ["hello ", "world ", "the end X"])
    assert deltas == ["hello ", "world ", "the end ", "X"]
    assert matched is None


def test_nothing_comes_after_a_match() -> None:
    """ST-07: red when tokens past the stop, or the held tail, are flushed into the text."""
    pieces = ["one, ", "two, ", "three, ", "four, ", "fi", "ve, ", "six", ", seven"]
    deltas, matched = run(["five"], pieces)
    assert "".join(deltas) == "one, two, three, four, "
    assert matched == "five"
    assert deltas[-3:] == ["", "", ""]


@pytest.mark.parametrize("stop", [["b,c"], ["<"], [">x"], ["</think>x"]])
def test_a_marker_survives_any_hold_back(stop: list[str]) -> None:
    """ST-13: red when held text is lost or reordered, so that a parser misses a marker."""
    text = "a b, d </thin </think>k> b,"
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        deltas, _ = run(stop, pieces)
        assert "".join(deltas) == brute_force(stop, text, include=False)[0]


@pytest.mark.parametrize("interval", [1, 2, 5, 1000])
@pytest.mark.parametrize("stop", [[], ["six"], ["\u0301"], ["中文字"]])
def test_every_interval_gives_the_same_text(interval: int, stop: list[str]) -> None:
    """ST-16: red when the last tokens of an interval are dropped; through the detokenizer too."""
    tokenizer = byte_level()
    text = "five, six, e\u0301, 中文, 😀 end"
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    pieces = [detokenizer.push(ids[i : i + interval]) for i in range(0, len(ids), interval)]
    deltas, matched = run(stop, [*pieces, detokenizer.finish()])
    assert ("".join(deltas), matched) == brute_force(stop, text, include=False)


def test_work_is_linear_in_the_text() -> None:
    """Red when a text that always almost matches makes every character cost more."""
    matcher = StopStringMatcher(["a" * 64 + "b"])
    shown = sum(len(matcher.push("a")[0]) for _ in range(5000))
    assert shown == 5000 - 64
    assert matcher.finish() == "a" * 64
