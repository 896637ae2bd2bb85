"""What is refused, and how: every wrong body ends in one sentence and one status."""

import math
import re
from dataclasses import replace
from typing import Any

import orjson
import pytest

from octavo.core.errors import ContextLengthError
from octavo.core.structured import StructuredOutput
from support_server import (
    BOS,
    CHAT,
    COMPLETIONS,
    END,
    HELLO,
    INFO,
    VOCAB_SIZE,
    ByteTokenizer,
    ScriptedEngine,
    check_error,
    client_of,
    post,
)

PATHS = (COMPLETIONS, CHAT)
MINIMAL: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "abc"}, CHAT: {"messages": HELLO}}


def message(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content, **fields}]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"5",
        b'"text"',
        b"true",
        b'{: "model"}',
        b'{"model": }',
        b"\xff\xfe",
        b'{"a": "\\ud800"}',
        b"[" * 5000,
        b'{"a":' * 3000,
    ],
)
async def test_malformed_json(path: str, body: bytes) -> None:
    """HT-01, HT-03: a body that is no JSON object is a 400 that says so, and the next one works."""
    engine = ScriptedEngine()
    check_error(await post(engine, path, body), 400)
    assert (await post(engine, path, MINIMAL[path])).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [
        None,
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/jsonp",
        "application/json; charset=latin-1",
    ],
)
async def test_wrong_content_type(kind: str | None) -> None:
    """HT-01: a body that does not say it is JSON is a 400, so no web page's form can post one."""
    headers = {} if kind is None else {"Content-Type": kind}
    async with client_of(ScriptedEngine()) as client:
        response = await client.post(CHAT, content=b'{"messages": []}', headers=headers)
    assert "Content-Type" in check_error(response, 400)


@pytest.mark.parametrize(
    "kind",
    ["application/json; charset=utf-8", "Application/JSON", 'application/json;charset="UTF-8"'],
)
async def test_right_content_types(kind: str) -> None:
    """HT-01, the other side: usual spellings of JSON's media type are taken."""
    async with client_of(ScriptedEngine()) as client:
        response = await client.post(
            COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": kind}
        )
    assert response.status_code == 200


@pytest.mark.parametrize(
    "prompt",
    [
        [-1],
        [999999999],
        [VOCAB_SIZE],
        [10**30],
        [[1], "a"],
        ["a", [1]],
        ["a", 1],
        ["a", None],
        [1, "a"],
        [1.5],
        [1.0],
        [True],
        [1, True],
        [[1], [True]],
        [[1], []],
        [],
        [[]],
        [None],
        5,
        1.5,
        True,
        {},
        {"0": "a"},
        [{}],
        [[[1]]],
    ],
    ids=repr,
)
async def test_wrong_prompts(prompt: Any) -> None:
    """HT-01, SC-10: prompts of a wrong shape, and ids that are none, name ``prompt``."""
    text = check_error(await post(ScriptedEngine(), COMPLETIONS, {"prompt": prompt}), 400, "prompt")
    assert "prompt" in text


@pytest.mark.parametrize("prompt", ["", [""], None])
@pytest.mark.parametrize(("bos", "expected"), [(BOS, BOS), (None, END)])
async def test_empty_prompt_starts_a_document(prompt: Any, bos: int | None, expected: int) -> None:
    """SC-10: an empty text is BOS, or else an end-of-text token, never an empty sequence."""
    engine = ScriptedEngine(tokenizer=ByteTokenizer(bos=bos))
    response = await post(engine, COMPLETIONS, {"prompt": prompt})
    assert response.status_code == 200
    assert engine.calls[0]["prompt"] == [expected]


