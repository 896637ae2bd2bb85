"""Tools and reasoning in chat: what the model is told, what clients are given."""

from typing import Any

import openai
import orjson
import pytest

from octavo.core.structured import StructuredKind
from octavo.server.tools.styles import MISTRAL
from support_server import (
    BOS,
    CHAT,
    HELLO,
    ByteTemplate,
    ByteTokenizer,
    ScriptedEngine,
    check_error,
    live_server,
    parse_events,
    post,
    reasons_of,
)
from support_tools import (
    ARGUMENTS,
    CALL,
    QWEN,
    TOOLS,
    WEATHER,
    calling_engine,
    joined_message,
    prompt_of,
)

ASK: dict[str, Any] = {"messages": HELLO, "tools": TOOLS}
REASONER = QWEN + "<think>"


async def ask(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    response = await post(engine, CHAT, {**ASK, **fields})
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


async def test_a_call() -> None:
    """A call in the answer is a tool call, the content is null, the reason says why it ended."""
    choice = await ask(calling_engine())
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert call["type"] == "function"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("text", [CALL, f"Well. {CALL}\n{CALL}", "no call", "<tool_call>no"])
async def test_streams_equal_whole_answers(text: str) -> None:
    """ST-13: the deltas of a stream, one byte each, make the message of the whole answer, for each
    of several choices."""
    body = {**ASK, "n": 2}
    whole = (await post(calling_engine(text), CHAT, body)).json()["choices"]
    chunks = parse_events(
        (await post(calling_engine(text), CHAT, {**body, "stream": True})).content
    )
    reasons = reasons_of(chunks)
    for index, choice in enumerate(whole):
        joined, message = joined_message(chunks, index), choice["message"]
        assert joined["content"] == (message["content"] or "")
        assert [c["function"] for c in joined["tool_calls"]] == [
            c["function"] for c in message.get("tool_calls", [])
        ]
        assert reasons[index] == [choice["finish_reason"]]
        assert len({c["id"] for c in joined["tool_calls"]}) == text.count(CALL)


async def test_arguments_stream_as_they_come() -> None:
    """A client sees the name at once and the arguments in pieces, not all at the end."""
    chunks = parse_events((await post(calling_engine(), CHAT, {**ASK, "stream": True})).content)
    calls = [
        call
        for chunk in chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(calls) > 10
    assert all("id" not in call and "name" not in call["function"] for call in calls[1:])


async def test_logprobs_of_calls() -> None:
    """ST-16: every token's logprob is streamed once, also of tokens that are no text."""
    body = {**ASK, "logprobs": True, "return_token_ids": True}
    whole = (await post(calling_engine(), CHAT, body)).json()["choices"][0]
    chunks = parse_events((await post(calling_engine(), CHAT, {**body, "stream": True})).content)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    scores = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert scores == whole["logprobs"]["content"]
    assert [i for c in choices for i in c.get("token_ids", ())] == whole["token_ids"]


async def test_a_call_cut_short() -> None:
    """CO-13: what the token limit cut is partial and ends with length, not with tool_calls."""
    choice = await ask(calling_engine(), max_tokens=60)
    assert choice["finish_reason"] == "length"
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert ARGUMENTS.startswith(arguments)
    assert arguments != ARGUMENTS


@pytest.mark.parametrize("limit", [len("<tool_call>"), 20, CALL.index("weather")])
async def test_a_call_cut_before_its_name(limit: int) -> None:
    """Turns red when users are shown the marks of a call of which the limit left no more."""
    choice = await ask(calling_engine(), max_tokens=limit)
    assert choice["finish_reason"] == "length"
    assert not choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    streamed = await post(calling_engine(), CHAT, {**ASK, "max_tokens": limit, "stream": True})
    assert not joined_message(parse_events(streamed.content))["content"]


async def test_no_tools_no_calls() -> None:
    """Without tools, or with tool_choice none, what looks like a call is text, and the model is
    told of no tools."""
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        engine = calling_engine()
        choice = await ask(engine, **fields)
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert "get_weather" not in prompt_of(engine)


async def test_one_call_at_a_time() -> None:
    """parallel_tool_calls false: the answer has one call, whatever else the model wrote."""
    choice = await ask(calling_engine(f"{CALL}{CALL}x"), parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1
    assert len((await ask(calling_engine(CALL * 2)))["message"]["tool_calls"]) == 2


HISTORY = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": ARGUMENTS},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]


async def test_history_of_templates_that_know_tools() -> None:
    """Calls and results of a history reach the template, arguments as the object they are."""
    engine = calling_engine("It rains.")
    await ask(engine, messages=HISTORY)
    prompt = prompt_of(engine)
    sent = {"id": "call_1", "type": "function"}
    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    written = orjson.dumps([{**sent, "function": function}]).decode()
    assert f"<assistant>{written}|<tool>rain|" in prompt
    assert prompt.startswith(orjson.dumps(TOOLS).decode())


async def test_history_of_templates_that_know_none() -> None:
    """A model whose template knows no tools is taught them in Hermes' words, results included."""
    engine = calling_engine("It rains.", template="")
    await ask(engine, messages=HISTORY)
    prompt = prompt_of(engine)
    assert prompt.startswith("<system>You can call functions.")
    assert orjson.dumps(WEATHER).decode() in prompt
    call = orjson.dumps({"name": "get_weather", "arguments": {"city": "Paris"}}).decode()
    assert f"<assistant><tool_call>\n{call}\n</tool_call>|" in prompt
    assert "<user><tool_response>\nrain\n</tool_response>|" in prompt
    said = [{"role": "system", "content": "Be brief."}, *HELLO]
    await ask(engine, messages=said)
    assert prompt_of(engine).startswith("<system>Be brief.\n\nYou can call functions.")


async def test_arguments_that_are_no_json_are_kept() -> None:
    """A model reads back what it wrote, even if that was no JSON."""
    history = orjson.loads(orjson.dumps(HISTORY))
    history[1]["tool_calls"][0]["function"]["arguments"] = "{oops"
    for template in ("", QWEN):
        engine = calling_engine("x", template=template)
        await ask(engine, messages=history)
        assert '"{oops"' in prompt_of(engine)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    """Return a choice among some tools."""
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": 5}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS * 2}, "tools"),
        ({"tools": TOOLS * 129}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "made_up"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": allowed("none", "get_weather")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto", "get_weather", "g")}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"functions": [WEATHER]}, "functions"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0]"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(fields: dict[str, Any], param: str) -> None:
    """HT-01: a tool, a choice or a call of a wrong shape is a 400 that says where."""
    check_error(await post(calling_engine(), CHAT, {**ASK, **fields}), 400, param)


