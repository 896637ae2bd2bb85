"""Following a grammar through the real scheduler and runner: masks, ends, limits, preemption."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.request import FinishReason
from octavo.core.structured import StructuredOutput
from octavo.models.tokenizer import Tokenizer
from support_engine import byte_tokenizer
from support_grammar import GREEDY, Setup, Taste, ask, ask_all, fits, grammar_setup
from support_text import sentencepiece

SO = StructuredOutput
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999},
        "continent": {"enum": ["Europe", "Asia", "Africa"]},
    },
    "required": ["name", "population", "continent"],
    "additionalProperties": False,
}
JUMPS = pytest.mark.parametrize("jump", [True, False], ids=["jump", "plain"])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The vocabulary of bytes."""
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def likes_whitespace(token: bytes) -> float:
    """The taste of a model that writes newlines and spaces whenever it may."""
    return 50.0 if token in (b"\n", b"\t", b"\r") else 40.0 if token == b" " else 0.0


def likes_newlines(token: bytes) -> float:
    """The taste of a model that writes newlines where it may, else what ends JSON."""
    return 50.0 if token in (b"\n", b"\t") else 10.0 if token in (b"}", b'"', b"1") else 0.0


def likes_letters(token: bytes) -> float:
    """The taste of a model that writes letters."""
    return 50.0 if len(token) == 1 and token.isascii() and token.isalpha() else 0.0


def likes_to_end(token: bytes) -> float:
    """The taste of a model that ends its turn whenever it may."""
    return 50.0 if token == b"<|im_end|>" else 0.0


def likes_to_go_on(token: bytes) -> float:
    """The taste of a model that never ends."""
    return -50.0 if token.startswith(b"<|") else 0.0


@JUMPS
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "integer", "maximum": 999}}},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
        {"properties": {"a": {"enum": ["x y", "z"]}, "b": {"type": "null"}}, "required": ["b"]}
        | {"type": "object", "additionalProperties": False},
        {"type": "object", "maxProperties": 0},
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_whitespace_has_no_loop(tokenizer: Tokenizer, schema: dict[str, Any], jump: bool) -> None:
    """CO-05: a model that loves whitespace gets one space after a colon or comma, none at the end
    of the text, and is stopped by the closing brace."""
    setup = grammar_setup(tokenizer, likes_whitespace, jump_forward=jump)
    schema = {"additionalProperties": False, **schema}
    answer = ask(setup.parts, SO.json_schema(schema), replace(GREEDY, max_tokens=200))
    assert answer.reason is STOP
    assert fits(schema, answer.text)
    assert answer.text == json.dumps(json.loads(answer.text))


@JUMPS
def test_newlines_have_no_loop_in_any_object(tokenizer: Tokenizer, jump: bool) -> None:
    """CO-05's neighbour: in json_object mode too there is no place for a newline."""
    setup = grammar_setup(tokenizer, likes_newlines, jump_forward=jump)
    answer = ask(setup.parts, SO.json_object(), replace(GREEDY, max_tokens=200))
    assert answer.reason is STOP
    assert isinstance(json.loads(answer.text), dict)


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "maximum": 9, "minimum": 0},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
LIST = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["next"],
            "additionalProperties": False,
        }
    },
}
TWICE = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/d"}, "b": {"$ref": "#/$defs/d"}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
INDEXED = {
    "type": "object",
    "properties": {
        "tree": {"properties": {"left": {"anyOf": [{"type": "null"}, {"const": 5}]}}},
        "copy": {"$ref": "#/properties/tree/properties/left/anyOf/0"},
        "one": {"$ref": "#/$defs/x~1y"},
        "two": {"$ref": "#/$defs/t~0u"},
        "three": {"$ref": "#/$defs/p%25q"},
        "four": {"$ref": "#anchored"},
    },
    "required": ["copy", "one", "two", "three", "four"],
    "additionalProperties": False,
    "$defs": {
        "x/y": {"const": 1},
        "t~u": {"const": 2},
        "p%q": {"const": 3},
        "z": {"$anchor": "anchored", "const": 4},
    },
}


