"""OpenAI's Responses API: bodies, answers, events, and OpenAI's own client."""

from typing import Any

import openai
import pytest

from octavo.core.errors import GenerationError
from support_server import HELLO, ScriptedEngine, check_error, live_server, post
from support_tools import (
    ARGUMENTS,
    CALL,
    QWEN,
    SCHEMA,
    WEATHER,
    calling_engine,
    named_events,
    prompt_of,
)

PATH = "/v1/responses"
ASK: dict[str, Any] = {"input": "hi"}
TOOL = {"type": "function", **WEATHER}


async def ask(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, PATH, {**ASK, **fields})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(engine: ScriptedEngine, **fields: Any) -> list[dict[str, Any]]:
    response = await post(engine, PATH, {**ASK, **fields, "stream": True})
    assert response.status_code == 200, response.text
    return named_events(response.content)


async def test_an_answer() -> None:
    """The answer has one message with the text, the usage, and what was asked."""
    answer = await ask(calling_engine("Hi", num_cached=5), temperature=0, metadata={"a": "b"})
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [
        {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}
    ]
    assert (answer["object"], answer["status"], answer["store"]) == ("response", "completed", False)
    assert (answer["temperature"], answer["metadata"]) == (0, {"a": "b"})
    num_prompt = len("<user>hi|<assistant>")
    assert answer["usage"]["input_tokens"] == num_prompt
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 5
    assert answer["usage"]["output_tokens"] == 3
    assert answer["usage"]["total_tokens"] == num_prompt + 3


async def test_calls_and_reasoning_are_items() -> None:
    """Reasoning, text and each call is an item of its own, in the order they were written."""
    text = f"<think>Hm.</think>Look. {CALL}{CALL}"
    answer = await ask(calling_engine(text, template=QWEN + "<think>"), tools=[TOOL])
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    thought, _, call, other = answer["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
    assert len({call["call_id"], other["call_id"], call["id"], other["id"]}) == 4
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 3


async def test_an_answer_cut_short() -> None:
    """CO-13: the token limit makes the response and its last item incomplete, never completed."""
    answer = await ask(calling_engine("Hello"), max_output_tokens=2)
    assert (answer["status"], answer["output"][0]["status"]) == ("incomplete", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    events = await stream(calling_engine("Hello"), max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"


LOGPROBS = {"include": ["message.output_text.logprobs"]}


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [(LOGPROBS, 0), ({**LOGPROBS, "top_logprobs": 2}, 2), ({"top_logprobs": 1}, 1)],
    ids=str,
)
async def test_logprobs(fields: dict[str, Any], num_top: int) -> None:
    """Each token of the text has its logprob and so many of the likeliest, whole and streamed, the
    end of the turn included; without being asked for there are none."""
    whole = await ask(calling_engine("Hi é"), **fields)
    scores = whole["output"][0]["content"][0]["logprobs"]
    assert len(scores) == len("Hi é".encode()) + 1
    assert [entry["token"] for entry in scores[:3]] == ["H", "i", " "]
    assert all(len(entry["top_logprobs"]) == num_top for entry in scores)
    assert whole["top_logprobs"] == fields.get("top_logprobs", 0)
    events = await stream(calling_engine("Hi é"), **fields)
    pieces = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    (done,) = [e["logprobs"] for e in events if e["type"] == "response.output_text.done"]
    assert done == scores
    assert [entry for piece in pieces for entry in piece] == scores[: sum(map(len, pieces))]
    assert sum(map(len, pieces)) >= len(scores) - 1
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == scores
    plain = await ask(calling_engine("Hi é"), top_logprobs=0)
    assert plain["output"][0]["content"][0]["logprobs"] == []


async def test_logprobs_belong_to_the_text() -> None:
    """Marks, reasoning and calls take no part in the logprobs of the text between them."""
    text = f"<think>Hm.</think>Look. {CALL}"
    for ask_for in (ask, stream):
        engine = calling_engine(text, template=QWEN + "<think>")
        found: Any = await ask_for(engine, tools=[TOOL], **LOGPROBS)
        answer = found if ask_for is ask else found[-1]["response"]
        (message,) = [item for item in answer["output"] if item["type"] == "message"]
        (content,) = message["content"]
        assert (
            "".join(entry["token"] for entry in content["logprobs"]) == content["text"] == "Look."
        )


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools(mode: str) -> None:
    """A choice among some of the functions binds the answer to them, and is said back."""
    other = {**TOOL, "name": "get_time"}
    choice = {
        "type": "allowed_tools",
        "mode": mode,
        "tools": [{"type": "function", "name": "get_weather"}],
    }
    engine = calling_engine()
    answer = await ask(engine, tools=[TOOL, other], tool_choice=choice)
    assert answer["tool_choice"] == choice
    shape = engine.calls[-1]["sampling"].structured_output
    assert "get_weather" in shape.text
    assert "get_time" not in shape.text


def check_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Follow the events as clients do; return the items that they make."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [e["type"] for e in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    text = ""
    for event in events[2:-1]:
        match event["type"].split("."):
            case [_, "output_item", "added"]:
                assert event["output_index"] == len(items)
                items.append(event["item"])
                text = ""
            case [_, "output_text" | "reasoning_text" | "function_call_arguments", "delta"]:
                assert event["item_id"] == items[-1]["id"]
                text += event["delta"]
            case [_, "output_text" | "reasoning_text", "done"]:
                assert event["text"] == text
            case [_, "function_call_arguments", "done"]:
                assert event["arguments"] == text
            case [_, "content_part", "done"]:
                assert event["part"]["text"] == text
            case [_, "output_item", "done"]:
                assert event["item"]["id"] == items[-1]["id"]
                items[-1] = event["item"]
    return items


@pytest.mark.parametrize("text", ["Hi", "", f"<think>Hm.</think>Look. {CALL}{CALL}", CALL])
async def test_streams_equal_whole_answers(text: str) -> None:
    """ST-13: the items that a stream builds are those of its last event and of a whole answer."""
    template = QWEN + "<think>"
    whole = await ask(calling_engine(text, template=template), tools=[TOOL])
    events = await stream(calling_engine(text, template=template), tools=[TOOL])
    items = check_events(events)
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert items == last["output"]
    for item in (*last["output"], *whole["output"]):
        item.pop("id")
        item.pop("call_id", None)
    assert last["output"] == whole["output"]
    assert last["usage"] == whole["usage"]


async def test_what_the_model_reads() -> None:
    """Instructions and every kind of item reach the template; a turn's items are one message."""
    engine = calling_engine("x")
    call = {"type": "function_call", "name": "get_weather", "arguments": ARGUMENTS}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Look.", "annotations": []}],
        },
        {**call, "call_id": "c1", "id": "fc_1", "status": "completed"},
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"role": "developer", "content": "Be nice."},
    ]
    await ask(engine, input=items, instructions="Be brief.", tools=[TOOL])
    prompt = prompt_of(engine)
    assert "<system>Be brief.|<user>[{'type': 'text', 'text': 'weather?'}]|" in prompt
    assert "<assistant>[{'type': 'text', 'text': 'Look.'}][{\"id\":\"c1\"" in prompt
    assert prompt.count("<assistant>") == 2
    assert prompt.count('"arguments":{"city":"Paris"}') == 2
    assert prompt.endswith("|<tool>rain|<system>Be nice.|<assistant>")


