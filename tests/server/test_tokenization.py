"""Tokenizing and detokenizing over HTTP."""

from typing import Any

import pytest

from support_server import BOS, HELLO, VOCAB_SIZE, ScriptedEngine, check_error, post
from support_tools import TOOLS, calling_engine


async def ok(path: str, body: Any) -> dict[str, Any]:
    response = await post(ScriptedEngine(), path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_text() -> None:
    """A text's ids, their number and the context's length come in vLLM's shape."""
    assert await ok("/tokenize", {"prompt": "aé"}) == {
        "count": 3,
        "max_model_len": 256,
        "tokens": [97, 195, 169],
        "token_strs": None,
    }
    told = await ok("/tokenize", {"model": "tiny", "prompt": "aé", "return_token_strs": True})
    assert told["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert (await ok("/tokenize", {"prompt": ""}))["tokens"] == []


async def test_chat_is_what_chat_reads() -> None:
    """A conversation's ids are exactly those that the model would be given."""
    body = {"messages": HELLO, "tools": TOOLS}
    engine = calling_engine("x")
    await post(engine, "/v1/chat/completions", body)
    told = (await post(engine, "/tokenize", body)).json()
    assert told["tokens"] == engine.calls[0]["prompt"]
    begun = {"messages": [*HELLO, {"role": "assistant", "content": "ab"}]}
    told = await ok("/tokenize", {**begun, "continue_final_message": True})
    assert bytes(told["tokens"]).endswith(b"<assistant>ab")


async def test_detokenize() -> None:
    """Ids become the text of all of them together, control tokens included; none become none."""
    assert await ok("/detokenize", {"tokens": [97, 195, 169, BOS]}) == {"prompt": f"aé<{BOS}>"}
    assert await ok("/detokenize", {"tokens": []}) == {"prompt": ""}


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        ([-1], "tokens"),
        ([97, VOCAB_SIZE], "tokens"),
        ([999999999], "tokens"),
        ([2**70], None),
        ([1.5], "tokens"),
        ([True], "tokens"),
        ([[1], "a"], "tokens"),
        (["a"], "tokens"),
        ("a", "tokens"),
        (5, "tokens"),
        ({}, "tokens"),
        (None, "tokens"),
    ],
    ids=str,
)
async def test_bad_ids(tokens: Any, param: str | None) -> None:
    """HT-01: what is no token id is a 400 that names the field."""
    check_error(await post(ScriptedEngine(), "/detokenize", {"tokens": tokens}), 400, param)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"null", 400, None),
        (b"[]", 400, None),
        (b"{", 400, None),
        ({}, 400, "prompt"),
        ({"prompt": 5}, 400, "prompt"),
        ({"prompt": ["a"]}, 400, "prompt"),
        ({"prompt": "a", "made_up": 1}, 400, "made_up"),
        ({"messages": []}, 400, "messages"),
        ({"messages": HELLO, "prompt": "a"}, 400, "prompt"),
        ({"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
        ({"prompt": "a", "model": "other"}, 404, "model"),
        ({"prompt": "\ud800"}, 400, None),
    ],
    ids=str,
)
async def test_bad_bodies(body: Any, status: int, param: str | None) -> None:
    """HT-01: every malformed body is refused by name."""
    if isinstance(body, dict) and body.get("prompt") == "\ud800":
        body = b'{"prompt": "\\ud800"}'
    check_error(await post(ScriptedEngine(), "/tokenize", body), status, param)
