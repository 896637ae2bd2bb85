"""What is answered: bodies and streams hold the same, framed as OpenAI frames it."""

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from octavo.core.errors import UnavailableError
from support_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    INFO,
    ScriptedEngine,
    check_error,
    client_of,
    parse_events,
    post,
    reasons_of,
    texts_of,
)

PATHS = (COMPLETIONS, CHAT)
MINIMAL: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "abc"}, CHAT: {"messages": HELLO}}
FAMILY = "👩🏽‍👩‍👧 é שָׁלוֹם 漢字"


def says(text: str | bytes) -> ScriptedEngine:
    """An engine that always answers this."""
    data = text.encode() if isinstance(text, str) else text
    return ScriptedEngine(answer=lambda prompt, sampling, index: data)


async def stream(engine: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await post(engine, path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    return parse_events(response.content)


def whole_texts(response: httpx.Response) -> dict[int, str]:
    choices = response.json()["choices"]
    return {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in choices}


@pytest.mark.parametrize("what", ["backend", "precision", "dtype"])
async def test_fingerprints_tell_number_formats_apart(what: str) -> None:
    """Turns red when answers of engines that may differ in a seeded request's tokens share a
    ``system_fingerprint``."""
    engines = [ScriptedEngine(), ScriptedEngine(info=replace(INFO, **{what: "another"}))]
    bodies = [(await post(engine, CHAT, {"messages": HELLO})).json() for engine in engines]
    assert bodies[0]["system_fingerprint"] != bodies[1]["system_fingerprint"]


async def test_chat_stream_is_framed_as_openai_frames_it() -> None:
    """A stream opens with the role, carries text alone, and ends with an empty delta."""
    chunks = await stream(says("hey"), CHAT, {"messages": HELLO})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [choice["delta"] for choice in choices[1:]] == [
        {"content": "h"},
        {"content": "e"},
        {"content": "y"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


async def test_completion_stream_is_framed_as_openai_frames_it() -> None:
    """Completions stream text in choices of the same shape as the whole answer's."""
    chunks = await stream(says("hey"), COMPLETIONS, {"prompt": "a"})
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["h", "e", "y", ""]
    assert [choice["finish_reason"] for choice in choices] == [None] * 3 + ["stop"]
    assert all(choice["logprobs"] is None for choice in choices)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text", [FAMILY, "", "plain", "a\n\ndata: [DONE]\n\nb", '"\\\x00\x1f'])
async def test_streams_and_bodies_hold_the_same_text(path: str, text: str) -> None:
    """ST-01, ST-02 at the border: joined chunks equal the whole answer, whatever is in the text."""
    body = {**MINIMAL[path], "max_tokens": 200}
    whole = await post(says(text), path, body)
    chunks = await stream(says(text), path, body)
    assert texts_of(chunks) == whole_texts(whole) == {0: text}
    assert reasons_of(chunks) == {0: ["stop"]}


@pytest.mark.parametrize("path", PATHS)
async def test_cut_characters_are_valid_json(path: str) -> None:
    """ST-01: a limit in the middle of a character gives valid UTF-8, reason length, and no 500."""
    body = {**MINIMAL[path], "max_tokens": 3, "logprobs": 1 if path == COMPLETIONS else True}
    whole = await post(says(FAMILY), path, body)
    assert whole_texts(whole) == {0: "�"}
    assert whole.json()["choices"][0]["finish_reason"] == "length"
    chunks = await stream(says(FAMILY), path, body)
    assert texts_of(chunks) == {0: "�"}
    assert reasons_of(chunks) == {0: ["length"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, False),
        ({"stream_options": None}, False),
        ({"stream_options": {}}, False),
        ({"stream_options": {"include_usage": False}}, False),
        ({"stream_options": {"include_usage": None}}, False),
        ({"stream_options": {"include_usage": True}}, True),
    ],
)
async def test_usage_only_when_asked(path: str, options: dict[str, Any], wanted: bool) -> None:
    """ST-10: one last chunk without choices holds the usage, only if asked; others say null."""
    engine = ScriptedEngine(num_cached=2)
    chunks = await stream(engine, path, {**MINIMAL[path], **options, "n": 2})
    if not wanted:
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
        return
    *rest, last = chunks
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in rest)
    assert last["choices"] == []
    whole = await post(engine, path, {**MINIMAL[path], "n": 2})
    assert last["usage"] == whole.json()["usage"]
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("extra", [{}, {"stream": False}, {"stream": None}])
async def test_stream_options_without_stream(path: str, extra: dict[str, Any]) -> None:
    """ST-10: options of a stream that is none are refused."""
    body = {**MINIMAL[path], **extra, "stream_options": {"include_usage": True}}
    check_error(await post(ScriptedEngine(), path, body), 400, "stream_options")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options",
    [{"include_obfuscation": True}, {"include_usage": "true"}, {"made_up": 1}, [], "usage"],
    ids=str,
)
async def test_wrong_stream_options(path: str, options: Any) -> None:
    """ST-10: what a stream cannot do is refused before it opens."""
    body = {**MINIMAL[path], "stream": True, "stream_options": options}
    check_error(await post(ScriptedEngine(), path, body), 400)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("text", "max_tokens", "reason"),
    [("abcdefgh", 5, "length"), ("abcd", 5, "stop"), ("abcde", 5, "length"), ("", 5, "stop")],
)
async def test_finish_reasons(path: str, text: str, max_tokens: int, reason: str) -> None:
    """ST-11: a limit is length, an end token is stop even as the last allowed one; once a choice,
    in its last chunk."""
    body = {**MINIMAL[path], "max_tokens": max_tokens, "n": 3}
    whole = await post(says(text), path, body)
    assert [choice["finish_reason"] for choice in whole.json()["choices"]] == [reason] * 3
    chunks = await stream(says(text), path, body)
    assert reasons_of(chunks) == {index: [reason] for index in range(3)}


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("prompts", [["abc"], ["abc", "defg", "hi"], [[65, 66], [67]]])
async def test_choices_of_prompts(prompts: list[Any], n: int) -> None:
    """ST-15: prompts times n choices, indexed from 0 in the order of the prompts, each its own
    text, in bodies and streams alike."""
    ends = [p if isinstance(p, str) else bytes(p).decode() for p in prompts]
    expected = dict(enumerate(f"{index}:{end}" for end in ends for index in range(n)))
    body = {"prompt": prompts, "n": n, "temperature": 1}
    whole = await post(ScriptedEngine(), COMPLETIONS, body)
    assert whole_texts(whole) == expected
    assert [choice["index"] for choice in whole.json()["choices"]] == list(expected)
    chunks = await stream(ScriptedEngine(), COMPLETIONS, body)
    assert texts_of(chunks) == expected
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = whole.json()["usage"]
    assert usage["prompt_tokens"] == sum(len(prompt) for prompt in prompts)
    assert usage["completion_tokens"] == sum(len(text) + 1 for text in expected.values())


