"""Compiling: what is refused, with which words, and what one bad grammar does to others."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import StructuredOutput
from octavo.runner.grammar import GrammarCompiler, reason
from octavo.runner.grammar_source import MAX_GRAMMAR_CHARS, MAX_JSON_CHARS
from octavo.runner.schema_limits import (
    MAX_ALTERNATIVES,
    MAX_ENUM_PARTS,
    MAX_JOINED_PATTERNS,
    MAX_MULTIPLE,
    MAX_OPTIONAL_PROPERTIES,
    MAX_PATTERN_CHARS,
    MAX_PATTERN_PROPERTIES,
    MAX_PROPERTIES,
    MAX_RANGES,
)
from support_grammar import byte_compiler

SO = StructuredOutput


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler for the vocabulary of bytes."""
    return byte_compiler(tmp_path_factory.mktemp("bytes"))


def refusal(compiler: GrammarCompiler, spec: StructuredOutput) -> str:
    """Assert that ``spec`` is refused in one short sentence about its field; return it."""
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(spec)
    error = caught.value
    assert error.status == 400
    assert error.param == spec.param
    assert error.message.startswith(spec.param)
    assert error.message.endswith(".")
    assert "\n" not in error.message
    assert len(error.message) < 500
    return error.message


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("[", "unclosed character class"),
        ("(", "unclosed group"),
        ("*", "repetition operator missing expression"),
        ("(?<=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        ("a(?=b)", "look-around"),
        ("a(?!b)", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\bfoo", "lookarounds"),
        ("a{5,2}", "invalid repetition count range"),
        (r"\p{Foo}", "Unicode property not found"),
        ("(a+)+$" * 1000, "lookarounds"),
        ("a" * (MAX_PATTERN_CHARS + 1), "at most"),
        ("a" * 100_000, "at most"),
        ("(a|b)*" * 20_000, "at most"),
    ],
    ids=lambda value: value[:20],
)
def test_bad_patterns(compiler: GrammarCompiler, pattern: str, why: str) -> None:
    """CO-01: a pattern that is wrong, not supported or too long is refused with the reason, as a
    regex and inside a schema; nothing is approximated."""
    assert why in refusal(compiler, SO.regex(pattern))
    assert why in refusal(compiler, SO.json_schema({"type": "string", "pattern": pattern}))
    nested = {"type": "array", "items": {"anyOf": [{"type": "string", "pattern": pattern}]}}
    assert why in refusal(compiler, SO.json_schema(nested))


