"""From what a request asked for to llguidance's grammar text, within limits on its size.

Nothing that was asked for is approximated: what llguidance cannot enforce is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher, StructTag

from octavo.core.structured import StructuredKind, StructuredOutput
from octavo.runner.forced_text import MAX_FORCED_BYTES, forces_much, pattern_forces
from octavo.runner.schema_limits import (
    MAX_PATTERN_CHARS,
    check_joined_patterns,
    check_schemas,
    refusal,
)

MAX_JSON_CHARS: Final = 512 << 10
"""Longest schema, list of choices or of tags."""
MAX_GRAMMAR_CHARS: Final = 32 << 10
MAX_STRUCTURES: Final = 200
"""Most tags."""
MAX_LITERAL: Final = 128
"""Longest literal of a Lark grammar that text is looked ahead for: it may come any number of times.
"""
NO_FORCING: Final = '%llguidance {"no_forcing": true}\n'
"""Begins a grammar whose forced texts may be too long to be found in one go."""

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
            return _of_lark(spec)
        case StructuredKind.STRUCTURAL_TAG:
            return _of_tags(_load(spec), spec, special_texts)
        case StructuredKind.TOOL_CALLS:
            return _of_calls(_load(spec), spec)


def _check_length(spec: StructuredOutput, limit: int) -> None:
    if len(spec.text) > limit:
        raise refusal(
            spec, f"has {len(spec.text)} characters; the {spec.kind} may have at most {limit}"
        )


def _load(spec: StructuredOutput) -> Any:
    _check_length(spec, MAX_JSON_CHARS)
    try:
        return json.loads(spec.text)
    except RecursionError:
        raise refusal(spec, "is nested too deeply") from None
    except ValueError as error:
        raise refusal(spec, f"is not valid JSON: {error}") from None


def _of_schema(schema: Any, spec: StructuredOutput) -> str:
    checked = _as_object(schema, spec)
    if _forces_much([checked], spec):
        return f"{NO_FORCING}start: %json {json.dumps(checked)}"
    return LLMatcher.grammar_from_json_schema(json.dumps(checked))


def _as_object(schema: Any, spec: StructuredOutput) -> dict[str, Any]:
    """Return a schema as an object, with the server's options."""
    if schema is True:
        schema = {}
    if schema is False:
        raise refusal(spec, "has the schema false, which allows nothing")
    if not isinstance(schema, dict):
        raise refusal(spec, "must be a JSON schema: an object or true")
    return {**schema, "x-guidance": dict(JSON_OPTIONS)}


def _forces_much(
    schemas: Sequence[Mapping[str, Any]], spec: StructuredOutput, times: int = 1
) -> bool:
    """Hold schemas to the limits, and say whether their texts may have long forced pieces."""
    check_schemas(schemas, spec)
    try:
        return forces_much(schemas, times)
    except RecursionError:
        raise refusal(spec, "is nested too deeply") from None


_QUOTED: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/')


def _of_lark(spec: StructuredOutput) -> str:
    """Return a Lark grammar, if it and the schemas in it are within the limits."""
    _check_length(spec, MAX_GRAMMAR_CHARS)
    check_joined_patterns(1 + _QUOTED.sub("", spec.text).count("&"), spec)
    schemas = []
    for part in re.split(r"%json\s*", spec.text)[1:]:
        try:
            schema, _ = json.JSONDecoder().raw_decode(part)
        except (ValueError, RecursionError):
            continue  # the compiler says what is wrong with it
        if isinstance(schema, dict):
            schemas.append(schema)
    # A rule may repeat its schemas.
    much = _forces_much(schemas, spec, times=MAX_FORCED_BYTES)
    much |= any(pattern_forces(found) > MAX_LITERAL for found in _QUOTED.findall(spec.text))
    if not much or "%llguidance" in spec.text:
        return spec.text
    return NO_FORCING + spec.text


def _of_choices(choices: Any, spec: StructuredOutput) -> str:
    texts = isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)
    if not texts or not choices:
        raise refusal(spec, "must be a non-empty list of texts")
    # One terminal: as alternatives of a rule, thousands would exceed a row of the parser.
    terminal = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in choices)
    longest = max(len(choice.encode(errors="replace")) for choice in choices)
    return NO_FORCING + terminal if longest > MAX_FORCED_BYTES else terminal