async def test_reasoning_is_set_apart() -> None:
    """What a reasoning model writes to itself is reasoning_content, whole and streamed."""
    text = f"<think>\nHm.\n</think>\n\nSure. {CALL}"
    message = (await ask(calling_engine(text, template=REASONER)))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Sure.")
    assert len(message["tool_calls"]) == 1
    response = await post(calling_engine(text, template=REASONER), CHAT, {**ASK, "stream": True})
    streamed = joined_message(parse_events(response.content))
    assert (streamed["reasoning_content"], streamed["content"]) == ("Hm.", "Sure.")
    plain = (await ask(calling_engine(text)))["message"]
    assert plain["content"].startswith("<think>")


async def test_reasoning_that_the_prompt_began() -> None:
    """Where the template opens the mark itself, the answer begins inside of it."""

    class Opening(ByteTemplate):
        def render(self, *args: Any, **fields: Any) -> str:
            return super().render(*args, **fields) + "<think>\n"

    engine = calling_engine("Hm.</think>Yes.", template=REASONER)
    engine.tokenizer.chat_template = Opening(REASONER)
    message = (await ask(engine))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


async def test_effort_switches_reasoning() -> None:
    """reasoning_effort reaches templates that reason; the client's own variables win."""
    for fields, shown in (
        ({"reasoning_effort": "none"}, "[enable_thinking=False]"),
        ({"reasoning_effort": "low"}, "[enable_thinking=True][reasoning_effort=low]"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            "[enable_thinking=False]",
        ),
    ):
        engine = calling_engine("x", template=REASONER)
        await ask(engine, **fields)
        assert shown in prompt_of(engine)


async def test_marks_that_are_control_tokens() -> None:
    """Where a mark is a control token, it is not skipped before the parser can see it."""

    class Marked(ByteTokenizer):
        def encode(self, text: str, **options: bool) -> list[int]:
            return [BOS] if text == MISTRAL.mark else super().encode(text)

    for template, skips in (("tools [TOOL_CALLS]", False), (QWEN, True)):
        engine = calling_engine("x", template=template)
        engine.tokenizer = Marked()
        engine.tokenizer.chat_template = ByteTemplate(template)
        await ask(engine)
        assert engine.calls[0]["sampling"].skip_special_tokens is skips
        await ask(engine, tools=None)
        assert engine.calls[1]["sampling"].skip_special_tokens