@pytest.mark.parametrize("bad", ['start: "a"\nstart: "b"', "start: foo", "{{{", "", "start: start"])
def test_good_after_bad(compiler: GrammarCompiler, bad: str) -> None:
    """CO-02: a malformed grammar is refused, whatever came before, and spoils nothing after."""
    for round_ in range(3):
        good = f'start: "a" | start "b{round_}"'
        compiler.compile(SO.grammar(good))
        refusal(compiler, SO.grammar(bad))
        compiler.compile(SO.grammar(good + "\n"))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ([], "must be a JSON schema"),
        ('"x"', "must be a JSON schema"),
        ("5", "must be a JSON schema"),
        ("null", "must be a JSON schema"),
        ("", "not valid JSON"),
        ('{"type": "string"', "not valid JSON"),
        ({"type": "foo"}, "Invalid type: foo"),
        ({"type": []}, ""),
        ({"type": 5}, ""),
        ({"properties": 5}, "properties must be an object"),
        ({"properties": {"a": 5}}, ""),
        ({"items": 5}, ""),
        ({"required": "a"}, ""),
        ({"enum": []}, "Unsatisfiable"),
        ({"enum": 5}, ""),
        ({"anyOf": []}, ""),
        ({"$ref": "#/missing"}, "does not exist"),
        ({"$ref": "#nowhere"}, ""),
        ({"$ref": 5}, ""),
        ({"$ref": "http://localhost:9/schema.json"}, "not fetch"),
        ({"$ref": "file:///etc/hostname"}, ""),
        (False, "false"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a'"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible"),
        ({"type": "integer", "minimum": 5, "maximum": 4}, ""),
        ({"type": "array", "minItems": 3, "maxItems": 2}, ""),
        ({"type": "array", "items": False, "minItems": 1}, ""),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "made-up"}, "made-up"),
        ({"x-guidance": {"lenient": True}, "not": {"type": "string"}}, "not"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_schemas(compiler: GrammarCompiler, schema: Any, why: str) -> None:
    """CO-04: what is no schema, allows nothing, or cannot be enforced is refused by its reason; no
    remote reference is fetched, and no option of the schema makes the server ignore a keyword."""
    assert why in refusal(compiler, SO.json_schema(schema))


def nested(depth: int) -> str:
    """Return a schema of objects in objects, as text: no encoder has to go so deep."""
    return '{"properties":{"a":' * depth + "{}" + "}}" * depth


@pytest.mark.parametrize("depth", [200, 1_000, 10_000])
def test_deep_schemas(compiler: GrammarCompiler, depth: int) -> None:
    """CO-04: depth is refused by a limit, not by the interpreter's stack."""
    assert "nested too deeply" in refusal(compiler, SO.json_schema(nested(depth)))
    refusal(compiler, SO.json_schema("[" * depth))


@pytest.mark.parametrize("schema", [True, {}, {"type": "object"}, json.loads(nested(40))], ids=str)
def test_legal_schemas(compiler: GrammarCompiler, schema: Any) -> None:
    """CO-04: true and {} allow any JSON; usual depths are possible."""
    compiler.compile(SO.json_schema(schema))


@pytest.mark.parametrize(
    "choices", ["[]", "{}", '"a"', "[1]", '["a", null]', "5"], ids=lambda c: c or "nothing"
)
def test_bad_choices(compiler: GrammarCompiler, choices: str) -> None:
    """CO-01's neighbour: a list of choices has at least one text and nothing else."""
    spec = SO.choice(["a"])
    object.__setattr__(spec, "text", choices)
    assert "non-empty list of texts" in refusal(compiler, spec)


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {"structures": [], "triggers": ["<f"]},
        {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": []},
        {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["<g"]},
        {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": [""]},
        {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": [5]},
        {"structures": [{"begin": "<f>", "schema": {}}], "triggers": ["<f"]},
        {"structures": [{"begin": "<f>", "schema": [], "end": ""}], "triggers": ["<f"]},
        {"structures": [{"begin": "<f>", "end": ""}], "triggers": ["<f"]},
        {"structures": [{"begin": 5, "schema": {}, "end": ""}], "triggers": ["<f"]},
        {"structures": [5], "triggers": ["<f"]},
        {"structures": [{"begin": "<f>", "schema": {"not": {}}, "end": ""}], "triggers": ["<f"]},
    ],
    ids=lambda tags: str(tags)[:80],
)
def test_bad_tags(compiler: GrammarCompiler, tags: dict[str, Any]) -> None:
    """CO-04's neighbour: a tag needs its parts, a trigger that starts it and a usable schema."""
    refusal(compiler, SO.structural_tag(tags))


def test_sizes(compiler: GrammarCompiler) -> None:
    """Turns red when something that takes minutes to compile is tried: sizes have limits."""
    refusal(compiler, SO.json_schema({"const": "a" * MAX_JSON_CHARS}))
    refusal(compiler, SO.choice(["a" * MAX_JSON_CHARS]))
    refusal(compiler, SO.grammar("start: /a/ //" + "a" * MAX_GRAMMAR_CHARS))
    half = "a" * (MAX_PATTERN_CHARS // 2 + 1)
    refusal(compiler, SO.json_schema({"items": {"pattern": half}, "not": {"pattern": half}}))
    refusal(compiler, SO.json_schema({"patternProperties": {half * 2: {}}}))
    optional = {f"k{i}": {} for i in range(MAX_OPTIONAL_PROPERTIES + 1)}
    refusal(compiler, SO.json_schema({"anyOf": [{"properties": optional}]}))
    half = {f"k{i}": {} for i in range(MAX_OPTIONAL_PROPERTIES // 2 + 1)}
    refusal(compiler, SO.json_schema({"prefixItems": [{"properties": half}] * 4}))
    compiler.compile(SO.json_schema({"prefixItems": [{"properties": half}] * 3}))
    names = [f"k{i}" for i in range(MAX_PROPERTIES + 1)]
    all_needed = {"properties": dict.fromkeys(names, True), "required": names}
    refusal(compiler, SO.json_schema({"items": all_needed}))


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "integer", "multipleOf": MAX_MULTIPLE + 1}, "multiples"),
        ({"type": "number", "multipleOf": 0.1234567}, "multiples"),
        ({"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83)]}, "multiples"),
        (
            {
                "$defs": {"a": {"type": "integer", "multipleOf": 199}},
                "items": {"$ref": "#/$defs/a", "multipleOf": 211},
            },
            "multiples",
        ),
        ({"anyOf": [{"multipleOf": 251}, {"multipleOf": 3}], "multipleOf": 241}, "multiples"),
        ({"multipleOf": 1e-30, "anyOf": [{"multipleOf": 7}]}, "multiples"),
        (
            {"patternProperties": {f"^a{i}_": {} for i in range(MAX_PATTERN_PROPERTIES + 1)}},
            "pattern properties",
        ),
        ({"anyOf": [{"const": i} for i in range(MAX_ALTERNATIVES + 1)]}, "entries of anyOf"),
        ({"oneOf": [{"const": i} for i in range(MAX_ALTERNATIVES + 1)]}, "entries of anyOf"),
        (
            {"prefixItems": [{"type": "number", "minimum": i} for i in range(MAX_RANGES + 1)]},
            "numbers with bounds",
        ),
        ({"enum": [{"a": i} for i in range(MAX_ENUM_PARTS + 1)]}, "inside of constants"),
        ({"const": [[0] * (MAX_ENUM_PARTS + 1)]}, "inside of constants"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_costs(compiler: GrammarCompiler, schema: dict[str, Any], why: str) -> None:
    """The adversarial set: what llguidance would take seconds for is counted before, in a schema
    and in one of several that are given together."""
    assert why in refusal(compiler, SO.json_schema(schema))
    lark = f"start: %json {json.dumps(schema)}"
    if len(lark) <= MAX_GRAMMAR_CHARS:
        assert why in refusal(compiler, SO.grammar(lark))
    tag = {"begin": "<f>", "schema": schema, "end": ""}
    tags = {"structures": [{**tag, "schema": {}}, tag], "triggers": ["<f"]}
    assert why in refusal(compiler, SO.structural_tag(tags))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": MAX_MULTIPLE},
        {"type": "number", "multipleOf": 0.01, "minimum": 0},
        {"prefixItems": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83)]},
        {"allOf": [{"multipleOf": 4}, {"type": "integer", "multipleOf": 6}]},
    ],
    ids=str,
)
def test_usual_multiples(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    """Turns red when the limits refuse what costs little: multiples of separate numbers, money."""
    compiler.compile(SO.json_schema(schema))


def alternatives(number: int, width: int = 2) -> list[dict[str, Any]]:
    """Return parts which, joined, make ``width`` to the power of ``number`` alternatives."""
    return [
        {"anyOf": [{"type": "object", "properties": {f"a{i}_{j}": {}}} for j in range(width)]}
        for i in range(number)
    ]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": alternatives(9)},
        {"items": {"allOf": alternatives(3, 9)}},
        {
            "$defs": {f"p{i}": part for i, part in enumerate(alternatives(9))},
            "properties": {"a": {"allOf": [{"$ref": f"#/$defs/p{i}"} for i in range(9)]}},
        },
        {
            "$defs": {f"p{i}": {**p, "$anchor": f"x{i}"} for i, p in enumerate(alternatives(9))},
            "allOf": [{"$ref": f"#x{i}"} for i in range(9)],
        },
    ],
    ids=["allOf", "items", "references", "anchors"],
)
def test_alternatives_that_are_joined(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    """The adversarial set: parts with alternatives, whose number doubles with each that is joined,
    are counted before."""
    assert "alternatives together" in refusal(compiler, SO.json_schema(schema))


def test_alternatives_that_are_not_joined(compiler: GrammarCompiler) -> None:
    """Turns red when alternatives side by side are multiplied."""
    compiler.compile(SO.json_schema({"prefixItems": alternatives(20)}))
    compiler.compile(SO.json_schema({"anyOf": alternatives(9, 3)}))
    compiler.compile(SO.json_schema({"allOf": alternatives(3)}))


def test_one_of(compiler: GrammarCompiler) -> None:
    """oneOf is followed where no value fits two branches; elsewhere the refusal says what helps."""
    kinds = [
        {"type": "object", "properties": {"kind": {"const": c}}, "required": ["kind"]} for c in "ab"
    ]
    compiler.compile(SO.json_schema({"oneOf": kinds}))
    compiler.compile(SO.json_schema({"oneOf": [{"type": "string"}, {"type": "null"}]}))
    overlap = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    assert "use anyOf" in refusal(compiler, SO.json_schema(overlap))


def joined(number: int) -> list[dict[str, Any]]:
    """Return patterns whose intersection costs twice as much with each more."""
    return [{"type": "string", "pattern": f"a{{{i}}}"} for i in range(number)]


def inner_resource(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema whose pointers mean something else than they would at the root."""
    names = {f"p{i}": part for i, part in enumerate(parts)}
    inner = {"$id": "http://test/inner", "$defs": names}
    inner["allOf"] = [{"$ref": f"#/$defs/{name}"} for name in names]
    return {"$defs": {"inner": inner, **dict.fromkeys(names, True)}, "$ref": "http://test/inner"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda parts: {"allOf": parts}, id="allOf"),
        pytest.param(
            lambda parts: {"allOf": [{"properties": {"a": part}} for part in parts]},
            id="one property",
        ),
        pytest.param(
            lambda parts: {
                "definitions": {"a/b ü": {"anyOf": [True, {"allOf": parts[1:]}]}, "c": parts[0]},
                "items": {
                    "allOf": [{"$ref": "#/definitions/a~1b%20%C3%BC"}, {"$ref": "#/definitions/c"}]
                },
            },
            id="references",
        ),
        pytest.param(
            lambda parts: {
                "$defs": {
                    f"p{i}": {**part, "$ref": f"#/$defs/p{i + 1}"} for i, part in enumerate(parts)
                }
                | {f"p{len(parts)}": {}},
                "$ref": "#/$defs/p0",
            },
            id="chain",
        ),
        pytest.param(
            lambda parts: {
                "$defs": {f"p{i}": {"$anchor": f"x{i}", **p} for i, p in enumerate(parts)},
                "allOf": [{"$ref": f"#x{i}"} for i in range(len(parts))],
            },
            id="anchors",
        ),
        pytest.param(inner_resource, id="inner resource"),
    ],
)
def test_patterns_that_meet(
    compiler: GrammarCompiler, make: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> None:
    """The adversarial set: some dozen patterns for one text would take a thread for hours, so they
    are counted before, wherever they hide; in grammars too."""
    schema = make(joined(MAX_JOINED_PATTERNS + 1))
    assert "match at once" in refusal(compiler, SO.json_schema(schema))
    assert "match at once" in refusal(compiler, SO.grammar(f"start: %json {json.dumps(schema)}"))


def test_patterns_that_do_not_meet(compiler: GrammarCompiler) -> None:
    """Turns red when patterns of different values are counted together, or recursion is."""
    node = {
        "type": "object",
        "properties": {f"k{i}": {"pattern": f"^a{i}$"} for i in range(MAX_JOINED_PATTERNS + 1)},
        "required": [f"k{i}" for i in range(MAX_JOINED_PATTERNS + 1)],
    }
    node["properties"] |= {"next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}}
    compiler.compile(SO.json_schema({"$defs": {"node": node}, "$ref": "#/$defs/node"}))
    compiler.compile(SO.json_schema({"anyOf": joined(MAX_JOINED_PATTERNS + 1)[1:]}))
    compiler.compile(SO.grammar('start: "' + "&" * 50 + '" /&{50}/'))
    terminals = " & ".join(f"/(.|\\n)*a{{{i}}}/" for i in range(MAX_JOINED_PATTERNS + 1))
    assert "match at once" in refusal(compiler, SO.grammar(f"start: T\nT: {terminals}"))


RECURSION = {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}
ENDLESS = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
    },
}


def test_what_has_no_end(compiler: GrammarCompiler) -> None:
    """The adversarial set: a schema that only an endless text fits is refused, not begun."""
    assert "no end" in refusal(compiler, SO.json_schema(ENDLESS))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: SO.json_schema(RECURSION), id="recursion without base"),
        pytest.param(lambda: SO.json_schema(ENDLESS), id="objects without end"),
        pytest.param(
            lambda: SO.json_schema({"enum": [f"value {i}" for i in range(10_000)]}), id="enum"
        ),
        pytest.param(
            lambda: SO.json_schema({"enum": [f"日本 {i} é😀\u0000" for i in range(10_000)]}),
            id="unicode enum",
        ),
        pytest.param(lambda: SO.choice([f"é {i}" for i in range(10_000)]), id="choices"),
        pytest.param(lambda: SO.json_schema(json.loads(nested(60))), id="deep nesting"),
        pytest.param(lambda: SO.regex("(a|b)*" * 2_700), id="huge pattern"),
        pytest.param(lambda: SO.regex("(x{1,1000}){1,1000}"), id="nested repetition"),
        pytest.param(lambda: SO.regex("(.|\n)*a(.|\n){50}b"), id="exponential states"),
        pytest.param(lambda: SO.regex(".{0,5000}x.{0,5000}"), id="two long runs"),
        pytest.param(lambda: SO.regex("[ \\n\\t]*"), id="endless whitespace"),
        pytest.param(lambda: SO.grammar('start: x\nx: x x | "a"'), id="ambiguous"),
        pytest.param(
            lambda: SO.json_schema({"properties": {f"k{i}": {} for i in range(1000)}}),
            id="optional properties",
        ),
        pytest.param(
            lambda: SO.json_schema({"anyOf": [{"properties": {f"a{i}": {}}} for i in range(500)]}),
            id="many alternatives",
        ),
        pytest.param(
            lambda: SO.json_schema({"type": "array", "items": {}, "maxItems": 100_000}), id="items"
        ),
    ],
)
def test_adversarial(compiler: GrammarCompiler, make: Callable[[], StructuredOutput]) -> None:
    """The adversarial set: refused in a sentence, or followed for some tokens within the limits."""
    spec = make()
    try:
        matcher = compiler.compile(spec).new_matcher()
    except InvalidRequestError:
        refusal(compiler, spec)
        return
    for _ in range(20):
        if matcher.is_stopped():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        if matcher.is_error():
            break
        assert len(allowed)
        if not matcher.consume_token(int(allowed[-1])):
            break
    if matcher.is_error():
        assert re.search("limit|too many|max is", matcher.get_error())


def test_equal_specifications_share_a_grammar(compiler: GrammarCompiler) -> None:
    """Turns red when the cache misses what it has, or mixes up kinds and key orders."""
    first = compiler.compile(SO.json_schema({"properties": {"a": {}, "b": {}}}))
    again = SO.json_schema({"properties": {"a": {}, "b": {}}}, param="response_format")
    assert compiler.compile(again) is first
    assert compiler.compile(SO.json_schema({"properties": {"b": {}, "a": {}}})) is not first
    assert compiler.compile(SO.regex("a")) is not compiler.compile(SO.grammar("start: /a/"))
    assert compiler.find(SO.regex("never compiled")) is None


def test_the_cache_is_bounded_but_keeps_what_is_held(tmp_path: Path) -> None:
    """Turns red when the cache grows without end, or forgets the grammar of a live request."""
    bounded = GrammarCompiler(byte_compiler(tmp_path)._vocabulary, num_cached=4)
    held = bounded.compile(SO.regex("held"))
    for i in range(10):
        bounded.compile(SO.regex(f"x{i}"))
    assert bounded.find(SO.regex("held")) is held
    assert bounded.find(SO.regex("x0")) is None
    assert bounded.find(SO.regex("x9")) is not None


def test_threads_may_compile_and_copy_at_once(compiler: GrammarCompiler) -> None:
    """Turns red when compiling or copying from several threads fails or mixes up grammars."""
    barrier = threading.Barrier(4)

    def work(index: int) -> Iterator[int]:
        barrier.wait()
        texts = []
        for i in range(50):
            matcher = compiler.compile(SO.regex(f"{'ab'[i % 2]}{i % 5}")).new_matcher()
            texts.append(matcher.try_consume_tokens(list(f"{'ab'[i % 2]}{i % 5}".encode())))
        return iter(texts)

    with ThreadPoolExecutor(4) as pool:
        assert all(count == 2 for counts in pool.map(work, range(4)) for count in counts)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('at 1(8): unknown name: "foo"\n   1 | start: foo\n     ^\n', 'unknown name: "foo"'),
        ("regex parse error:\n    [\n    ^\nerror: unclosed", "unclosed"),
        ("NoExtensionBias\n<non-verbose/>", "it matches no text"),
        ("too big.", "too big"),
        ("x" * 1000, "x" * 299 + "…"),
        ("", "unknown error"),
    ],
    ids=lambda text: text[:20],
)
def test_reasons(message: str, said: str) -> None:
    """Turns red when a client is shown marks and source lines in place of the reason."""
    assert reason(message) == said