async def test_empty_prompt_without_any_start_token() -> None:
    """SC-10: where the model has no such token, an empty prompt is a 400 and others still work."""
    engine = ScriptedEngine(tokenizer=ByteTokenizer(ends=frozenset()))
    for prompt in ("", ["", "a"], ["a", ""]):
        check_error(await post(engine, COMPLETIONS, {"prompt": prompt}), 400, "prompt")
    assert not engine.calls
    assert (await post(engine, COMPLETIONS, {"prompt": "a"})).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": {}}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [None]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": "root", "content": "a"}]}, "messages[0]"),
        ({"messages": [{"role": None, "content": "a"}]}, "messages[0]"),
        ({"messages": [*HELLO, {"role": "user"}]}, "messages[1].content"),
        (message(None), "messages[0].content"),
        (message(5), "messages[0].content"),
        (message({}), "messages[0].content"),
        (message([]), "messages[0].content"),
        (message(["a"]), "messages[0].content[0]"),
        (message([{"type": "text"}]), "messages[0].content[0].text"),
        (message([{"type": "text", "text": 5}]), "messages[0].content[0].text"),
        (message([{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
        (message([{"type": "input_audio"}]), "messages[0].content[0]"),
        (message([{"type": "text", "text": "a"}, {"type": "file"}]), "messages[0].content[1]"),
        (message("a", colour="red"), "messages[0].colour"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0]",
        ),
    ],
)
async def test_wrong_messages(body: dict[str, Any], param: str) -> None:
    """HT-01, HT-03: a message of a wrong shape is a 400 that says where."""
    check_error(await post(ScriptedEngine(), CHAT, body), 400, param)


async def test_histories_as_clients_send_them_back() -> None:
    """HT-03, the other side: nulls and empty lists of an echoed answer mean nothing."""
    history = [
        {"role": "developer", "content": "be brief", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "c",
            "refusal": None,
            "annotations": [],
            "audio": None,
            "tool_calls": None,
            "function_call": None,
        },
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    engine = ScriptedEngine()
    assert (await post(engine, CHAT, {"messages": history})).status_code == 200
    prompt = bytes(engine.calls[0]["prompt"]).decode()
    assert prompt.startswith("<system>be brief|<user>[{'type': 'text', 'text': 'a'}")
    assert prompt.endswith("<assistant>c|<user><tool_response>\nd\n</tool_response>|<assistant>")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field",
    [
        {"stream": "true"},
        {"stream": 1},
        {"echo": "false"},
        {"logprobs": "5"},
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": [1]},
        {"top_p": "x"},
        {"max_tokens": "5"},
        {"max_tokens": True},
        {"max_tokens": 1.5},
        {"max_tokens": -1},
        {"max_tokens": 10**40},
        {"model": 5},
        {"seed": 1.5},
        {"seed": 2**64},
        {"seed": -(2**63) - 1},
        {"stop": 5},
        {"stop": ["a", 5]},
        {"stop": ""},
        {"stop": ["a"] * 17},
        {"user": 5},
        {"metadata": {"a": 1}},
        {"logit_bias": []},
        {"stream_options": True},
        {"top_k": -2},
        {"top_k": 1.0},
        {"min_p": 1.5},
        {"top_p": 0},
        {"temperature": 2.1},
        {"temperature": -0.1},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"repetition_penalty": 0},
        {"min_tokens": -1},
        {"min_tokens": 20, "max_tokens": 10},
        {"stop_token_ids": "x"},
        {"stop_token_ids": [True]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": ["a"]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"bad_words": [" "]},
        {"bad_words": [1]},
        {"bad_words": ["x" * 300]},
        {"bad_words": ["x"] * 1025},
        {"ignore_eos": 0},
        {"cache_salt": ""},
        {"prompt_logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 1, "stream": True},
    ],
    ids=str,
)
async def test_wrong_values(path: str, field: dict[str, Any]) -> None:
    """HT-03, SA-08: strings are no numbers or booleans, ranges hold; the first field is named."""
    response = await post(ScriptedEngine(), path, {**MINIMAL[path], **field})
    check_error(response, 400)
    assert response.json()["error"]["param"].startswith(next(iter(field)))


@pytest.mark.parametrize("value", ["1e30", "-1e30", "1" + 40 * "0", "-1" + 40 * "0"])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("logprobs", "must be (less|greater) than or equal to [05]"),
        ("max_tokens", "must be (between -9.* and 18|greater than or equal to 0)"),
        ("seed", "must be between -9223372036854775808 and 18446744073709551615"),
    ],
)
async def test_huge_integers(value: str, field: str, said: str) -> None:
    """Turns red when an integer that JSON's parser reads as a float is told that it is none."""
    body = f'{{"prompt": "a", "{field}": {value}}}'.encode()
    message = check_error(await post(ScriptedEngine(), COMPLETIONS, body), 400, field)
    assert re.match(f"{field} {said}", message), message


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize(
    "field",
    [
        "temperature",
        "top_p",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    ],
)
async def test_numbers_that_are_none(path: str, value: str, field: str) -> None:
    """SA-08: NaN and infinities are no JSON and never get past the parser."""
    body = orjson.dumps(MINIMAL[path])[:-1] + f', "{field}": {value}}}'.encode()
    check_error(await post(ScriptedEngine(), path, body), 400)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function"}]},
        {"tool_choice": "required"},
        {"functions": [{}]},
        {"audio": {}},
        {"modalities": ["text", "audio"]},
        {"suffix": "x"},
        {"stream_interval": 2},
        {"service_tier": "flex"},
        {"store": True},
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " *"}},
        {"made_up": 1},
        {"made_up": None},
        {"": 1},
    ],
    ids=str,
)
async def test_unsupported_fields_are_named(path: str, field: dict[str, Any]) -> None:
    """Law 8: what is not honoured is refused by name, whether it is known or not."""
    body = {**MINIMAL[path], **field}
    text = check_error(await post(ScriptedEngine(), path, body), 400)
    assert next(iter(field)) in text


