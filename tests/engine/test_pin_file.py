"""Prefixes that are pinned from a file when the engine starts."""

import json
from pathlib import Path

import pytest

from octavo.core.errors import SettingError
from octavo.core.request import CacheIdentity
from octavo.core.sampling import SamplingParams
from octavo.engine.factory import async_engine
from octavo.engine.pin_file import read_pins
from support_engine import Recorder, byte_tokenizer, collect, tiny_parts

IDENTITY = CacheIdentity("model", "tokenizer", "float32")


def write(folder: Path, *entries: object) -> Path:
    """Write a file of these lines."""
    path = folder / "pins.jsonl"
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries))
    return path


def test_each_form_gives_the_tokens_that_requests_have(tmp_path: Path) -> None:
    """Text as completions read it, a chat as chats begin, token ids as they are, a salt."""
    tokenizer = byte_tokenizer(tmp_path)
    chat = [{"role": "system", "content": "Be brief."}]
    path = write(
        tmp_path,
        {"text": "ab"},
        "",
        {"token_ids": [1, 2]},
        {"text": "c", "cache_salt": "s"},
        {"messages": chat},
    )
    pins = list(read_pins(path, tokenizer, IDENTITY, 1))
    *plain, begun = [tokens for _, tokens in pins]
    assert plain == [tokenizer.encode("ab"), [1, 2], tokenizer.encode("c")]
    whole = tokenizer.render_chat([*chat, {"role": "user", "content": "Hi"}])
    assert whole.startswith(tokenizer.decode(begun, skip_special_tokens=False))
    assert len(begun) > len("Be brief.")
    assert [identity.salt for identity, _ in pins] == ["", "", "s", ""]


@pytest.mark.parametrize(
    "line",
    [
        "not json",
        "[1]",
        "{}",
        {"text": 1},
        {"text": "a", "token_ids": [1]},
        {"token_ids": [-1]},
        {"token_ids": [2**64]},
        {"token_ids": [10**6]},
        "[" * 100_000,
        {"token_ids": [True]},
        {"messages": []},
        {"messages": ["hello"]},
        {"text": "a", "ttl": 3},
        {"text": "a", "cache_salt": 3},
    ],
)
def test_a_wrong_line_stops_the_start(tmp_path: Path, line: object) -> None:
    """The error names the file and the line."""
    path = write(tmp_path, {"text": "good"}, line)
    with pytest.raises(SettingError, match=r"pins\.jsonl, line 2: "):
        list(read_pins(path, byte_tokenizer(tmp_path), IDENTITY, 1))


def test_a_prefix_shorter_than_a_block_stops_the_start(tmp_path: Path) -> None:
    """Turns red if an operator believes a prefix pinned of which nothing is."""
    path = write(tmp_path, {"token_ids": [1, 2, 3, 4]}, {"token_ids": [1, 2, 3]})
    with pytest.raises(SettingError, match=r"line 2: it has 3 tokens, and only whole blocks of 4"):
        list(read_pins(path, byte_tokenizer(tmp_path), IDENTITY, 4))


def test_a_line_ends_with_a_line_feed_only(tmp_path: Path) -> None:
    """JSON strings may hold characters at which ``str.splitlines`` would cut."""
    tokenizer, text = byte_tokenizer(tmp_path), "a\u2028b\u0085c"
    line = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "pins.jsonl").write_bytes(f"{line}\r\n{line}\r\n".encode())
    pins = list(read_pins(tmp_path / "pins.jsonl", tokenizer, IDENTITY, 1))
    assert [tokens for _, tokens in pins] == [tokenizer.encode(text)] * 2


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    """It says which."""
    with pytest.raises(SettingError, match="nowhere cannot be read"):
        list(read_pins(tmp_path / "nowhere", byte_tokenizer(tmp_path), IDENTITY, 1))


async def test_a_pinned_prefix_outlives_what_would_evict_it(tmp_path: Path) -> None:
    """Other prompts fill the pool many times over, and the pinned one is still hit."""
    pinned = [7] * 33
    path = write(tmp_path, {"token_ids": pinned[:32]})
    engine = async_engine(
        tiny_parts(
            tmp_path / "model",
            Recorder(),
            max_model_len=64,
            block_size=16,
            max_num_seqs=2,
            kv_cache_memory_bytes=12 * 16 * 512,
            pin_file=path,
        )
    )
    engine.start()
    sampling = SamplingParams(max_tokens=2, temperature=0)
    cached = {}
    for name, prompt in [
        ("first", pinned),
        *((f"other {i}", [10 + i] * 40) for i in range(20)),
        ("pinned", pinned),
        ("evicted", [10] * 40),
    ]:
        deltas = await collect(engine, prompt, sampling, name=name)
        cached[name] = deltas[-1].num_cached_tokens
    evictions = engine.stats().evictions_total
    engine.shutdown()
    assert evictions > 0
    assert cached["pinned"] == 32
    assert cached["evicted"] == 0
