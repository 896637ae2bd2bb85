"""From what a request asked for to llguidance's grammar text, within limits on its size.

The limits bound the time of compilation, which llguidance cannot be asked to give up: it grows
with the square of a regex's length and of the optional properties of an object, and doubles with
each of some patterns that are intersected.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher, StructTag

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import StructuredKind, StructuredOutput
from octavo.runner.joined_patterns import joined_patterns, objects_in

MAX_JSON_CHARS: Final = 512 << 10
"""Longest schema, list of choices or of tags."""
MAX_PATTERN_CHARS: Final = 16 << 10
"""Longest regex, and longest sum of the patterns in a schema."""
MAX_GRAMMAR_CHARS: Final = 32 << 10
MAX_OPTIONAL_PROPERTIES: Final = 1000
"""Most properties that may be left out; the square root of a sum of squares if in many objects."""
MAX_PROPERTIES: Final = 5000
"""Most properties of all objects together; OpenAI's limit."""
MAX_JOINED_PATTERNS: Final = 12
"""Most patterns that one text may have to match at once."""

JSON_OPTIONS: Final[Mapping[str, object]] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}
"""One way to write JSON, that of Python's ``json.dumps``.

A single space after a colon and a comma and none elsewhere: models cannot lose themselves in
whitespace, and all punctuation and keys are forced, so they cost no forward pass. Nothing of a
schema is ignored (``lenient``) or weakened (``coerce_one_of``), whatever its ``x-guidance`` says.
"""

_KINDS: Final[Mapping[type, str]] = {str: "a text", list: "a list", object: "a schema"}


def grammar_text(spec: StructuredOutput, special_texts: frozenset[str]) -> str:
    """Return the grammar of ``spec``.

    Args:
        spec: what was asked for.
        special_texts: how the vocabulary's control tokens read; a tag may begin with one.

    Raises:
        InvalidRequestError: it is malformed or too large. Not all faults are found here.
    """
    match spec.kind:
        case StructuredKind.JSON_SCHEMA:
            return _of_schema(_load(spec), spec)
        case StructuredKind.REGEX:
            _check_length(spec, MAX_PATTERN_CHARS)
            return LLMatcher.grammar_from_regex(spec.text)
        case StructuredKind.CHOICE:
            return _of_choices(_load(spec), spec)
        case StructuredKind.GRAMMAR:
            _check_length(spec, MAX_GRAMMAR_CHARS)
            _check_grammar(spec)
            return LLMatcher.grammar_from_lark(spec.text)
        case StructuredKind.STRUCTURAL_TAG:
            return _of_tags(_load(spec), spec, special_texts)
        case StructuredKind.TOOL_CALLS:
            return _of_calls(_load(spec), spec)


def _check_length(spec: StructuredOutput, limit: int) -> None:
    if len(spec.text) > limit:
        raise _refusal(
            spec, f"has {len(spec.text)} characters; the {spec.kind} may have at most {limit}"
        )