@pytest.mark.parametrize(
    "field",
    [
        {"tools": None},
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"response_format": {"type": "text"}},
        {"response_format": None},
        {"modalities": ["text"]},
        {"service_tier": "auto"},
        {"store": False},
        {"reasoning_effort": None},
        {"user": "someone", "metadata": {"a": "b"}, "safety_identifier": "x"},
        {"prompt_cache_key": "k"},
        {"priority": 0},
        {"model": None, "stream_options": None, "stop": None, "seed": None, "n": None},
    ],
    ids=str,
)
async def test_neutral_values_pass(field: dict[str, Any]) -> None:
    """Law 8, the other side: null, and values that ask for what happens anyway, are no error."""
    assert (await post(ScriptedEngine(), CHAT, {"messages": HELLO, **field})).status_code == 200


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "value",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema", "json_schema": {"name": "a"}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": None}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": []}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}},
        {"type": "json_schema", "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a\n", "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a" * 65, "schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}},
        {"type": "json_schema", "schema": {}},
        {"type": "json_object", "json_schema": {"name": "a", "schema": {}}},
        {"type": "structural_tag"},
        {"type": "structural_tag", "format": {"type": "json_schema"}},
        {"type": "xml"},
        {"type": None},
        {"type": 5},
        {"type": "text", "extra": 1},
        {},
        "json",
        5,
        [1],
    ],
    ids=str,
)
async def test_response_formats(path: str, value: Any) -> None:
    """HT-10: a format that is not enforced is refused by name, never answered with free text."""
    body = {**MINIMAL[path], "response_format": value}
    response = await post(ScriptedEngine(), path, body)
    check_error(response, 400)
    assert response.json()["error"]["param"].split(".")[0] == "response_format"


SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TAGS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, StructuredOutput.json_object()),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a-B_9", "schema": SCHEMA}},
            StructuredOutput.json_schema(SCHEMA),
        ),
        (
            "response_format",
            {"type": "json_schema", "json_schema": {"name": "a" * 64, "schema": True}},
            StructuredOutput.json_schema(True),
        ),
        (
            "response_format",
            {"type": "structural_tag", **TAGS},
            StructuredOutput.structural_tag(TAGS),
        ),
        ("structured_outputs", {"json": SCHEMA}, StructuredOutput.json_schema(SCHEMA)),
        ("structured_outputs", {"json": "{}"}, StructuredOutput.json_schema({})),
        ("structured_outputs", {"json_object": True}, StructuredOutput.json_object()),
        ("structured_outputs", {"regex": "a+", "json": None}, StructuredOutput.regex("a+")),
        ("structured_outputs", {"choice": ["é", ""]}, StructuredOutput.choice(["é", ""])),
        ("structured_outputs", {"grammar": "start: /a/"}, StructuredOutput.grammar("start: /a/")),
        ("structured_outputs", {"structural_tag": TAGS}, StructuredOutput.structural_tag(TAGS)),
        (
            "structured_outputs",
            {"regex": "a", "disable_any_whitespace": True},
            StructuredOutput.regex("a"),
        ),
    ],
)
async def test_shapes_reach_the_engine(
    path: str, field: str, value: Any, expected: StructuredOutput | None
) -> None:
    """HT-10: turns red when a shape that is asked for is lost or changed, key order included."""
    engine = ScriptedEngine()
    assert (await post(engine, path, {**MINIMAL[path], field: value})).status_code == 200
    got = engine.calls[0]["sampling"].structured_output
    assert got == expected
    assert got is None or got.param == field


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {}},
        {"structured_outputs": {"json_object": False}},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"json": 5}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": [1]}},
        {"structured_outputs": {"regex": 5}},
        {"structured_outputs": {"structural_tag": 5}},
        {"structured_outputs": {"guided": "a"}},
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
    ],
    ids=str,
)
async def test_wrong_structured_outputs(path: str, fields: dict[str, Any]) -> None:
    """Turns red when none, two, or a malformed shape passes, or free text is answered to it."""
    response = await post(ScriptedEngine(), path, {**MINIMAL[path], **fields})
    check_error(response, 400)
    assert response.json()["error"]["param"].split(".")[0] == "structured_outputs"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [0, -1, 129, 1.5, 1.0, "2", True, []])
async def test_wrong_n(path: str, stream: bool, n: Any) -> None:
    """HT-13: n outside 1 to 128 (1.0 is no integer here) is a 400 before any stream opens."""
    body = {**MINIMAL[path], "n": n, "stream": stream}
    check_error(await post(ScriptedEngine(), path, body), 400, "n")


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"best_of": 1, "n": 2}, 400),
        ({"best_of": 3, "n": 2}, 200),
        ({"best_of": 0}, 400),
        ({"best_of": 21, "n": 21}, 400),
        ({"best_of": 2, "stream": True}, 400),
        ({"best_of": 2, "n": 2, "stream": True}, 400),
        ({"best_of": 2, "n": 2}, 200),
        ({"best_of": 1, "stream": True}, 200),
        ({"best_of": None}, 200),
    ],
)
async def test_best_of(fields: dict[str, Any], status: int) -> None:
    """HT-13: best_of below n or above 20 is refused, and so is streaming it."""
    response = await post(ScriptedEngine(), COMPLETIONS, {"prompt": "a", **fields})
    assert response.status_code == status
    if status == 400:
        check_error(response, 400, "best_of")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop": ["###"]}, "stop"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_a_beam_search_would_ignore_is_refused(
    path: str, fields: dict[str, Any], param: str
) -> None:
    """KV-16: what cannot be combined with a search is a 400 by name."""
    body = {**MINIMAL[path], "n": 2, "use_beam_search": True, **fields}
    check_error(await post(ScriptedEngine(), path, body), 400, param)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", [{"length_penalty": 2.0}, {"early_stopping": True}], ids=str)
async def test_settings_of_a_beam_search_need_one(path: str, field: dict[str, Any]) -> None:
    """Law 8: they would change nothing."""
    check_error(
        await post(ScriptedEngine(), path, {**MINIMAL[path], **field}), 400, next(iter(field))
    )


