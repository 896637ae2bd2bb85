"""Tool calls and reasoning in what models write: every style, however the text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.errors import SettingError
from octavo.server.tools.output import OutputFormat, OutputParser
from octavo.server.tools.parts import Message, assemble
from octavo.server.tools.styles import (
    HERMES,
    LLAMA3,
    MISTRAL,
    STYLES,
    ToolStyle,
    style_named,
    style_of,
    takes_tools,
)

NAMES = frozenset({"f", "get_weather"})
Calls = list[tuple[str, str]]


def form(style: ToolStyle | None, **fields: bool) -> OutputFormat:
    return OutputFormat(style, NAMES, **fields)  # type: ignore[arg-type]


def read(text: str, output: OutputFormat) -> tuple[str, str, Calls]:
    return simple(output.read(text))


def simple(message: Message) -> tuple[str, str, Calls]:
    """A message without the ids of its calls, which are drawn."""
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.text, message.reasoning, calls


F = '{"name": "f", "arguments": {"x": 1}}'
G = '{"name": "get_weather", "parameters": {"city": "Par\\"}is"}}'
CASES: list[tuple[ToolStyle, str, str, Calls]] = [
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", "", [("f", '{"x": 1}')]),
    (
        HERMES,
        f"Let me see. \n<tool_call>{F}</tool_call>\n<tool_call>\n{G}",
        "Let me see.",
        [("f", '{"x": 1}'), ("get_weather", '{"city": "Par\\"}is"}')],
    ),
    (HERMES, f"<tool_call>{F}</tool_call> Done.", "Done.", [("f", '{"x": 1}')]),
    (HERMES, '<tool_call>{"arguments": {"a": {}}, "name": "g"}', "", [("g", '{"a": {}}')]),
    (HERMES, '<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    (HERMES, '<tool_call>{"name": "g", "arguments": null}', "", [("g", "{}")]),
    (HERMES, '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}', "", [("g", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "g", "arguments": {"a": [1', "", [("g", '{"a": [1')]),
    (HERMES, '<tool_call>{"id": 7, "name": "g", "arguments": {}}', "", [("g", "{}")]),
    (HERMES, "a <tool_call> b", "a <tool_call> b", []),
    (HERMES, "<tool_call>\n{oops}", "<tool_call>\n{oops}", []),
    (HERMES, '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    (HERMES, '<tool_call>{"name": "g"', "", [("g", "")]),
    (HERMES, '<tool_call>{"name": "', '<tool_call>{"name": "', []),
    (HERMES, "1 <tool", "1 <tool", []),
    (HERMES, F, F, []),
    (LLAMA3, G, "", [("get_weather", '{"city": "Par\\"}is"}')]),
    (
        LLAMA3,
        f"<|python_tag|>{G}; {F}",
        "",
        [("get_weather", '{"city": "Par\\"}is"}'), ("f", '{"x": 1}')],
    ),
    (LLAMA3, '{"name": "Ann", "parameters": {}}', '{"name": "Ann", "parameters": {}}', []),
    (LLAMA3, ' \n{"a": [1, {"name": "f"}]} x', ' \n{"a": [1, {"name": "f"}]} x', []),
    (LLAMA3, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA3, f"Here: {G}", f"Here: {G}", []),
    (
        MISTRAL,
        f"[TOOL_CALLS] [{F}, {G}]",
        "",
        [("f", '{"x": 1}'), ("get_weather", '{"city": "Par\\"}is"}')],
    ),
    (MISTRAL, f"Hm. [TOOL_CALLS][{F}]", "Hm.", [("f", '{"x": 1}')]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
    (MISTRAL, '[TOOL_CALLS]f{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"x": 1}'), ("g", "{}")]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"x": 1}', "", [("f", '{"x": 1}')]),
    (MISTRAL, "[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
    (MISTRAL, "[TOOL_CALLS] not a name! {}", "[TOOL_CALLS] not a name! {}", []),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), CASES, ids=lambda v: str(v)[:40])
def test_calls_are_found(style: ToolStyle, text: str, content: str, calls: Calls) -> None:
    """Every way in which the families write calls is read; what is no call stays text whole."""
    assert read(text, form(style)) == (content, "", calls)


CUT_CASES: list[tuple[ToolStyle, str, str, Calls]] = [
    (HERMES, "Hm. <tool_call>", "Hm.", []),
    (HERMES, '<tool_call>\n{"na', "", []),
    (HERMES, '<tool_call>\n{"name": "get_w', "", []),
    (HERMES, f'<tool_call>{F}</tool_call>\n<tool_call>\n{{"name"', "", [("f", '{"x": 1}')]),
    (HERMES, "a < b", "a < b", []),
    (LLAMA3, '<|python_tag|>{"name": "f', "", []),
    (LLAMA3, '{"name": "f', '{"name": "f', []),
    (MISTRAL, "[TOOL_CALLS]get_w", "", []),
    (MISTRAL, f'[TOOL_CALLS] [{F}, {{"name"', "", [("f", '{"x": 1}')]),
]


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"), CUT_CASES, ids=lambda v: str(v)[:40]
)
def test_calls_that_the_limit_cuts(style: ToolStyle, text: str, content: str, calls: Calls) -> None:
    """Turns red when the marks of a call that was cut before its name are shown to users."""
    assert simple(form(style).read(text, is_cut=True)) == (content, "", calls)


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[", "]"),
        *("<think>", "</think>", "<", "th", "\n", "  ", ";", ",", "f", "é", "{", "}", '"', "\\"),
        *(F, G, F[:20], G[20:], '{"name": "f", "arguments": "x"}', "text"),
    ]
)


@settings(deadline=None, max_examples=400)
@given(
    st.lists(PIECES, max_size=10).map("".join),
    st.lists(st.integers(1, 9), min_size=1),
    st.sampled_from([None, *STYLES.values()]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_pieces_do_not_matter(
    text: str,
    sizes: list[int],
    style: ToolStyle | None,
    single: bool,
    reasons: bool,
    inside: bool,
    is_cut: bool,
) -> None:
    """ST-13, ST-16: whatever pieces an answer comes in, what is found in it is the same."""
    output = form(style, single_call=single, reasoning=reasons, in_reasoning=reasons and inside)
    parser, parts, start, turn = OutputParser(output), [], 0, 0
    while start < len(text):
        size = sizes[turn % len(sizes)]
        parts += parser.push(text[start : start + size])
        start, turn = start + size, turn + 1
    parts += parser.finish(is_cut=is_cut)
    assert simple(assemble(parts)) == simple(output.read(text, is_cut=is_cut))


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=6),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=6,
    ),
    st.sampled_from(list(STYLES.values())),
)
def test_any_arguments_come_back(value: object, style: ToolStyle) -> None:
    """Arguments of any JSON, marks and quotes in strings included, are those that were written."""
    arguments = json.dumps({"v": value, "mark": "</tool_call>[TOOL_CALLS]"})
    call = f'{{"name": "f", "{style.arguments_key}": {arguments}}}'
    text = f"{style.mark}{'[' if style is MISTRAL else ''}{call}"
    assert read(text, form(style)) == ("", "", [("f", arguments)])


def test_text_without_calls_is_untouched() -> None:
    """Offering tools changes nothing about an answer that calls none, white space included."""
    for text in ("", " ", "a\n\n b \n", " <t", "x [TOOL_CAL", "[1]"):
        for style in STYLES.values():
            assert read(text, form(style)) == (text, "", [])


def test_only_one_call() -> None:
    """A client that wants no parallel calls gets the first, and nothing after it."""
    text = f"<tool_call>{F}</tool_call> and <tool_call>{G}</tool_call>"
    assert read(text, form(HERMES, single_call=True)) == ("", "", [("f", '{"x": 1}')])


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("<think>\na b \n</think>\n\nc ", False, "a b", "c "),
        ("\n<think></think>c", False, "", "c"),
        (" a </think> b", True, "a", "b"),
        ("never ends ", True, "never ends", ""),
        ("a </thin", True, "a </thin", ""),
        ("c <think>d</think>", False, "", "c <think>d</think>"),
        ("<think>a</think>b</think>c", False, "a", "b</think>c"),
        ("<thin", False, "", "<thin"),
        ("", True, "", ""),
    ],
)
def test_reasoning(text: str, inside: bool, reasoning: str, content: str) -> None:
    """What stands between the marks at an answer's beginning is reasoning, and nothing else."""
    output = OutputFormat(reasoning=True, in_reasoning=inside)
    assert read(text, output) == (content, reasoning, [])


