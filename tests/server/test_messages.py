"""Anthropic's Messages API: bodies, answers, events, errors, and Anthropic's own client."""

import inspect
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import message_count_tokens_params, message_create_params

from octavo.core.errors import GenerationError
from octavo.server.anthropic.protocol import CountRequest, MessagesRequest
from support_server import HELLO, ScriptedEngine, client_of, live_server, post
from support_tools import (
    ARGUMENTS,
    CALL,
    QWEN,
    SCHEMA,
    calling_engine,
    named_events,
    prompt_of,
)

PATH = "/v1/messages"
COUNT = f"{PATH}/count_tokens"
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HELLO}
TOOL = {"name": "get_weather", "description": "Tells the weather", "input_schema": SCHEMA}


async def ask(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, PATH, {**ASK, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def check_refusal(response: httpx.Response, status: int, kind: str, told: str = "") -> None:
    """Assert that a response is Anthropic's error body."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body.keys() == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert told in body["error"]["message"], body


async def test_an_answer() -> None:
    """The answer has Anthropic's fields; cached tokens are not input tokens twice."""
    answer = await ask(calling_engine("Hi there", num_cached=5))
    assert answer.pop("id").startswith("msg_")
    num_prompt = len("<user>hi|<assistant>")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hi there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": num_prompt - 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 9,
        },
    }


async def test_why_it_ended() -> None:
    """The token limit and calls each have their reason."""
    assert (await ask(calling_engine("abc"), max_tokens=2))["stop_reason"] == "max_tokens"
    answer = await ask(calling_engine(f"Look. {CALL}"), tools=[TOOL])
    assert answer["stop_reason"] == "tool_use"
    text, call = answer["content"]
    assert text == {"type": "text", "text": "Look."}
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "get_weather",
        {"city": "Paris"},
    )