@pytest.mark.parametrize("path", PATHS)
async def test_a_beam_search_reaches_the_engine(path: str) -> None:
    """Temperature is 0 unless given; the other fields arrive as they are."""
    engine = ScriptedEngine()
    asked = {"n": 2, "use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}
    response = await post(engine, path, {**MINIMAL[path], **asked})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 2
    sampling = engine.calls[-1]["sampling"]
    assert (sampling.temperature, sampling.use_beam_search) == (0.0, True)
    assert (sampling.length_penalty, sampling.early_stopping) == (0.5, "never")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "bias",
    [
        {str(VOCAB_SIZE): 5},
        {"-1": 5},
        {"abc": 1},
        {"": 1},
        {"1.5": 1},
        {" 1": 1},
        {"٣": 1},
        {"9" * 40: 1},
        {"0": 1000},
        {"0": -100.5},
    ],
    ids=str,
)
async def test_wrong_logit_bias(path: str, bias: dict[str, float]) -> None:
    """SA-10: a key that is no token id, or a bias out of range, is a 400 naming the key."""
    body = {**MINIMAL[path], "logit_bias": bias}
    text = check_error(await post(ScriptedEngine(), path, body), 400, "logit_bias")
    assert next(iter(bias))[:40] in text


@pytest.mark.parametrize("value", [None, "5", True, [1]])
async def test_logit_bias_of_a_wrong_type(value: Any) -> None:
    """SA-10: a bias that is no number is a 400 naming its key."""
    body = {"prompt": "a", "logit_bias": {"0": value}}
    check_error(await post(ScriptedEngine(), COMPLETIONS, body), 400, "logit_bias.0")


async def test_logit_bias_reaches_the_engine() -> None:
    """SA-10, the other side: string keys become token ids, -100 and 100 are in range."""
    engine = ScriptedEngine()
    await post(engine, COMPLETIONS, {"prompt": "a", "logit_bias": {"0": -100, "299": 100}})
    assert engine.calls[0]["sampling"].logit_bias == {0: -100.0, 299: 100.0}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 1000000}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": "5"}, "top_logprobs"),
        (CHAT, {"top_logprobs": 5}, "top_logprobs"),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, "top_logprobs"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (COMPLETIONS, {"logprobs": 6}, "logprobs"),
        (COMPLETIONS, {"logprobs": -1}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"top_logprobs": 1}, "top_logprobs"),
    ],
)
async def test_wrong_logprobs(path: str, fields: dict[str, Any], param: str) -> None:
    """SA-12: 0 to 20 for chat and only with logprobs, 0 to 5 for completions, else a 400."""
    check_error(await post(ScriptedEngine(), path, {**MINIMAL[path], **fields}), 400, param)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("length", "max_tokens", "status"),
    [
        (INFO.max_model_len - 1, 1, 200),
        (INFO.max_model_len, 0, 200),
        (INFO.max_model_len, 1, 400),
        (INFO.max_model_len - 1, 2, 400),
        (INFO.max_model_len + 1, 0, 400),
        (INFO.max_model_len + 1, 1, 400),
        (INFO.max_model_len + 1, None, 400),
        (INFO.max_model_len, None, 400),
        (INFO.max_model_len - 1, None, 200),
        (INFO.max_model_len + 500, 10, 400),
        (14, 50000, 400),
    ],
)
async def test_context_limit_of_completions(
    stream: bool, length: int, max_tokens: int | None, status: int
) -> None:
    """SC-11, SC-14, HT-11: prompt and max_tokens together fit the context, or a 400 comes before
    any event; the default of 16 is cut to what is left, but not to nothing."""
    engine = ScriptedEngine(answer=lambda prompt, sampling, index: b"x" * 100)
    body = {"prompt": [65] * length, "max_tokens": max_tokens, "stream": stream}
    response = await post(engine, COMPLETIONS, body)
    if status == 400:
        check_error(response, 400)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert not engine.calls
    else:
        expected = 1 if max_tokens is None else max_tokens
        assert response.status_code == 200
        assert engine.calls[0]["sampling"].max_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_context_limit_of_chat(stream: bool, name: str) -> None:
    """SC-11, SC-14: chat keeps the same limit, counted on the rendered prompt."""
    frame = len("<user>|<assistant>")
    limit = INFO.max_model_len
    for length, max_tokens, status in (
        (limit - 1, 1, 200),
        (limit - 1, 2, 400),
        (limit, None, 400),
        (limit, 1, 400),
        (limit + 500, None, 400),
    ):
        body = {**message("x" * (length - frame)), name: max_tokens, "stream": stream}
        response = await post(ScriptedEngine(), CHAT, body)
        assert response.status_code == status, (length, max_tokens)
        if status == 400:
            check_error(response, 400)


