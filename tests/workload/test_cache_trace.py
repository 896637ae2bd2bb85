"""Trace formats: what is read, and the one sentence when it cannot be."""

import json

import pytest

from octavo.core.errors import LoadError
from octavo.workload.cache_trace import hash_trace, read_mooncake, read_sessions, read_token_ids
from octavo.workload.synthetic import streams


def write(path, *rows):
    """Write rows as lines of JSON."""
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_mooncake_rows_become_blocks(tmp_path):
    """Turns red if times, lengths or hashes are mixed up; blank lines are nothing."""
    row = {"timestamp": 1500, "input_length": 1100, "output_length": 3, "hash_ids": [0, 7, 8]}
    trace = read_mooncake(write(tmp_path / "t.jsonl", row))
    assert trace.requests[0].token_ids == (0, 7, 8)
    assert (trace.requests[0].arrival_s, trace.num_tokens, trace.num_touches) == (1.5, 1100, 3)
    assert (trace.name, trace.block_size, trace.tokens_per_block) == ("t", 1, 512)


def test_token_rows_keep_their_tenant(tmp_path):
    """Turns red if tokens or tenants are lost, or partial blocks count as touches."""
    rows = [{"token_ids": [1, 2, 3, 4, 5], "tenant": "a"}, {"token_ids": [9]}]
    trace = read_token_ids(write(tmp_path / "t.jsonl", *rows), 2)
    assert [request.tenant for request in trace.requests] == ["a", ""]
    assert (trace.num_tokens, trace.num_touches) == (6, 2)


def test_sessions_are_interleaved_by_time_and_cut_in_blocks(tmp_path):
    """Turns red if sessions follow one another, or a growing prompt does not share its start."""
    write(tmp_path / "a.jsonl", *({"timestamp": t, "input": "x" * 10 * (t + 1)} for t in (0, 2)))
    write(tmp_path / "b.jsonl", {"timestamp": 1, "input": "y" * 25})
    trace = read_sessions(tmp_path, chars_per_block=8)
    first, other, second = (request.token_ids for request in trace.requests)
    assert second[:1] == first
    assert len(other) == len(second) == 3
    assert other[0] != first[0]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[1]",
        '{"hash_ids": 5, "input_length": 1}',
        '{"hash_ids": ["x"], "input_length": 1}',
        '{"input_length": 1}',
    ],
)
@pytest.mark.parametrize("read", [read_mooncake, lambda path: read_token_ids(path, 16)])
def test_a_bad_line_is_named(tmp_path, text, read):
    """Turns red if a broken trace ends in a stack trace, or does not say where it is broken."""
    path = tmp_path / "t.jsonl"
    path.write_text("\n" + text)
    with pytest.raises(LoadError, match="line 2"):
        read(path)


def test_an_absent_file_and_an_empty_folder_are_named(tmp_path):
    """Turns red if a wrong path ends in a stack trace."""
    with pytest.raises(LoadError, match=r"no.jsonl cannot be read"):
        read_mooncake(tmp_path / "no.jsonl")
    with pytest.raises(LoadError, match="holds no sessions"):
        read_sessions(tmp_path)


def test_hashes_may_be_anything_hashable():
    """Turns red if only numbers can be traced."""
    trace = hash_trace("t", [["a", ("b", 1)], ["a"]])
    assert [request.token_ids for request in trace.requests] == [(0, 1), (0,)]


def test_streams_repeat_for_a_seed_and_differ_between_seeds():
    """Turns red if a made stream draws unseeded chance."""
    assert streams(64, 80, 1) == streams(64, 80, 1)
    assert streams(64, 80, 1)["zipf 0.7"] != streams(64, 80, 2)["zipf 0.7"]