def test_calls_in_reasoning_are_thoughts() -> None:
    """A call that the model only thinks about is not made."""
    text = f"<think><tool_call>{F}</tool_call></think><tool_call>{F}</tool_call>"
    output = form(HERMES, reasoning=True)
    assert read(text, output)[2] == [("f", '{"x": 1}')]


def test_ids() -> None:
    """Call ids differ, and are what Mistral's templates insist on: nine letters and digits."""
    ids = {HERMES.new_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(name.startswith("call_") for name in ids)
    assert all(len(name) == 9 and name.isalnum() for name in (MISTRAL.new_id() for _ in range(50)))


def test_styles_are_seen_in_templates() -> None:
    """The style is the one that the chat template shows, unless a flag names another."""
    assert style_of("... <tool_call> ... tools") is HERMES
    assert style_of("{%- if tools %}[AVAILABLE_TOOLS]...[TOOL_CALLS]") is MISTRAL
    assert style_of('<|start_header_id|>ipython ... {"name": ..., "parameters": ...}') is LLAMA3
    assert style_of("{% for tool in tools %}") is HERMES
    assert takes_tools("{% if tools %}")
    assert not takes_tools("{{ message.content }} toolset")
    assert style_named("llama3") is LLAMA3
    with pytest.raises(SettingError, match="hermes, llama3, mistral"):
        style_named("x")