async def test_default_limits() -> None:
    """SC-13: completions default to 16 tokens, chat to what is left; null is the default."""
    engine = ScriptedEngine(answer=lambda prompt, sampling, index: b"x" * 1000)
    for fields in ({}, {"max_tokens": None}):
        usage = (await post(engine, COMPLETIONS, {"prompt": "abc", **fields})).json()["usage"]
        assert usage["completion_tokens"] == 16
        answer = (await post(engine, CHAT, {"messages": HELLO, **fields})).json()
        assert answer["usage"]["total_tokens"] == INFO.max_model_len
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_two_names_of_one_limit() -> None:
    """SC-13: both names of chat's limit may be sent if they agree."""
    engine = ScriptedEngine()
    same = {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 3}
    assert (await post(engine, CHAT, same)).json()["usage"]["completion_tokens"] == 3
    check_error(await post(engine, CHAT, {**same, "max_tokens": 4}), 400, "max_tokens")


@pytest.mark.parametrize("value", [0, -1, 1.5])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_chat_generates_at_least_one_token(name: str, value: float) -> None:
    """SC-16: chat refuses max_tokens 0, as there is nothing to echo."""
    check_error(await post(ScriptedEngine(), CHAT, {"messages": HELLO, name: value}), 400, name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_refusals_of_the_engine_come_first(path: str, stream: bool) -> None:
    """SC-14: what only the engine can refuse is a 400 as JSON too, not an event of a stream."""
    engine = ScriptedEngine(refusal=ContextLengthError("It can never fit the KV cache."))
    response = await post(engine, path, {**MINIMAL[path], "stream": stream})
    assert check_error(response, 400) == "It can never fit the KV cache."
    many = {"prompt": ["a", "b", "c"], "stream": stream}
    check_error(await post(engine, COMPLETIONS, many), 400)


@pytest.mark.parametrize("path", PATHS)
async def test_failed_generation_is_an_error(path: str) -> None:
    """A choice that failed on the server's side is a 500 with the engine's sentence."""
    engine = ScriptedEngine(failure="The logits are not numbers.", fail_after=1)
    assert check_error(await post(engine, path, MINIMAL[path]), 500) == engine.failure


@pytest.mark.parametrize("path", PATHS)
async def test_unexpected_errors_tell_nothing(path: str, caplog: pytest.LogCaptureFixture) -> None:
    """A bug is logged and answered by one plain sentence: no trace, no detail, a 500."""
    engine = ScriptedEngine(failure=ValueError("secret detail"), fail_after=0)
    text = check_error(await post(engine, path, MINIMAL[path]), 500)
    assert "secret" not in text
    assert "secret detail" in caplog.text
    engine.failure = None
    assert (await post(engine, path, MINIMAL[path])).status_code == 200


async def test_unknown_models_and_paths() -> None:
    """A model or path that is not there is a 404, a wrong method a 405, all with error bodies."""
    async with client_of(ScriptedEngine()) as client:
        for path in PATHS:
            response = await client.post(path, json={**MINIMAL[path], "model": "gpt-9"})
            check_error(response, 404, "model")
        check_error(await client.get("/v1/models/gpt-9"), 404, "model")
        check_error(await client.get("/v1/nothing"), 404)
        check_error(await client.get("/"), 404)
        check_error(await client.get(CHAT), 405)
        check_error(await client.delete("/v1/models"), 405)


@pytest.mark.parametrize("name", ["tiny", "alias", None])
async def test_served_names(name: str | None) -> None:
    """Each served name is answered under the name that was asked for; none means the first."""
    for path in PATHS:
        body = {**MINIMAL[path], **({} if name is None else {"model": name})}
        assert (await post(ScriptedEngine(), path, body)).json()["model"] == (name or "tiny")


async def test_refusals_are_small() -> None:
    """HT-02: thousands of wrong parts, or a huge wrong value, are refused in a few hundred bytes
    that echo nothing but the first characters of a name."""
    parts = [{"type": "text", "text": {"secret": index}} for index in range(12_000)]
    roles = [{"role": "secret" * 10, "content": "a"}] * 12_000
    long = "secret" * 1_000_000
    for body in (
        message(parts),
        {"messages": roles},
        {"messages": HELLO, "max_tokens": long},
        {"messages": HELLO, "stop": [5] * 12_000},
        {"messages": HELLO, "logit_bias": {f"{i}": "secret" for i in range(12_000)}},
        {"messages": HELLO, "stop_token_ids": ["secret"] * 12_000},
        {"messages": HELLO, "model": long},
        {"messages": HELLO, "response_format": {"type": long}},
        {"messages": HELLO, **{f"field{i}" * 40: 1 for i in range(3_000)}},
        {"messages": HELLO, "x" * 5_000_000: 1},
    ):
        response = await post(ScriptedEngine(), CHAT, body)
        assert response.status_code in (400, 404)
        assert len(response.content) < 1_600
        assert "secret" * 20 not in response.text


async def test_bodies_have_a_limit() -> None:
    """HT-02: a body beyond the limit is a 413, declared or not, and is not read to its end."""
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1
            yield b" " * (1 << 20)

    async with client_of(ScriptedEngine()) as client:
        headers = {"Content-Type": "application/json"}
        check_error(await client.post(CHAT, content=endless(), headers=headers), 413)
        assert sent < 40
        headers["Content-Length"] = str(1 << 40)
        check_error(await client.post(CHAT, content=endless(), headers=headers), 413)
        assert sent < 41


async def test_long_bodies_are_translated_too() -> None:
    """A body long enough to be tokenized on a thread is refused and answered like any other."""
    text = "x" * 100_000
    check_error(await post(ScriptedEngine(), COMPLETIONS, {"prompt": text}), 400, "prompt")
    body = {"prompt": "abc", "user": text}
    assert (await post(ScriptedEngine(), COMPLETIONS, body)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": 5}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
)
async def test_wrong_template_options(fields: dict[str, Any], param: str) -> None:
    """Options of the template that contradict each other or the body's fields are refused."""
    check_error(await post(ScriptedEngine(), CHAT, {"messages": HELLO, **fields}), 400, param)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "<user>hi|<assistant>On we|<assistant>"),
        ({"add_generation_prompt": False}, "<user>hi|<assistant>On we|"),
        ({"continue_final_message": True}, "<user>hi|<assistant>On we"),
        (
            {"chat_template_kwargs": {"thinking": True}},
            "<user>hi|<assistant>On we|[thinking=True]<assistant>",
        ),
    ],
)
async def test_template_options(fields: dict[str, Any], expected: str) -> None:
    """What the template is given, and where the prompt ends, is what was asked for."""
    engine = ScriptedEngine()
    history = [*HELLO, {"role": "assistant", "content": "On we "}]
    history[1]["content"] = "On we"
    assert (await post(engine, CHAT, {"messages": history, **fields})).status_code == 200
    assert bytes(engine.calls[0]["prompt"]).decode() == expected