async def test_a_call_cut_short_is_what_its_stream_says() -> None:
    """CO-13: wherever the token limit cuts a call, the answer says so, none of its marks are text,
    and a whole answer holds what Anthropic's client makes of a stream."""
    with (
        live_server(calling_engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client,
    ):
        for limit in range(1, len(CALL) - 1, 3):
            asked: Any = {**ASK, "tools": [TOOL], "max_tokens": limit}
            whole = client.messages.create(**asked)
            with client.messages.stream(**asked) as stream:
                streamed = stream.get_final_message()
            blocks, same = ([plain(b) for b in m.content] for m in (whole, streamed))
            assert blocks == same
            assert whole.stop_reason == streamed.stop_reason == "max_tokens"
            if limit >= len("<tool_call>"):
                assert {block["type"] for block in blocks} <= {"tool_use"}


def plain(block: Any) -> dict[str, Any]:
    """A block without what differs in each answer."""
    return {k: v for k, v in block.model_dump(exclude_none=True).items() if k != "id"}


@pytest.mark.parametrize("path", [f"{PATH}/batches", f"{PATH}/", f"{PATH}/batches/a/results"])
async def test_paths_that_do_not_exist(path: str) -> None:
    """What is not there is told in Anthropic's words below its paths, as is a wrong method."""
    async with client_of(calling_engine()) as client:
        missing, wrong = await client.get(path), await client.get(PATH)
    for answer, status, kind in ((missing, 404, "not_found_error"), (wrong, 405, None)):
        assert answer.status_code == status
        assert answer.headers["request-id"]
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == (kind or "invalid_request_error")


def from_events(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Put a message together from its events, as the API's documentation says."""
    message: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "message_start":
                assert not message
                message = event["message"]
                assert message["content"] == []
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                block, delta = message["content"][-1], dict(event["delta"])
                assert delta.pop("type") in ("text_delta", "thinking_delta", "input_json_delta")
                for key, piece in delta.items():
                    block["json" if key == "partial_json" else key] += piece
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            assert written == ARGUMENTS
            block["input"] = {"city": "Paris"}
    return message


@pytest.mark.parametrize("text", ["Hi", "", f"<think>Hm.</think>Look. {CALL}{CALL}", CALL])
async def test_streams_equal_whole_answers(text: str) -> None:
    """ST-13: the events of a stream make the whole answer, in the order that clients rely on."""
    template = QWEN + "<think>"
    whole = await ask(calling_engine(text, template=template), tools=[TOOL])
    response = await post(
        calling_engine(text, template=template), PATH, {**ASK, "tools": [TOOL], "stream": True}
    )
    events = named_events(response.content)
    kinds = [event["type"] for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    streamed = from_events(events)
    for message in (whole, streamed):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


async def test_what_the_model_reads() -> None:
    """System, blocks, calls, results and what was begun reach the template in order."""
    engine = calling_engine("x")
    history = [
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Look."},
                {"type": "tool_use", "id": "t1", "name": "get_weather", "input": {"city": "Paris"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "rain"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
        {"role": "assistant", "content": "It is"},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    await ask(engine, messages=history, system=system, tools=[TOOL])
    prompt = prompt_of(engine)
    assert "<system>Be\nbrief.|<user>[{'type': 'text', 'text': 'weather?'}]|" in prompt
    assert '<assistant>Look.[{"id":"t1"' in prompt
    assert '"arguments":{"city":"Paris"}' in prompt
    assert "|<tool>rain|<tool>Error: no|<user>[{'type': 'text', 'text': 'and now?'}]|" in prompt
    assert prompt.endswith("<assistant>It is")


async def test_what_is_asked_of_the_sampler() -> None:
    """Each parameter reaches the engine under its own name there."""
    engine = calling_engine("x")
    await ask(engine, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["a", "b"], max_tokens=3)
    sampling = engine.calls[0]["sampling"]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
    assert (sampling.stop, sampling.max_tokens) == (("a", "b"), 3)


async def test_tool_choices() -> None:
    """none hides the tools, any and a name demand a call, and one call can be all."""
    engine = calling_engine(CALL * 2)
    answer = await ask(engine, tools=[TOOL], tool_choice={"type": "none"})
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert "get_weather" not in prompt_of(engine)
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert len((await ask(engine, tools=[TOOL], tool_choice=one))["content"]) == 1
    assert engine.calls[-1]["sampling"].structured_output is None
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        await ask(engine, tools=[TOOL], tool_choice=choice)
        assert engine.calls[-1]["sampling"].structured_output is not None


async def test_output_format() -> None:
    """output_config.format constrains the answer to a schema."""
    engine = calling_engine("{}")
    await ask(engine, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert '"city"' in engine.calls[0]["sampling"].structured_output.text


async def test_thinking() -> None:
    """thinking switches reasoning; a model that has none answers without, as agents ask all
    models for it."""
    engine = calling_engine("<think>Hm.</think>Yes", template="<think>")
    answer = await ask(engine, thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes"},
    ]
    assert "[enable_thinking=True]" in prompt_of(engine)
    await ask(engine, thinking={"type": "disabled"})
    assert "[enable_thinking=False]" in prompt_of(engine)
    for kind in ("adaptive", "enabled", "disabled"):
        engine = calling_engine("Yes")
        answer = await ask(engine, thinking={"type": kind, "budget_tokens": 2000})
        assert [block["type"] for block in answer["content"]] == ["text"]
        assert "thinking" not in prompt_of(engine)


async def test_what_agents_send_by_habit() -> None:
    """An agent made for Claude connects: what asks for more than there is changes nothing."""
    engine = calling_engine("Yes")
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    for fields in (
        {"context_management": edits},
        {"output_config": {"effort": "high"}},
        {"thinking": {"type": "adaptive", "display": "omitted"}},
        {"metadata": {"user_id": "someone"}, "service_tier": "auto", "speed": "standard"},
    ):
        assert (await ask(engine, **fields))["content"] == [{"type": "text", "text": "Yes"}]
    counted = {"model": "tiny", "messages": HELLO, "context_management": edits}
    assert (await post(engine, COUNT, counted)).status_code == 200
    response = await post(engine, f"{PATH}?beta=true", ASK)
    assert response.status_code == 200


async def test_counting() -> None:
    """The number is that of the prompt which the model would read."""
    engine = calling_engine("x")
    body = {"model": "tiny", "messages": HELLO, "system": "Be brief.", "tools": [TOOL]}
    counted = (await post(engine, COUNT, body)).json()
    assert not engine.calls
    usage = (await ask(engine, **body))["usage"]
    assert counted == {"input_tokens": usage["input_tokens"]}
    check_refusal(await post(engine, COUNT, {**body, "model": "x"}), 404, "not_found_error")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "a"}, "messages"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "content[0].text"),
        ({"messages": [*HELLO, {"role": "assistant", "content": ""}]}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"made_up": 1}, "made_up"),
        ({"n": 2}, "n"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], told: str) -> None:
    """HT-01: a body that cannot be served is a 400 in Anthropic's shape that says where."""
    response = await post(ScriptedEngine(), PATH, {**ASK, **fields})
    check_refusal(response, 400, "invalid_request_error", told)


async def test_errors_of_every_kind() -> None:
    """Whatever goes wrong on these paths, the body is Anthropic's."""
    async with client_of(ScriptedEngine(), api_key="k") as client:
        check_refusal(await client.post(PATH, json=ASK), 401, "authentication_error")
        wrong = {"x-api-key": "wrong"}
        check_refusal(await client.post(PATH, json=ASK, headers=wrong), 401, "authentication_error")
        right = {"x-api-key": "k"}
        assert (await client.post(PATH, json=ASK, headers=right)).status_code == 200
        assert (await client.post(COUNT, json=ASK, headers=right)).status_code == 400
        # The header opens nothing else, and does not stand in for a wrong Authorization.
        assert (await client.get("/v1/models", headers=right)).status_code == 401
        both = {**right, "Authorization": "Bearer wrong"}
        check_refusal(await client.post(PATH, json=ASK, headers=both), 401, "authentication_error")
        client.headers["x-api-key"] = "k"
        check_refusal(await client.get(PATH), 405, "invalid_request_error")
        other = {**ASK, "model": "other"}
        check_refusal(await client.post(PATH, json=other), 404, "not_found_error", "other")
        too_long = {"content-type": "application/json", "content-length": str(1 << 40)}
        long = await client.post(PATH, content=b"{}", headers=too_long)
        check_refusal(long, 413, "request_too_large")
    broken = ScriptedEngine(refusal=RuntimeError("secret"))
    check_refusal(await post(broken, PATH, ASK), 500, "api_error", "a fault of its own")


async def test_a_stream_that_fails() -> None:
    """An error in the middle of a stream is its last event, in Anthropic's shape."""
    engine = calling_engine("abcdef", failure=GenerationError("It broke."), fail_after=3)
    events = named_events((await post(engine, PATH, {**ASK, "stream": True})).content)
    assert events[0]["type"] == "message_start"
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "It broke."}}


def fields_of(module: Any) -> set[str]:
    """Every field of a request that the client's own types know."""
    return {
        name
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__ and "Params" in kind.__name__
        for name in kind.__annotations__
        if "messages" in kind.__annotations__ or name == "stream"
    }


def test_every_parameter_is_decided() -> None:
    """Law 8: each parameter that Anthropic's client can send is honoured or refused by name."""
    created = fields_of(message_create_params)
    assert {"thinking", "stream", "system", "tools"} <= created
    decided = MessagesRequest.model_fields.keys() | MessagesRequest.unsupported.keys()
    assert created - decided == set()
    counted = fields_of(message_count_tokens_params)
    assert counted - (CountRequest.model_fields.keys() | CountRequest.unsupported.keys()) == set()


def test_anthropic_client() -> None:
    """The unmodified client: answers, tools, streams, counting and errors."""
    with (
        live_server(calling_engine, api_key="k") as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as client,
    ):
        said: list[Any] = [{"role": "user", "content": "hi"}]
        answer = client.messages.create(
            model="tiny", max_tokens=200, messages=said, tools=[TOOL], system="Be brief."
        )
        assert answer.id == f"msg_{answer._request_id}"
        call = answer.content[0]
        assert (answer.stop_reason, call.input) == ("tool_use", {"city": "Paris"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        said += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
        with client.messages.stream(
            model="tiny", max_tokens=200, messages=said, tools=[TOOL]
        ) as stream:
            final = stream.get_final_message()
        assert final.content[0].input == {"city": "Paris"}
        assert final.usage.output_tokens == len(CALL) + 1
        with client.messages.stream(model="tiny", max_tokens=200, messages=said[:1]) as stream:
            assert "".join(stream.text_stream) == CALL
        counted = client.messages.count_tokens(model="tiny", messages=said[:1])
        assert counted.input_tokens == len("<user>hi|<assistant>")
        with pytest.raises(anthropic.NotFoundError, match="other") as caught:
            client.messages.create(model="other", max_tokens=5, messages=said[:1])
        assert caught.value.request_id
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            client.messages.create(
                model="tiny", max_tokens=5, messages=said[:1], extra_body={"temperature": 3}
            )
        with pytest.raises(anthropic.AuthenticationError):
            client.with_options(api_key="x").messages.create(
                model="tiny", max_tokens=5, messages=said[:1]
            )