@JUMPS
@pytest.mark.parametrize("schema", [TREE, LIST, TWICE, INDEXED, CITY])
def test_recursion_and_references(tokenizer: Tokenizer, schema: Any, jump: bool) -> None:
    """CO-07 and CO-08: recursive schemas, a definition used twice, references through array
    indices, escapes and anchors give valid JSON at any draw, or are cut as ``length``."""
    setup = grammar_setup(tokenizer, likes_to_go_on, jump_forward=jump)
    params = [replace(GREEDY, temperature=1.0, seed=seed, max_tokens=150) for seed in range(8)]
    answers = ask_all(setup.parts, [SO.json_schema(schema)] * 8, params)
    for answer in answers:
        assert answer.reason is LENGTH or fits(schema, answer.text), answer.text
        assert answer.reason in (STOP, LENGTH)
    assert any(answer.reason is STOP for answer in answers)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 10, 11, 12, 13, 30])
@JUMPS
def test_truncation_is_length(tokenizer: Tokenizer, max_tokens: int, jump: bool) -> None:
    """CO-13: an output that max_tokens cuts, in the middle of forced tokens too, ends as
    ``length`` with exactly so many tokens; nothing is invented to close it."""
    setup = grammar_setup(tokenizer, likes_letters, jump_forward=jump)
    answer = ask(setup.parts, SO.json_schema(CITY), replace(GREEDY, max_tokens=max_tokens))
    assert answer.reason is LENGTH
    assert len(answer.token_ids) == max_tokens
    assert len(answer.text) == max_tokens
    assert '{"name": "'.startswith(answer.text[:10])


@JUMPS
def test_a_full_context_is_length(tokenizer: Tokenizer, jump: bool) -> None:
    """CO-13: the end of the context cuts like max_tokens does."""
    setup = grammar_setup(tokenizer, likes_to_go_on, jump_forward=jump, max_model_len=40)
    answer = ask(setup.parts, SO.json_schema({"type": "string"}), replace(GREEDY, max_tokens=None))
    assert answer.reason is LENGTH
    assert len(answer.token_ids) == 32


@JUMPS
def test_a_text_that_is_complete_at_the_limit_stops(tokenizer: Tokenizer, jump: bool) -> None:
    """Turns red when an output whose last allowed token completes it is called cut."""
    setup = grammar_setup(tokenizer, jump_forward=jump)
    for max_tokens, reason in ((3, LENGTH), (4, STOP), (5, STOP)):
        answer = ask(setup.parts, SO.choice(["four"]), replace(GREEDY, max_tokens=max_tokens))
        assert (answer.text, answer.reason) == ("four"[:max_tokens], reason)


@JUMPS
@pytest.mark.parametrize(
    ("pattern", "taste", "expected"),
    [
        ("[a-z]{3,20}", likes_to_end, "[a-z]{3}"),
        ("[a-z]{3,20}", likes_to_go_on, "[a-z]{20}"),
        ("(yes|yes, please)", likes_to_end, "yes"),
        ("(yes|yes, please)", likes_to_go_on, "yes, please"),
        ("a?", likes_to_end, ""),
        ("", None, ""),
    ],
)
def test_a_turn_ends_only_where_the_grammar_may(
    tokenizer: Tokenizer, pattern: str, taste: Taste | None, expected: str, jump: bool
) -> None:
    """Turns red when an end-of-turn token comes too early, cannot come, or is asked for where
    nothing else may follow; its text is never part of the answer."""
    setup = grammar_setup(tokenizer, taste, jump_forward=jump)
    answer = ask(setup.parts, SO.regex(pattern))
    assert re.fullmatch(expected, answer.text)
    assert answer.reason is STOP


@JUMPS
@pytest.mark.parametrize("ignore_eos", [True, False])
def test_min_tokens_and_ignore_eos(tokenizer: Tokenizer, ignore_eos: bool, jump: bool) -> None:
    """Both keep the turn open while the grammar has more to say, and yield where it has not."""
    setup = grammar_setup(tokenizer, likes_to_end, jump_forward=jump)
    params = replace(GREEDY, min_tokens=6, ignore_eos=ignore_eos)
    longer = ask(setup.parts, SO.regex("[a-z]{3,20}"), params)
    assert len(longer.text) == (20 if ignore_eos else 6)
    shorter = ask(setup.parts, SO.regex("[a-z]{3}"), params)
    assert len(shorter.text) == 3
    optional = ask(setup.parts, SO.regex("a|b"), params)
    assert optional.text in ("a", "b")
    assert {longer.reason, shorter.reason, optional.reason} == {STOP}