@pytest.mark.parametrize("n", [1, 2, 8])
async def test_choices_of_chat(n: int) -> None:
    """ST-15: chat gives n choices with a role each, and one id."""
    body = {"messages": HELLO, "n": n}
    expected = {index: f"{index}:sistant>" for index in range(n)}
    assert whole_texts(await post(ScriptedEngine(), CHAT, body)) == expected
    chunks = await stream(ScriptedEngine(), CHAT, body)
    assert texts_of(chunks) == expected
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert roles == list(range(n))


async def test_scoring_a_prompt_without_generating() -> None:
    """SC-16: echo, logprobs and max_tokens 0 give the prompt, its scores, and no token."""
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = (await post(says("never"), COMPLETIONS, body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["top_logprobs"] == [
        None,
        {"A": -0.25, "b": -1.5},
        {"A": -0.25, "c": -1.5},
    ]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = await stream(says("never"), COMPLETIONS, body)
    assert texts_of(chunks) == {0: "abc"}
    assert reasons_of(chunks) == {0: ["length"]}


@pytest.mark.parametrize(
    ("max_tokens", "text"), [(0, ""), (1, "n"), (None, "never")], ids=["none", "one", "default"]
)
async def test_without_echo(max_tokens: int | None, text: str) -> None:
    """SC-16: max_tokens 0 without echo is an empty answer, never an extra token."""
    body = {"prompt": "abc", "max_tokens": max_tokens}
    assert whole_texts(await post(says("never"), COMPLETIONS, body)) == {0: text}


@pytest.mark.parametrize("prompts", [["abc"], ["abc", "de"]])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("count", [0, 2])
async def test_streamed_logprobs_equal_whole_ones(prompts: list[str], n: int, count: int) -> None:
    """SA-17, ST-16 at the border: every choice of a stream has the scores of the whole answer,
    echoed prompts included, with offsets that point into its text."""
    body = {"prompt": prompts, "n": n, "echo": True, "logprobs": count}
    whole = (await post(ScriptedEngine(), COMPLETIONS, body)).json()
    joined: dict[int, dict[str, list[Any]]] = {}
    for chunk in await stream(ScriptedEngine(), COMPLETIONS, body):
        for choice in chunk["choices"]:
            for key, values in (choice["logprobs"] or {}).items():
                joined.setdefault(choice["index"], {}).setdefault(key, []).extend(values)
    assert joined == {choice["index"]: choice["logprobs"] for choice in whole["choices"]}
    for choice in whole["choices"]:
        scores = choice["logprobs"]
        for token, offset in zip(scores["tokens"], scores["text_offset"], strict=True):
            assert token == "<257>" or choice["text"][offset:].startswith(token)


async def test_echo_of_token_ids() -> None:
    """An echoed prompt of token ids is their text."""
    body = {"prompt": [104, 105], "echo": True}
    assert whole_texts(await post(ScriptedEngine(), COMPLETIONS, body)) == {0: "hi0:hi"}


@pytest.mark.parametrize("top", [None, 0, 1, 2, 20])
async def test_chat_logprobs(top: int | None) -> None:
    """SA-12, SA-16: so many alternatives as asked or as there are, -9999 for no probability, with
    the bytes of each token; the stream says the same."""
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": top}
    engine = says("é")
    scores = (await post(engine, CHAT, body)).json()["choices"][0]["logprobs"]
    assert scores["refusal"] is None
    assert [entry["bytes"] for entry in scores["content"][:2]] == [[0xC3], [0xA9]]
    assert scores["content"][0]["token"] == "bytes:\\xc3"
    best = [
        {"token": "A", "logprob": -0.25, "bytes": [65]},
        {"token": "B", "logprob": -9999.0, "bytes": [66]},
    ]
    assert all(entry["top_logprobs"] == best[: top or 0] for entry in scores["content"])
    streamed = [
        entry
        for chunk in await stream(engine, CHAT, body)
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == scores["content"]


async def test_chat_without_logprobs() -> None:
    """Scores that nobody asked for are null."""
    choice = (await post(ScriptedEngine(), CHAT, {"messages": HELLO})).json()["choices"][0]
    assert choice["logprobs"] is None


async def test_prompt_logprobs() -> None:
    """SA-17: vLLM's field has one entry a prompt token, the first null, beside what echo gives."""
    body = {"prompt": "abc", "prompt_logprobs": 2, "echo": True, "logprobs": 1, "n": 2}
    choices = (await post(ScriptedEngine(), COMPLETIONS, body)).json()["choices"]
    for choice in choices:
        first, second, third = choice["prompt_logprobs"]
        assert first is None
        assert second["98"] == {"logprob": -1.5, "rank": 2, "decoded_token": "b"}
        assert third["66"] == {"logprob": -9999.0, "rank": 2, "decoded_token": "B"}
        assert choice["logprobs"]["top_logprobs"][1] == {"A": -0.25, "b": -1.5}
    answer = (await post(ScriptedEngine(), CHAT, {"messages": HELLO, "prompt_logprobs": 0})).json()
    assert answer["prompt_logprobs"][1] == {
        "117": {"logprob": -1.5, "rank": 2, "decoded_token": "u"}
    }


async def test_token_ids_when_asked() -> None:
    """Ids of prompt and output come with the answer, whole or streamed, only if asked for."""
    body = {"prompt": "abc", "return_token_ids": True}
    choice = (await post(says("hey"), COMPLETIONS, body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["token_ids"] == [*b"hey", 257]
    chunks = [c["choices"][0] for c in await stream(says("hey"), COMPLETIONS, body)]
    assert chunks[0]["prompt_token_ids"] == list(b"abc")
    assert [i for c in chunks for i in c.get("token_ids", [])] == choice["token_ids"]
    chat = {"messages": HELLO, "return_token_ids": True}
    answer = (await post(says("hey"), CHAT, chat)).json()
    assert bytes(answer["prompt_token_ids"]).decode() == "<user>hi|<assistant>"
    chunks = [c["choices"][0] for c in await stream(says("hey"), CHAT, chat)]
    assert [i for c in chunks for i in c.get("token_ids", [])] == [*b"hey", 257]
    assert "token_ids" not in (await post(says("hey"), COMPLETIONS, {"prompt": "a"})).text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("The logits are not numbers.", "The logits are not numbers."),
        (UnavailableError("The engine has stopped."), "The engine has stopped."),
        (ValueError("secret"), "The server failed to answer"),
    ],
)
async def test_a_failing_stream_ends_with_its_error(
    path: str, failure: Exception | str, told: str
) -> None:
    """A stream that fails midway ends with one error event and no [DONE], so nobody takes it for
    a whole answer; what nobody foresaw tells nothing."""
    engine = ScriptedEngine(failure=failure)
    response = await post(engine, path, {**MINIMAL[path], "stream": True, "n": 2})
    events = response.content.decode().split("\n\n")
    assert events[-1] == ""
    assert events[-2].startswith('data: {"error":{"message":"' + told)
    assert "secret" not in response.text
    assert "[DONE]" not in response.text
    assert not engine.live


async def test_models() -> None:
    """Every served name is listed with the context's length, and can be asked for, slashes too."""
    async with client_of(ScriptedEngine(), served_model_names=["tiny", "org/name"]) as client:
        listed = (await client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "org/name"]
        for model in listed["data"]:
            assert model["max_model_len"] == INFO.max_model_len
            assert (await client.get(f"/v1/models/{model['id']}")).json() == model


async def test_operations() -> None:
    """Probes, version and metrics answer, and readiness follows the engine."""
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        for path in ("/health", "/live", "/version"):
            assert (await client.get(path)).status_code == 200
        metrics = await client.get("/metrics")
        assert metrics.text == "# no series\n"
        assert metrics.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        engine.is_running = False
        check_error(await client.get("/health"), 503)
        assert (await client.get("/live")).status_code == 200


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_request_ids_come_back(given: str) -> None:
    """A client's X-Request-Id is returned with answers and refusals; two may use the same."""
    engine = ScriptedEngine()
    async with client_of(engine) as client:
        for body in (MINIMAL[CHAT], {}):
            response = await client.post(CHAT, json=body, headers={"X-Request-Id": given})
            assert response.headers["x-request-id"] == given
    assert given not in engine.calls[0]["id"]


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129])
async def test_request_ids_are_made_up(given: str | None) -> None:
    """Without a usable id the answer's own is sent, so logs and bodies can be matched."""
    headers = {} if given is None else {"X-Request-Id": given}
    async with client_of(ScriptedEngine()) as client:
        response = await client.post(CHAT, json=MINIMAL[CHAT], headers=headers)
    assert response.json()["id"] == f"chatcmpl-{response.headers['x-request-id']}"


async def test_rejections_are_reported() -> None:
    """ME-03: refusals are counted apart, each once; answers, and failures of what the engine had
    taken, never."""
    seen = []

    class Watcher:
        def on_event(self, event: Any) -> None:
            seen.append(event.status)

    engine = ScriptedEngine()
    async with client_of(engine, observer=Watcher(), api_key="k") as client:
        await client.post(CHAT, json=MINIMAL[CHAT])
        client.headers["Authorization"] = "Bearer k"
        await client.post(CHAT, json=MINIMAL[CHAT])
        await client.post(CHAT, json={})
        await client.post(COMPLETIONS, json={"prompt": []})
        await client.get("/v1/models/none")
        engine.failure = UnavailableError("The engine has stopped.")
        check_error(await client.post(CHAT, json=MINIMAL[CHAT]), 503)
        engine.refusal = engine.failure
        check_error(await client.post(CHAT, json=MINIMAL[CHAT]), 503)
    assert seen == [401, 400, 400, 503]


async def test_full_queue() -> None:
    """Beyond the bound of sequences a request is a 429 that says when to come back; one that is
    larger than the bound gets in when it is alone."""
    engine = ScriptedEngine(hold_after=1)
    async with client_of(engine, max_num_inflight=2) as client:
        first = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "n": 3}))
        while not engine.live:
            await asyncio.sleep(0)
        refused = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        check_error(refused, 429)
        assert refused.headers["retry-after"] == "1"
        engine.resume.set()
        assert (await first).status_code == 200
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