async def test_priority_needs_its_policy() -> None:
    """A priority that the queue would ignore is refused; with the policy it reaches the engine."""
    body = {"prompt": "a", "priority": 3, "cache_salt": "s"}
    check_error(await post(ScriptedEngine(), COMPLETIONS, body), 400, "priority")
    engine = ScriptedEngine(info=replace(INFO, scheduling_policy="priority"))
    assert (await post(engine, COMPLETIONS, body)).status_code == 200
    assert (engine.calls[0]["priority"], engine.calls[0]["cache_salt"]) == (3, "s")


async def test_every_sampling_field_reaches_the_engine() -> None:
    """A field that is accepted is used: the engine gets each value that was sent."""
    sent = {
        "n": 2,
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.25,
        "min_p": 0.125,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.5,
        "seed": -5,
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    lists = {
        "stop": ["x", "y"],
        "stop_token_ids": [7],
        "allowed_token_ids": [1, 2],
        "bad_words": ["z"],
    }
    engine = ScriptedEngine()
    for path in PATHS:
        assert (await post(engine, path, {**MINIMAL[path], **sent, **lists})).status_code == 200
    for call in engine.calls:
        sampling = call["sampling"]
        assert {name: getattr(sampling, name) for name in sent} == sent
        assert {name: list(getattr(sampling, name)) for name in lists} == lists
        assert math.isclose(sampling.top_p, 0.25)


@pytest.mark.parametrize(
    ("num_prompts", "n", "status"),
    [(2049, 1, 400), (100, 128, 400), (1025, 2, 400), (16, 128, 200)],
)
async def test_choices_have_a_limit(num_prompts: int, n: int, status: int) -> None:
    """One body cannot put any number of sequences into the engine."""
    body = {"prompt": ["a"] * num_prompts, "n": n, "max_tokens": 0}
    response = await post(ScriptedEngine(), COMPLETIONS, body)
    assert response.status_code == status
    if status == 200:
        assert len(response.json()["choices"]) == num_prompts * n


def nested(depth: int) -> str:
    return '{"a":[' * (depth // 2) + "1" + "]}" * (depth // 2)


DEEP_TOOL = """{"messages": [{"role": "user", "content": "a"}], "tool_choice": "none", "tools": [
    {"type": "function", "function": {"name": "f", "parameters": %s}}
]}"""
DEEP_INPUT = """{"model": "tiny", "max_tokens": 3, "messages": [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": %s}]},
    {"role": "user", "content": "a"}
]}"""


@pytest.mark.parametrize("depth", [98, 200, 500, 1000, 100_000])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": %s}'),
        (CHAT, '{"messages": [{"role": "user", "content": "a"}], "made_up": %s}'),
        (CHAT, DEEP_TOOL),
        ("/v1/messages", DEEP_INPUT),
        (COMPLETIONS, '{"prompt": "a", "structured_outputs": {"json": %s}}'),
    ],
    ids=["kwargs", "unknown", "tool", "input", "schema"],
)
async def test_deep_bodies(path: str, body: str, depth: int) -> None:
    """HT-01's neighbour: a body nested beyond a limit is a 400, wherever it is deep; nothing that
    writes JSON later meets what it cannot write."""
    async with client_of(ScriptedEngine()) as client:
        headers = {"Content-Type": "application/json"}
        content = (body % nested(depth)).encode()
        response = await client.post(path, content=content, headers=headers)
    assert response.status_code in (200, 400), response.text
    if depth > 100:
        assert response.status_code == 400
        assert "deep" in response.text or "depth" in response.text


@pytest.mark.parametrize("depth", [50, 200, 1000, 5000])
async def test_deep_arguments_are_text(depth: int) -> None:
    """Arguments of a former call that are nested too deeply to be written again stay as they were
    written."""
    arguments = '{"a":' * depth + "1" + "}" * depth
    function = {"name": "f", "arguments": arguments}
    call = {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": function}],
    }
    info = replace(INFO, max_model_len=100_000, num_blocks=10_000)
    engine = ScriptedEngine(info=info)
    response = await post(engine, CHAT, {"messages": [call, *HELLO], "max_tokens": 2})
    assert response.status_code == 200, response.text