@JUMPS
def test_stop_strings_and_stop_ids(tokenizer: Tokenizer, jump: bool) -> None:
    """Stop strings and ids end the text as ever, even among forced tokens."""
    setup = grammar_setup(tokenizer, likes_to_go_on, jump_forward=jump)
    shape = SO.choice(["a long text that is forced"])
    cut = ask(setup.parts, shape, replace(GREEDY, stop=("text",)))
    assert (cut.text, cut.reason) == ("a long ", STOP)
    assert len(cut.token_ids) == len("a long text")
    kept = ask(setup.parts, shape, replace(GREEDY, stop=("x",), include_stop_str_in_output=True))
    assert kept.text == "a long tex"
    by_id = ask(setup.parts, shape, replace(GREEDY, stop_token_ids=(ord("x"),)))
    assert (by_id.text, by_id.reason) == ("a long te", STOP)
    late = ask(setup.parts, shape, replace(GREEDY, stop=("text",), min_tokens=20))
    assert late.text == "a long text that is forced"


@JUMPS
def test_bias_chooses_among_what_is_allowed(tokenizer: Tokenizer, jump: bool) -> None:
    """Turns red when logit_bias breaks a grammar, or the grammar makes it lose its effect."""
    setup = grammar_setup(tokenizer, jump_forward=jump)
    for wanted in "xyz":
        bias = {ord(wanted): 100.0, ord("!"): 100.0}
        answer = ask(setup.parts, SO.choice(["x1", "y2", "z3"]), replace(GREEDY, logit_bias=bias))
        assert answer.text[0] == wanted
    banned = dict.fromkeys(map(ord, "xy"), -100.0)
    answer = ask(setup.parts, SO.choice(["x1", "y2", "z3"]), replace(GREEDY, logit_bias=banned))
    assert answer.text == "z3"


@JUMPS
def test_a_row_without_a_token_fails_alone(tokenizer: Tokenizer, jump: bool) -> None:
    """Turns red when a request that bans all its grammar allows hurts its batch, or goes on."""
    setup = grammar_setup(tokenizer, jump_forward=jump)
    shapes = [SO.choice(["x1", "y2"]), SO.choice(["x1", "y2"]), None]
    banned = dict.fromkeys(map(ord, "xy"), -100.0)
    params = [replace(GREEDY, logit_bias=banned), GREEDY, replace(GREEDY, max_tokens=5)]
    failed, other, free = ask_all(setup.parts, shapes, params)
    assert failed.reason is ERROR
    assert "banned" in str(failed.error)
    assert isinstance(failed.error, InvalidRequestError)
    assert other.text in ("x1", "y2")
    assert len(free.token_ids) == 5


def test_a_grammar_that_gets_too_costly_fails_alone(tokenizer: Tokenizer) -> None:
    """Turns red when a grammar may cost without bound, or its end takes others along."""
    setup = grammar_setup(tokenizer, lambda t: 50.0 if t == b'"' else 0.0)
    late = {"type": "object", "anyOf": [{"properties": {f"a{i}": {}}} for i in range(500)]}
    array = {"type": "array", "minItems": 2, "items": False}
    schema = {**array, "prefixItems": [{"enum": [1, 2]}, late]}
    costly, other = ask_all(setup.parts, [SO.json_schema(schema), SO.choice(["fine"])])
    assert costly.reason is ERROR
    assert "cannot be followed further" in str(costly.error)
    assert isinstance(costly.error, InvalidRequestError)
    assert (other.text, other.reason) == ("fine", STOP)


@JUMPS
def test_free_and_constrained_requests_share_a_batch(tokenizer: Tokenizer, jump: bool) -> None:
    """Turns red when a mask lands on another row: neighbours change nobody's answer."""
    shapes = [None, SO.json_schema(CITY), None, SO.regex("[0-9]{5}"), SO.json_object(), None]
    params = [
        replace(GREEDY, temperature=t, seed=seed, max_tokens=40, frequency_penalty=p)
        for seed, (t, p) in enumerate([(0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0, 0)])
    ]
    together = ask_all(grammar_setup(tokenizer, jump_forward=jump).parts, shapes, params)
    alone = grammar_setup(tokenizer, jump_forward=jump)
    for shape, param, answer in zip(shapes, params, together, strict=True):
        assert ask(alone.parts, shape, param).token_ids == answer.token_ids