def _of_tags(value: Any, spec: StructuredOutput, special_texts: frozenset[str]) -> str:
    structures = _field(value, "structures", list, spec)
    triggers = _field(value, "triggers", list, spec)
    if not structures or not all(isinstance(t, str) and t for t in triggers):
        raise refusal(spec, "needs at least one structure, and triggers that are texts")
    if len(structures) > MAX_STRUCTURES:
        raise refusal(
            spec, f"has {len(structures)} structures; at most {MAX_STRUCTURES} are possible"
        )
    tags, schemas = [], []
    for structure in structures:
        begin = _field(structure, "begin", str, spec)
        end = _field(structure, "end", str, spec)
        schema = _as_object(_field(structure, "schema", object, spec), spec)
        schemas.append(schema)
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise refusal(spec, f"has the begin {begin[:100]!r}, which no trigger starts")
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=schema, end=end))
    # StructTag takes triggers in angle brackets for control tokens, or none of them.
    bracketed = {t.trigger for t in tags if t.trigger.startswith("<") and t.trigger.endswith(">")}
    text = StructTag.to_grammar(tags, assume_special=bracketed <= special_texts)
    longest = max(len(tag.begin) + len(tag.end) for tag in tags)
    if longest > MAX_PATTERN_CHARS:
        raise refusal(spec, f"has a begin and end of {longest} characters")
    return text.replace("%llguidance {}\n", NO_FORCING, 1) if _forces_much(schemas, spec) else text


def _of_calls(value: Any, spec: StructuredOutput) -> str:
    """Return a Lark grammar: a mark, one to ``max_calls`` of the choices, what closes them.

    With a text before, the mark ends it: as a control token, which no text can hold, or as a text
    that is found as soon as it is complete.
    """
    choices = _field(value, "choices", list, spec)
    mark, more = value["open"], value["max_calls"] - 1
    others = f"({json.dumps(value['separator'])} call){{0,{more}}}" if more else ""
    calls = f"{json.dumps(value['prefix'])} call {others} {json.dumps(value['close'])}"
    text = _TEXTS.get(value.get("text", ""))
    if text is None:
        opening = [f"<[{mark}]>"] if isinstance(mark, int) else [json.dumps(mark)] if mark else []
        rules = [f"start: {' '.join([*opening, calls])}"]
    else:
        rules = _with_text(value, mark, calls, text)
    rules += ["call: " + " | ".join(f"call_{index}" for index in range(len(choices)))]
    schemas: list[dict[str, Any]] = []
    for index, choice in enumerate(choices):
        schemas.append(_as_object(choice["schema"], spec))
        schema = json.dumps(schemas[-1])
        begin, end = json.dumps(choice["begin"]), json.dumps(choice["end"])
        rules += [f"call_{index}: {begin} arguments_{index} {end}"]
        rules += [f"arguments_{index}: %json {schema}"]
    lark = "\n".join(rules)
    return NO_FORCING + lark if _forces_much(schemas, spec, value["max_calls"]) else lark


def _with_text(value: Any, mark: str | int, calls: str, text: str) -> list[str]:
    """Return the rules of an answer that may be text, perhaps after reasoning."""
    bare = [calls] if value["text"] == "not an object" else []
    rules = [f"answer: {' | '.join(['TEXT', 'marked', *bare])}", f"TEXT: {text}"]
    match value.get("thought", ()):
        case (opening, closing):
            rules += [f"start: (<[{opening}]> THOUGHT <[{closing}]>)? answer"]
        case (closing,):
            rules += [f"start: THOUGHT (<[{closing}]> answer)?"]
        case _:
            rules += ["start: answer"]
    rules += [f"THOUGHT: {_TEXTS['any']}"] if "thought" in value else []
    if isinstance(mark, int):
        return [*rules, f"marked: TEXT <[{mark}]> {calls}"]
    return [*rules, f"marked: opening {calls}", f"opening[lazy]: TEXT {json.dumps(mark)}"]


_TEXTS: Final[Mapping[str, str]] = {
    "any": r"/(.|\n)*/",
    "not an object": r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/",
}
"""What is free text: in the second case it must not begin as a call without a mark does."""


def _field(value: Any, name: str, kind: type, spec: StructuredOutput) -> Any:
    field = value.get(name) if isinstance(value, dict) else None
    if field is None or not isinstance(field, kind):
        raise refusal(spec, f"must have {name}, {_KINDS[kind]}")
    return field
