"""Forced texts: bounded by what a grammar may force at once, and appended in pieces."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.runner.forced_text import MAX_FORCED_BYTES, SHORT, forces_much, pattern_forces
from octavo.runner.grammar import MAX_ENCODED_CHARS, GrammarCompiler
from octavo.runner.grammar_rows import MAX_FORCED, GrammarRow
from octavo.runner.grammar_source import NO_FORCING, grammar_text
from support_engine import byte_tokenizer
from support_grammar import GREEDY, ask, byte_compiler, grammar_setup, vocabulary

SO = StructuredOutput
LONG = {"const": "x" * (MAX_FORCED_BYTES // 10)}


@pytest.mark.parametrize(
    ("schema", "times", "much"),
    [
        ({}, 1, False),
        (LONG, 1, False),
        (LONG, 16, True),
        ({"const": "é" * (MAX_FORCED_BYTES // 2 + 1)}, 1, True),
        ({"enum": [1, "x" * (MAX_FORCED_BYTES + 1)]}, 1, True),
        ({"properties": {"k" * (MAX_FORCED_BYTES + 1): {}}}, 1, True),
        ({"required": ["k" * (MAX_FORCED_BYTES + 1)]}, 1, True),
        ({"pattern": "^(xyz){20000}$"}, 1, True),
        ({"pattern": "^(x{300}){300}$"}, 1, True),
        ({"pattern": "^x{1,20000}$"}, 1, False),
        ({"prefixItems": [LONG] * 9}, 1, False),
        ({"prefixItems": [LONG] * 11}, 1, True),
        ({"items": LONG, "minItems": 11}, 1, True),
        ({"items": LONG, "maxItems": 11}, 1, False),
        ({"properties": {f"k{i}": LONG for i in range(11)}}, 1, True),
        ({"allOf": [{"properties": {f"k{i}": LONG}} for i in range(11)]}, 1, True),
        ({"anyOf": [LONG] * 20}, 1, False),
        ({"$defs": {"a": LONG}, "prefixItems": [{"$ref": "#/$defs/a"}] * 11}, 1, True),
        ({"$defs": {"a": {**LONG, "$anchor": "a"}}, "$ref": "#a"}, 1, True),
        ({"properties": {"next": {"$ref": "#"}, "text": LONG}}, 1, True),
        ({"properties": {"next": {"$ref": "#"}, "k" * (SHORT - 2): {}}}, 1, False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bounds(schema: dict[str, Any], times: int, much: bool) -> None:
    """Turns red when a long text hides: in repetition, references, recursion, keys or patterns; or
    when usual schemas lose their jumps."""
    assert forces_much([{}, schema], times) is much


def test_patterns() -> None:
    """Turns red when repetitions are not multiplied."""
    assert pattern_forces("abc") == 3
    assert pattern_forces("(a{20}){30,}") == 12 * 600
    assert pattern_forces("a{0,9}") == 6


@pytest.mark.parametrize(
    ("spec", "looks_ahead"),
    [
        (SO.json_schema({"const": "short"}), True),
        (SO.json_schema({"const": "x" * 40_000}), False),
        (SO.choice(["a", "b"]), True),
        (SO.choice(["a" * 40_000, "b"]), False),
        (SO.grammar('start: ("ab")+'), True),
        (SO.grammar("start: x{300}\nx: /a{400}/"), False),
        (SO.grammar('start: x{300}\nx: "' + "a" * 400 + '"'), False),
        (SO.grammar("start: x{300}\nx: %json " + json.dumps({"const": "a" * 400})), False),
        (SO.grammar("start: x{300}\nx: %json " + json.dumps({"const": "a" * 40})), True),
        (
            SO.structural_tag(
                {
                    "structures": [{"begin": "<f>", "schema": {"const": "a" * 40_000}, "end": ""}],
                    "triggers": ["<f"],
                }
            ),
            False,
        ),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, StructuredOutput) else "",
)
def test_who_is_looked_ahead_for(spec: StructuredOutput, looks_ahead: bool) -> None:
    """Turns red when a kind of grammar forgets the bound."""
    text = grammar_text(spec, frozenset())
    assert (not text.startswith(NO_FORCING)) is looks_ahead


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A compiler for the vocabulary of bytes."""
    return byte_compiler(tmp_path_factory.mktemp("bytes"))


def follow(compiler: GrammarCompiler, spec: StructuredOutput, length: int) -> tuple[bytes, int]:
    """Follow a grammar greedily for ``length`` tokens; return its text and the longest jump."""
    row = GrammarRow(
        compiler.compile(spec),
        SamplingParams(structured_output=spec),
        (),
        np.array(compiler.end_ids, dtype=np.intp),
        vocab_size=len(compiler._vocabulary.tokens),
        jump_forward=True,
    )
    tokens: list[int] = []
    longest = 0
    while len(tokens) < length:
        allowed = np.unpackbits(row.mask(len(tokens)), bitorder="little")
        token = int(np.flatnonzero(allowed)[0])
        accepted = row.accept(token)
        tokens += [token, *accepted.forced]
        longest = max(longest, len(accepted.forced))
        if accepted.is_complete:
            break
    return b"".join(compiler._vocabulary.tokens[i] for i in tokens), longest


def test_a_long_text_comes_in_pieces(compiler: GrammarCompiler) -> None:
    """Turns red when one step encodes or appends a text of any length, or a piece's end loses or
    doubles something: the whole text comes, in jumps of bounded length."""
    words = "".join(f"{i * 7919 % 100_003} é" for i in range(3000))
    assert MAX_ENCODED_CHARS < len(words.encode()) < MAX_FORCED_BYTES
    array = {"type": "array", "minItems": 2, "items": False}
    schema = {**array, "prefixItems": [{"type": "boolean"}, {"const": words}]}
    text, longest = follow(compiler, SO.json_schema(schema), 60_000)
    assert json.loads(text) in ([True, words], [False, words])
    assert MAX_FORCED / 2 < longest < MAX_FORCED + MAX_ENCODED_CHARS


def test_a_very_long_text_is_followed_token_by_token(compiler: GrammarCompiler) -> None:
    """Turns red when a grammar that is not looked ahead for allows another text."""
    spec = SO.choice(["ab" * MAX_FORCED_BYTES])
    text, longest = follow(compiler, spec, 500)
    assert longest == 0
    assert text == b"ab" * 250


def test_a_cut_text_is_encoded_as_the_whole(tmp_path: Path) -> None:
    """Turns red when the tokens before a cut are not those that the whole text has there."""
    words = vocabulary(byte_tokenizer(tmp_path))
    text = "".join(f"{i} é日本 " for i in range(2000))
    ids = words(text.encode())
    assert 0 < len(ids) < len(text.encode())
    assert text.encode().startswith(b"".join(words.tokens[i] for i in ids))


def test_through_the_engine(tmp_path: Path) -> None:
    """Turns red when the scheduler and the row disagree about a text that comes in pieces."""
    words = "0123456789" * 300
    setup = grammar_setup(byte_tokenizer(tmp_path), max_model_len=4096, num_blocks=2048)
    limits = SamplingParams(temperature=0.0, max_tokens=4000)
    answer = ask(setup.parts, SO.json_schema({"enum": [words, 5]}), limits)
    assert answer.reason is FinishReason.STOP
    assert json.loads(answer.text) in (words, 5)
    plain = ask(setup.parts, SO.choice(["x" * 40_000]), GREEDY)
    assert (plain.reason, plain.text) == (FinishReason.LENGTH, "x" * 100)