def small_pool(tokenizer: Tokenizer, jump: bool) -> Setup:
    """Return an engine that must preempt when eight requests run."""
    return grammar_setup(
        tokenizer,
        likes_to_go_on,
        jump_forward=jump,
        num_blocks=24,
        max_model_len=80,
        max_num_batched_tokens=16,
    )


@JUMPS
def test_preemption_changes_nothing(tokenizer: Tokenizer, jump: bool) -> None:
    """Turns red when a preempted sequence comes back at another place in its grammar."""
    shapes = [SO.json_schema(CITY), SO.choice(["z" * 60]), SO.regex("[a-z ]{50}"), None] * 2
    params = [replace(GREEDY, temperature=1.0, seed=i, max_tokens=70) for i in range(8)]
    crowded = small_pool(tokenizer, jump)
    answers = ask_all(crowded.parts, shapes, params)
    assert crowded.parts.core.stats().preemptions_total > 0
    roomy = grammar_setup(tokenizer, likes_to_go_on, jump_forward=jump)
    assert [a.token_ids for a in answers] == [
        a.token_ids for a in ask_all(roomy.parts, shapes, params)
    ]
    assert all(fits(CITY, answers[i].text) for i in (0, 4))


def test_nothing_is_left_behind(tokenizer: Tokenizer) -> None:
    """Turns red when finished or aborted sequences keep their grammars in the runner."""
    setup = grammar_setup(tokenizer, likes_to_go_on)
    ask_all(setup.parts, [SO.json_schema(CITY), SO.choice(["a"])])
    request = setup.parts.requests.build(
        [1, 2], replace(GREEDY, structured_output=SO.json_object()), request_id="aborted"
    )
    held = setup.compiler.compile(SO.json_object())
    setup.parts.core.add(request)
    setup.parts.core.step()
    assert len(setup.rows) == 1
    setup.parts.core.abort(request.request_id)
    ask(setup.parts, None, replace(GREEDY, max_tokens=2))
    assert len(setup.rows) == 0
    assert held is setup.compiler.find(SO.json_object())


def test_sentencepiece_vocabularies() -> None:
    """CO-11: with a SentencePiece vocabulary the mask knows bytes, not marks: a space can be
    written, control tokens cannot, and every path ends within max_tokens."""
    tokenizer = sentencepiece()
    pair = {"type": "object", "properties": {"the": {"type": "string"}, "hello": {"enum": ["he!"]}}}
    pair |= {"required": ["the", "hello"], "additionalProperties": False}
    for jump in (True, False):
        setup = grammar_setup(tokenizer, jump_forward=jump)
        params = [replace(GREEDY, temperature=1.0, seed=i, max_tokens=40) for i in range(6)]
        words = ask_all(setup.parts, [SO.regex("[a-z]+ [a-z]+")] * 6, params, prompt=[270])
        objects = ask_all(setup.parts, [SO.json_schema(pair)] * 6, params, prompt=[270])
        assert any(" " in answer.text for answer in words)
        for answer in words:
            pattern = "[a-z]+ [a-z]+" if answer.reason is STOP else "[a-z]+ ?[a-z]*"
            assert re.fullmatch(pattern, answer.text)
        for answer in (*words, *objects):
            assert len(answer.token_ids) <= 40
            ends = tokenizer.end_token_ids
            assert not tokenizer.special_token_ids.difference(ends) & {*answer.token_ids}
        assert all(fits(pair, a.text) for a in objects if a.reason is STOP)
        assert all(a.text.startswith('{"the": "'[: len(a.text)]) for a in objects)


def test_structural_tags(tokenizer: Tokenizer) -> None:
    """Turns red when text outside of tags is constrained, or a begun tag is not."""
    tags = {
        "structures": [{"begin": "<f=a>", "schema": CITY, "end": "</f>"}],
        "triggers": ["<f="],
    }
    setup = grammar_setup(tokenizer, lambda t: 9.0 if t in b"<f=" else 0.0, max_model_len=300)
    params = [replace(GREEDY, temperature=1.2, seed=i, max_tokens=250) for i in range(8)]
    answers = ask_all(setup.parts, [SO.structural_tag(tags)] * 8, params)
    found = [re.findall(r"<f=(.*?)(?:</f>|$)", answer.text, re.DOTALL) for answer in answers]
    bodies = [body for bodies in found for body in bodies[:-1]]
    assert bodies
    for body in bodies:
        assert body.startswith("a>")
        assert fits(CITY, body[2:])
    assert any(not answer.text.startswith("<f=") for answer in answers)