def _refusal(spec: StructuredOutput, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{spec.param} {problem}.", param=spec.param)


def _load(spec: StructuredOutput) -> Any:
    _check_length(spec, MAX_JSON_CHARS)
    try:
        return json.loads(spec.text)
    except RecursionError:
        raise _refusal(spec, "is nested too deeply") from None
    except ValueError as error:
        raise _refusal(spec, f"is not valid JSON: {error}") from None


def _of_schema(schema: Any, spec: StructuredOutput) -> str:
    return LLMatcher.grammar_from_json_schema(json.dumps(_checked_schema(schema, spec)))


def _checked_schema(schema: Any, spec: StructuredOutput) -> dict[str, Any]:
    """Return a schema as an object, within the limits, with the server's options."""
    if schema is True:
        schema = {}
    if schema is False:
        raise _refusal(spec, "has the schema false, which allows nothing")
    if not isinstance(schema, dict):
        raise _refusal(spec, "must be a JSON schema: an object or true")
    num_pattern_chars = num_properties = optional_cost = 0
    for part in objects_in(schema):
        pattern, keyed = part.get("pattern"), part.get("patternProperties")
        num_pattern_chars += len(pattern) if isinstance(pattern, str) else 0
        num_pattern_chars += sum(map(len, keyed)) if isinstance(keyed, dict) else 0
        properties, required = part.get("properties"), part.get("required")
        num_named = len(properties) if isinstance(properties, dict) else 0
        num_properties += num_named
        num_required = len(required) if isinstance(required, list) else 0
        optional_cost += max(num_named - num_required, 0) ** 2
    if num_properties > MAX_PROPERTIES:
        raise _refusal(
            spec, f"has {num_properties} properties; at most {MAX_PROPERTIES} are possible"
        )
    if optional_cost > MAX_OPTIONAL_PROPERTIES**2:
        raise _refusal(
            spec,
            f"has too many optional properties; at most {MAX_OPTIONAL_PROPERTIES} are possible in "
            "one object, and fewer in each of several",
        )
    if num_pattern_chars > MAX_PATTERN_CHARS:
        raise _refusal(
            spec,
            f"has patterns of {num_pattern_chars} characters; at most {MAX_PATTERN_CHARS} are "
            "possible",
        )
    try:
        _check_joined(joined_patterns(schema), spec)
    except RecursionError:
        raise _refusal(spec, "is nested too deeply") from None
    return {**schema, "x-guidance": dict(JSON_OPTIONS)}


def _check_joined(num_joined: int, spec: StructuredOutput) -> None:
    if num_joined > MAX_JOINED_PATTERNS:
        raise _refusal(
            spec,
            f"has {num_joined} patterns that a text may have to match at once; at most "
            f"{MAX_JOINED_PATTERNS} are possible",
        )


_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')


def _check_grammar(spec: StructuredOutput) -> None:
    """Hold a Lark grammar, and the schemas in it, to the limits."""
    _check_joined(1 + _QUOTED.sub("", spec.text).count("&"), spec)
    for part in re.split(r"%json\s*", spec.text)[1:]:
        try:
            schema, _ = json.JSONDecoder().raw_decode(part)
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
        if isinstance(schema, dict):
            _checked_schema(schema, spec)


def _of_choices(choices: Any, spec: StructuredOutput) -> str:
    texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    if not texts or not choices:
        raise _refusal(spec, "must be a non-empty list of texts")
    # One terminal: as alternatives of a rule, thousands would exceed a row of the parser.
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)


def _of_tags(value: Any, spec: StructuredOutput, special_texts: frozenset[str]) -> str:
    structures = _field(value, "structures", list, spec)
    triggers = _field(value, "triggers", list, spec)
    if not structures or not all(isinstance(t, str) and t for t in triggers):
        raise _refusal(spec, "needs at least one structure, and triggers that are texts")
    tags = []
    for structure in structures:
        begin = _field(structure, "begin", str, spec)
        end = _field(structure, "end", str, spec)
        schema = _checked_schema(_field(structure, "schema", object, spec), spec)
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise _refusal(spec, f"has the begin {begin[:100]!r}, which no trigger starts")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    # StructTag takes triggers in angle brackets for control tokens, or none of them.
    bracketed = {t.trigger for t in tags if t.trigger.startswith("<") and t.trigger.endswith(">")}
    return StructTag.to_grammar(tags, assume_special=bracketed <= special_texts)


def _of_calls(value: Any, spec: StructuredOutput) -> str:
    """Return a Lark grammar: a mark, one to ``max_calls`` of the choices, what closes them."""
    choices = _field(value, "choices", list, spec)
    mark = value["open"]
    opening = f"<[{mark}]>" if isinstance(mark, int) else json.dumps(mark)
    opening += " " + json.dumps(value["prefix"])
    separator, more = json.dumps(value["separator"]), value["max_calls"] - 1
    others = f"({separator} call){{0,{more}}}" if more else ""
    rules = [
        f"start: {opening} call {others} {json.dumps(value['close'])}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(choices))),
    ]
    for index, choice in enumerate(choices):
        schema = json.dumps(_checked_schema(choice["schema"], spec))
        begin, end = json.dumps(choice["begin"]), json.dumps(choice["end"])
        rules += [f"call_{index}: {begin} arguments_{index} {end}"]
        rules += [f"arguments_{index}: %json {schema}"]
    return LLMatcher.grammar_from_lark("\n".join(rules))


def _field(value: Any, name: str, kind: type, spec: StructuredOutput) -> Any:
    field = value.get(name) if isinstance(value, dict) else None
    if field is None or not isinstance(field, kind):
        raise _refusal(spec, f"must have {name}, {_KINDS[kind]}")
    return field