async def test_output_goes_back_in() -> None:
    """What was answered can be sent back as it came, as agents do without storage."""
    engine = calling_engine(f"<think>Hm.</think>Look. {CALL}", template=QWEN + "<think>")
    first = await ask(engine, tools=[TOOL])
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    said = [{"role": "user", "content": "hi"}, *first["output"], result]
    await ask(engine, input=said, tools=[TOOL])
    assert "Look." in prompt_of(engine)
    assert call["call_id"] in prompt_of(engine)


async def test_formats() -> None:
    """text.format constrains the answer and is returned with it."""
    form = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    engine = calling_engine("{}")
    answer = await ask(engine, text={"format": form})
    assert '"city"' in engine.calls[0]["sampling"].structured_output.text
    assert answer["text"]["format"] == form
    await ask(engine, text={"format": {"type": "json_object"}})
    assert engine.calls[1]["sampling"].structured_output is not None
    await ask(engine, text={"format": {"type": "text"}, "verbosity": "medium"})
    assert engine.calls[2]["sampling"].structured_output is None


async def test_tool_choices() -> None:
    """A call can be demanded or forbidden, in this API's own words."""
    engine = calling_engine()
    for choice in ("required", {"type": "function", "name": "get_weather"}):
        answer = await ask(engine, tools=[TOOL], tool_choice=choice)
        assert answer["tool_choice"] == choice
        assert engine.calls[-1]["sampling"].structured_output is not None
    answer = await ask(engine, tools=[TOOL], tool_choice="none")
    assert answer["output"][0]["type"] == "message"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "input[0].name"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": WEATHER}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"stream_options": {}}, "stream_options"),
        ({"made_up": 1}, "made_up"),
        ({"messages": HELLO}, "messages"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    """HT-01: a body that cannot be served is a 400 that says where, in this API's own words."""
    check_error(await post(ScriptedEngine(), PATH, {**ASK, **fields}), 400, param)


async def test_what_means_nothing_is_taken() -> None:
    """What agents send by habit and what happens anyway is no reason to refuse."""
    fields = {
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "none", "summary": "auto"},
        "truncation": "disabled",
        "service_tier": "auto",
        "user": "u",
        "prompt_cache_key": "k",
        "previous_response_id": None,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
    }
    assert (await ask(calling_engine("x"), **fields))["status"] == "completed"


async def test_a_stream_that_fails() -> None:
    """An error in the middle of a stream is its last event: the response that failed."""
    engine = calling_engine("abcdef", failure=GenerationError("It broke."), fail_after=3)
    last = (await stream(engine))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "It broke."}


def test_openai_client() -> None:
    """The unmodified client: answers, tools, streams and errors."""
    with (
        live_server(calling_engine, api_key="k") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        plain = client.responses.create(model="tiny", input="hi")
        assert plain.output_text == CALL
        tools: Any = [TOOL]
        answer = client.responses.create(model="tiny", input="hi", tools=tools)
        call = answer.output[0]
        assert call.arguments == ARGUMENTS
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        said: Any = [{"role": "user", "content": "hi"}, *answer.output, result]
        with client.responses.stream(model="tiny", input=said, tools=tools) as events:
            final = events.get_final_response()
        assert final.output[0].arguments == ARGUMENTS
        kinds = [e.type for e in client.responses.create(model="tiny", input="hi", stream=True)]
        assert kinds[-1] == "response.completed"
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
