"""Tools and formats on the real engine: what the grammar lets a model write is what is read."""

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import jsonschema
import openai
import orjson
import pytest
from pydantic import BaseModel

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.factory import EngineSettings, build_engine
from octavo.runner.grammar import GrammarCompiler, Vocabulary
from octavo.server.protocol.tools import ChatTool
from octavo.server.tools.constraint import free_calls
from octavo.server.tools.output import OutputFormat
from octavo.server.tools.styles import HERMES, LLAMA3, MISTRAL, STYLES, ToolStyle
from support import PATIENCE_S
from support_engine import Recorder, byte_tokenizer, patient_engine, tiny_parts
from support_loading import write_hf_folder
from support_server import CHAT, HELLO, NAME, client_of, live_server, parse_events, reasons_of
from support_tools import joined_message

MOVE = {
    "type": "object",
    "properties": {
        "to": {"enum": ["north", "</tool_call>", 'a "b"', "é"]},
        "steps": {"type": "integer", "minimum": 0, "maximum": 99},
        "fast": {"type": "boolean"},
    },
    "required": ["to", "steps"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE, "strict": True}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {"move": MOVE, "stop": {"type": "object", "maxProperties": 0}}


@asynccontextmanager
async def serving(folder: Path, style: ToolStyle | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a real engine around a tiny random model of bytes."""
    engine = patient_engine(tiny_parts(folder, Recorder(), max_model_len=4096))
    engine.start()
    try:
        async with client_of(engine, tool_style=style) as client:
            yield client
        assert await engine.drain(PATIENCE_S)
        assert engine.stats().usage.num_used == 0
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_hf_folder(folder, "llama", config_overrides={"max_position_embeddings": 4096})
    return folder


def check_calls(calls: list[dict[str, Any]]) -> None:
    assert calls
    for call in calls:
        arguments = orjson.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
async def test_demanded_calls_always_parse(folder: Path, style: ToolStyle) -> None:
    """A random model that must call makes only calls that parse and fit, in every style, whole and
    streamed, and says nothing else."""
    body = {"messages": HELLO, "tools": TOOLS, "max_completion_tokens": 1500}
    async with serving(folder, style) as client:
        for seed in range(6):
            asked = {
                **body,
                "seed": seed,
                "tool_choice": "required",
                "parallel_tool_calls": seed % 2 == 0,
            }
            answer = (await client.post(CHAT, json=asked)).json()["choices"][0]
            assert answer["finish_reason"] == "tool_calls", answer
            assert answer["message"]["content"] is None
            check_calls(answer["message"]["tool_calls"])
            if seed % 2 or style is LLAMA3:
                assert len(answer["message"]["tool_calls"]) == 1
            streamed = await client.post(CHAT, json={**asked, "stream": True})
            message = joined_message(parse_events(streamed.content))
            assert [call["function"] for call in message["tool_calls"]] == [
                call["function"] for call in answer["message"]["tool_calls"]
            ]


async def test_a_named_tool_is_called_once(folder: Path) -> None:
    """The tool that is named is the one that is called, and only once."""
    choice = {"type": "function", "function": {"name": "move"}}
    async with serving(folder) as client:
        for seed in range(4):
            body = {"messages": HELLO, "tools": TOOLS, "tool_choice": choice, "seed": seed}
            answer = (await client.post(CHAT, json=body)).json()["choices"][0]
            (call,) = answer["message"]["tool_calls"]
            assert call["function"]["name"] == "move"
            check_calls([call])


@pytest.mark.parametrize("style", [HERMES, MISTRAL], ids=lambda style: style.name)
async def test_calls_cut_short_end_with_length(folder: Path, style: ToolStyle) -> None:
    """CO-13: a demanded call that the token limit cuts is never said to be complete."""
    async with serving(folder, style) as client:
        for limit in (1, 5, 30, 45):
            body = {
                "messages": HELLO,
                "tools": TOOLS[:1],
                "tool_choice": "required",
                "max_completion_tokens": limit,
            }
            answer = (await client.post(CHAT, json=body)).json()["choices"][0]
            assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
async def test_calls_that_a_stop_string_cuts_end_with_stop(folder: Path, style: ToolStyle) -> None:
    """CO-13: a stop string inside a call's arguments ends with stop, as the call is not whole;
    streamed as well."""
    place = {"type": "object", "properties": {"city": {"const": "Paris"}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "go", "parameters": place}}
    body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "stop": "Paris"}
    async with serving(folder, style) as client:
        answer = (await client.post(CHAT, json=body)).json()["choices"][0]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": "'
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "Paris")
        streamed = await client.post(CHAT, json={**body, "stream": True})
        assert reasons_of(parse_events(streamed.content))[0] == ["stop"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "foo"},
        {"$ref": "#/missing"},
        {"properties": 5},
        {"type": "array", "items": {"const": 1}},
        {"type": ["string", "null"]},
        {"const": 5},
        {"$ref": "#/$defs/word", "$defs": {"word": {"type": "string"}}},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}},
    ],
    ids=str,
)
async def test_schemas_that_cannot_be_enforced(folder: Path, parameters: dict[str, Any]) -> None:
    """CO-04: a bad schema of a tool that must be called is a 400 that names tools; where the model
    is free, the schema is only text to it."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with serving(folder) as client:
        body = {"messages": HELLO, "tools": [tool], "max_completion_tokens": 1}
        refused = await client.post(CHAT, json={**body, "tool_choice": "required"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tools"
        assert (await client.post(CHAT, json=body)).status_code == 200


@pytest.mark.parametrize(
    "parameters",
    [
        {"enum": [1, "word", {"a": 1}]},
        {"type": ["array", "object"], "maxItems": 0, "additionalProperties": False},
        {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": False}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"enum": [{"a": 1}]}}},
    ],
    ids=str,
)
async def test_demanded_arguments_are_objects(folder: Path, parameters: dict[str, Any]) -> None:
    """A schema that also allows what is no object binds a demanded call to the objects alone."""
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with serving(folder) as client:
        for seed in range(4):
            body = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "seed": seed}
            body["parallel_tool_calls"] = False
            answer = (await client.post(CHAT, json=body)).json()["choices"][0]
            assert answer["finish_reason"] == "tool_calls"
            (call,) = answer["message"]["tool_calls"]
            arguments = orjson.loads(call["function"]["arguments"])
            assert isinstance(arguments, dict)
            jsonschema.validate(arguments, parameters)


async def test_formats_exclude_demanded_calls(folder: Path) -> None:
    """An answer cannot be both a call and JSON of another schema: that is refused by name."""
    async with serving(folder) as client:
        body = {"messages": HELLO, "tools": TOOLS, "response_format": {"type": "json_object"}}
        refused = await client.post(CHAT, json={**body, "tool_choice": "required"})
        assert refused.status_code == 400
        assert "response_format" in refused.json()["error"]["message"]


@pytest.fixture(scope="module")
def smollm2(model_path: Path) -> Iterator[str]:
    """A live server of the default model."""

    def engine() -> AsyncEngine:
        settings = EngineSettings(
            model=model_path,
            served_model_name=NAME,
            max_model_len=1024,
            max_num_seqs=4,
            seed=0,
        )
        return patient_engine(build_engine(settings, Recorder()))

    with live_server(engine) as server:
        yield server.url


class City(BaseModel):
    """What the model is asked for."""

    name: str
    is_capital: bool


class Move(BaseModel):
    """What even a random model can be held to; the client takes bounds of numbers out of it."""

    to: Literal["north", "south"]
    steps: Literal[1, 2, 3]
    is_fast: bool


def test_messages_parse(folder: Path) -> None:
    """client.messages.parse and .stream of Anthropic's client, unmodified: a pydantic model comes
    back from a tiny random model, as its schema binds the answer."""

    def engine() -> AsyncEngine:
        return patient_engine(tiny_parts(folder, Recorder(), max_model_len=1024))

    said: Any = [{"role": "user", "content": "Where to?"}]
    with (
        live_server(engine) as server,
        anthropic.Anthropic(base_url=server.url, api_key="k", max_retries=0) as claude,
    ):
        parsed = claude.messages.parse(
            model=NAME, max_tokens=500, messages=said, output_format=Move
        )
        assert parsed.stop_reason == "end_turn"
        assert isinstance(parsed.parsed_output, Move)
        with claude.messages.stream(
            model=NAME, max_tokens=500, messages=said, output_format=Move
        ) as stream:
            text = stream.get_final_text()
        assert Move.model_validate_json(text)


@pytest.mark.model
def test_parse_with_pydantic(smollm2: str) -> None:
    """client.chat.completions.parse, unmodified: a real model answers with an object."""
    with openai.OpenAI(base_url=f"{smollm2}/v1", api_key="k", max_retries=0) as client:
        answer = client.chat.completions.parse(
            model=NAME,
            messages=[{"role": "user", "content": "Name a city."}],
            response_format=City,
            max_tokens=60,
            temperature=0,
        )
        assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.model
def test_a_round_trip_with_a_real_model(smollm2: str) -> None:
    """A model whose template knows no tools is taught one, must call it, and reads the result; in
    OpenAI's words and in Anthropic's."""
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    }
    said: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    function = {"name": "get_weather", "description": "Tells the weather", "parameters": schema}
    tools: Any = [{"type": "function", "function": function}]
    with openai.OpenAI(base_url=f"{smollm2}/v1", api_key="k", max_retries=0) as client:
        first = client.chat.completions.create(
            model=NAME,
            messages=said,
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
        )
        calls = first.choices[0].message.tool_calls
        assert calls
        assert all(orjson.loads(call.function.arguments).keys() == {"city"} for call in calls)
        results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in calls]
        history: Any = [*said, first.choices[0].message, *results]
        last = client.chat.completions.create(
            model=NAME,
            messages=history,
            tools=tools,
            tool_choice="none",
            max_tokens=8,
            temperature=0,
        )
        assert last.choices[0].message.content
    with anthropic.Anthropic(base_url=smollm2, api_key="k", max_retries=0) as claude:
        message = claude.messages.create(
            model=NAME,
            max_tokens=200,
            messages=said,
            tools=[{"name": "get_weather", "input_schema": schema}],
            tool_choice={"type": "tool", "name": "get_weather"},
        )
        assert message.stop_reason == "tool_use"
        assert message.content[0].input.keys() == {"city"}


FREE = {
    HERMES: [
        "",
        "hello",
        'Well: {"name": "stop"}',
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
        'a <tool_call>\n{"name": "move", "arguments": {"to": "é", "steps": 3}}\n</tool_call> b',
    ],
    LLAMA3: [
        "",
        "hello",
        " \nhello {}",
        '{"name": "stop", "parameters": {}}',
        '{"name": "move", "parameters": {"to": "north", "steps": 3, "fast": true}}',
        'I do.<|python_tag|>{"name": "move", "parameters": {"to": "north", "steps": 3}}',
    ],
    MISTRAL: [
        "",
        "hello [1]",
        '[TOOL_CALLS] [{"name": "stop", "arguments": {}}]',
        'Hi [TOOL_CALLS] [{"name": "move", "arguments": {"to": "é", "steps": 3}}]',
        '[TOOL_CALLS] [{"name": "stop", "arguments": {}}, {"name": "stop", "arguments": {"a": 1}}]',
    ],
}
BOUND = {
    HERMES: [
        '<tool_call>\n{"name": "go", "arguments": {}}',
        '<tool_call>\n{"name": "move", "arguments": {"to": "x"',
        '<tool_call>{"name"',
    ],
    LLAMA3: [
        '{"name": "go"',
        '{"city": "Paris"}',
        '  {"name": "go"',
        '{"name": "move", "parameters": {}',
        'I do.<|python_tag|>{"name": "move", "parameters": {"steps"',
    ],
    MISTRAL: [
        '[TOOL_CALLS] [{"name": "go"',
        '[TOOL_CALLS] [{"name": "move", "arguments": {}',
        'Hi [TOOL_CALLS] [{"name": "stop", "arguments": {}}, {"name": "go"',
    ],
}


MARK, OPEN, CLOSE = 256, 259, 260


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    """Bytes, an end of turn, and control tokens for marks."""
    tokenizer = byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    words = Vocabulary(tokenizer, tokenizer.vocab_size, {258})
    words.special_token_ids = sorted({*words.special_token_ids, OPEN, CLOSE})
    return words


def with_control(style: ToolStyle, text: str, words: Vocabulary) -> list[int]:
    """Return a text's ids, its marks as control tokens."""
    ids: list[int] = []
    for part in re.split(f"({re.escape(style.mark)})", text):
        ids += [MARK] if part == style.mark else words(part.encode())
    return ids


@pytest.mark.parametrize(
    ("thought", "begin"),
    [
        ((), []),
        ((OPEN, CLOSE), []),
        ((OPEN, CLOSE), [OPEN, 65, CLOSE]),
        ((CLOSE,), [66, 10, CLOSE]),
    ],
)
@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("style", STYLES.values(), ids=lambda style: style.name)
def test_what_a_strict_tool_leaves_free(
    words: Vocabulary, style: ToolStyle, marked: bool, thought: tuple[int, ...], begin: list[int]
) -> None:
    """In each style, with a mark of text or of one control token, after reasoning or without: any
    text may be said and what may be called called, arguments of a strict tool as its schema has
    them; nothing else that reads as a call can be written."""
    tools = [ChatTool.model_validate(tool) for tool in TOOLS]
    anything = tools[1].function.model_copy(update={"parameters": {"type": "object"}})
    tools[1] = tools[1].model_copy(update={"function": anything})
    mark = MARK if marked else style.mark
    shape = free_calls(style, tools, single=False, mark=mark, thought=thought)
    grammar = GrammarCompiler(words).compile(shape)
    cases = [(text, True) for text in FREE[style]] + [(text, False) for text in BOUND[style]]
    for text, is_good in cases:
        said = text.removesuffix(" b") if marked or thought else text
        ids = [*begin, *(with_control(style, said, words) if marked else words(said.encode()))]
        matcher = grammar.new_matcher()
        count = matcher.try_consume_tokens(ids)
        assert (count == len(ids)) is is_good, (text, count)
        if is_good:
            assert matcher.is_accepting(), text
            read = OutputFormat(style, frozenset({"move", "stop"})).read(text)
            assert all(isinstance(orjson.loads(call.arguments), dict) for call in read.calls)
            assert bool(read.calls) is ("arguments" in text or "parameters" in text)


async def test_strict_tools_leave_the_model_free(folder: Path) -> None:
    """A strict tool that need not be called demands no call: a random model writes any text (well-
    formed, as the grammar knows no half characters) until it is cut."""
    body = {"messages": HELLO, "max_completion_tokens": 20, "temperature": 0}
    async with serving(folder) as client:
        answer = (await client.post(CHAT, json={**body, "tools": TOOLS[:1]})).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert len(answer["message"]["content"]) > 5
    assert "tool_calls" not in answer["message"]