async def test_a_flag_names_the_style() -> None:
    """--tool-call-parser wins over what the template shows."""
    text = '[TOOL_CALLS] [{"name": "get_weather", "arguments": {}}]'
    response = await post(calling_engine(text), CHAT, ASK, tool_style=MISTRAL)
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9


def test_openai_client() -> None:
    """The unmodified client: a round trip with a tool, whole and streamed."""
    with (
        live_server(calling_engine) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(**ASK, model="tiny")
        message = answer.choices[0].message
        assert message.tool_calls[0].function.arguments == ARGUMENTS
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
        again = client.chat.completions.create(
            model="tiny", messages=[*HELLO, message, result], tools=TOOLS
        )
        assert again.choices[0].finish_reason == "tool_calls"
        with client.chat.completions.stream(**ASK, model="tiny") as events:
            final = events.get_final_completion()
        assert final.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS


def tools_that(**fields: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {**WEATHER, **fields}}]


BOTH = [*TOOLS, {"type": "function", "function": {"name": "get_time"}}]


async def test_allowed_tools_are_all_told_of() -> None:
    """Turns red when the prompt, whose prefix should stay cached, depends on which tools may be
    called now; or when the others may be called."""
    engine = calling_engine("x", template=QWEN)
    for choice in ("auto", allowed("auto", "get_time"), allowed("required", "get_time")):
        await ask(engine, tools=BOTH, tool_choice=choice)
    assert len({tuple(call["prompt"]) for call in engine.calls}) == 1
    free, *bound = (call["sampling"].structured_output for call in engine.calls)
    assert free is None
    assert all("get_time" in shape.text and "get_weather" not in shape.text for shape in bound)


@pytest.mark.parametrize(
    ("fields", "template", "kind"),
    [
        ({}, QWEN, None),
        ({"tools": tools_that(strict=True)}, QWEN, StructuredKind.STRUCTURAL_TAG),
        ({"tools": tools_that(strict=True)}, "", StructuredKind.STRUCTURAL_TAG),
        ({"tools": tools_that(strict=True)}, "tools [TOOL_CALLS]", StructuredKind.TOOL_CALLS),
        ({"tools": tools_that(strict=True)}, "tools <|python_tag|>", StructuredKind.TOOL_CALLS),
        ({"tool_choice": allowed("auto", "get_weather")}, QWEN, None),
        (
            {"tools": BOTH, "tool_choice": allowed("auto", "get_weather")},
            QWEN,
            StructuredKind.STRUCTURAL_TAG,
        ),
        (
            {"tools": BOTH, "tool_choice": allowed("required", "get_weather")},
            QWEN,
            StructuredKind.TOOL_CALLS,
        ),
        ({"tools": BOTH, "tool_choice": "auto"}, QWEN, None),
        ({"tools": tools_that(strict=True), "tool_choice": "none"}, QWEN, None),
        ({"tool_choice": "required"}, QWEN, StructuredKind.TOOL_CALLS),
        ({"tool_choice": "required"}, "tools <|python_tag|>", StructuredKind.TOOL_CALLS),
        (
            {"tools": tools_that(strict=True), "response_format": {"type": "json_object"}},
            QWEN,
            StructuredKind.JSON_SCHEMA,
        ),
    ],
    ids=str,
)
async def test_what_constrains_an_answer(
    fields: dict[str, Any], template: str, kind: StructuredKind | None
) -> None:
    """A demanded call, a strict tool or a format each bind the answer; tools alone do not."""
    engine = calling_engine("x", template=template)
    await ask(engine, **fields)
    constraint = engine.calls[0]["sampling"].structured_output
    assert (None if constraint is None else constraint.kind) == kind


async def test_constrained_answers_hold_no_reasoning() -> None:
    """An answer that is bound from its first token on is all answer, also where the template
    opens the reasoning mark: nothing of it is lost as reasoning."""
    engine = calling_engine('{"a": 1}', template=REASONER)
    choice = await ask(engine, response_format={"type": "json_object"}, tools=None)
    assert choice["message"]["content"] == '{"a": 1}'
    assert "reasoning_content" not in choice["message"]
