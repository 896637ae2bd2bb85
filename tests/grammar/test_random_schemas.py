"""Any schema that is not refused gives valid answers, whatever the model says."""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.errors import InvalidRequestError
from octavo.core.request import FinishReason
from octavo.core.structured import StructuredOutput
from octavo.models.tokenizer import Tokenizer
from support_engine import byte_tokenizer
from support_grammar import GREEDY, Setup, ask_all, fits, grammar_setup

SAMPLE = 20
"""One in so many schemas of the test suite is tried here; benchmarks/structured.py tries all."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The vocabulary of bytes."""
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def setup(tokenizer: Tokenizer) -> Setup:
    """An engine whose random model likes to come to an end."""
    return grammar_setup(tokenizer, lambda token: 4.0 if token in (b'"', b"}", b"]") else 0.0)


TEXTS = st.text(st.characters(codec="utf-8", max_codepoint=0x2FFF), max_size=5)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-99, 99), TEXTS, st.lists(st.integers(0, 9), max_size=2)
)


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(-50, 50))
    schema: dict[str, Any] = {"type": draw(st.sampled_from(["integer", "number"]))}
    return schema | {"minimum": low, "maximum": low + draw(st.integers(0, 60))}


@st.composite
def _texts(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(0, 3))
    schema: dict[str, Any] = {"type": "string"}
    if draw(st.booleans()):
        return schema | {"minLength": low, "maxLength": low + draw(st.integers(0, 5))}
    patterns = ["^[a-c]{1,3}$", "^(x|yy)+z?$", "b", r"^\d{2}-\d$", "^é?$"]
    return schema | {"pattern": draw(st.sampled_from(patterns))}


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(TEXTS, inner, max_size=3))
    required = [key for key in properties if draw(st.booleans())]
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": draw(st.one_of(st.just(False), inner))}


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    low = draw(st.integers(0, 2))
    return {
        "type": "array",
        "items": draw(inner),
        "prefixItems": draw(st.lists(inner, max_size=2)),
        "minItems": low,
        "maxItems": low + draw(st.integers(0, 2)),
    }


LEAVES = st.one_of(
    _numbers(),
    _texts(),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, VALUES),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}]),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        _arrays(inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_random_schemas(setup: Setup, schema: dict[str, Any], seed: int) -> None:
    """Turns red when an answer that is complete does not fit its schema, says ``jsonschema``."""
    check(setup, schema, seed)


def check(setup: Setup, schema: Any, seed: int) -> str:
    """Ask a few times; return what became of it: refused, valid, or length if all were cut."""
    shape = StructuredOutput.json_schema(schema)
    try:
        held = setup.compiler.compile(shape)
    except InvalidRequestError:
        return "refused"
    params = [
        replace(GREEDY, temperature=1.0, seed=(seed + i) % 2**64, max_tokens=120) for i in range(3)
    ]
    answers = ask_all(setup.parts, [shape] * 3, params)
    assert held is not None
    complete = [answer for answer in answers if answer.reason is FinishReason.STOP]
    assert all(answer.reason is not FinishReason.ERROR for answer in answers)
    for answer in complete:
        assert fits(schema, answer.text), (schema, answer.text)
    return "valid" if complete else "length"


def suite(archive: Path) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of the JSON Schema test suite, each with its place."""
    drafts = {
        "tests/draft2020-12/": "https://json-schema.org/draft/2020-12/schema",
        "tests/draft7/": "http://json-schema.org/draft-07/schema#",
    }
    with tarfile.open(archive) as tar:
        for member in tar:
            uri = next((uri for path, uri in drafts.items() if member.name.startswith(path)), None)
            file = tar.extractfile(member)
            if uri is None or file is None or not member.name.endswith(".json"):
                continue
            for group in json.load(file):
                schema = group["schema"]
                if isinstance(schema, dict):
                    schema = {"$schema": uri, **schema}
                yield f"{member.name}: {group['description']}", schema


@pytest.mark.shared
def test_json_schema_test_suite(setup: Setup, shared: Path) -> None:
    """Turns red when a schema of the suite that is not refused gets an answer that is invalid."""
    [archive] = (shared / "traces" / "json-schema").glob("*.tar.xz")
    found: Counter[str] = Counter()
    for index, (place, schema) in enumerate(suite(archive)):
        if index % SAMPLE == 0:
            try:
                found[check(setup, schema, index)] += 1
            except re.error:  # Python cannot read the pattern, so it cannot judge
                found["not judged"] += 1
            except AssertionError as error:
                raise AssertionError(f"{place}: {error}") from error
    assert found["valid"] > 5
    assert found["refused"] < found.total()
