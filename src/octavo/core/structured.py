"""What shape an output must have: the specification only; the runner holds what enforces it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from octavo.core.errors import InvalidRequestError

JsonSchema = Mapping[str, object] | bool | str
"""A schema as a value or as JSON text."""


class StructuredKind(StrEnum):
    """How the specification is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    TOOL_CALLS = "call_schema"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A constraint on the text of an output. Equal specifications share one compiled grammar."""

    kind: StructuredKind
    text: str
    """The regex or the grammar itself; a schema, the choices or the tags as JSON."""
    param: str = field(default="structured_outputs", compare=False)
    """The request's field that asked for it, for error messages."""

    @classmethod
    def json_schema(
        cls, schema: JsonSchema, *, param: str = "structured_outputs"
    ) -> "StructuredOutput":
        """Only JSON that the schema allows, its properties in the schema's order."""
        text = schema if isinstance(schema, str) else _dump(schema, param)
        return cls(StructuredKind.JSON_SCHEMA, text, param)

    @classmethod
    def json_object(cls, *, param: str = "structured_outputs") -> "StructuredOutput":
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, param=param)

    @classmethod
    def regex(cls, pattern: str, *, param: str = "structured_outputs") -> "StructuredOutput":
        """A text that the pattern (Rust's syntax, no lookaround) matches from end to end."""
        return cls(StructuredKind.REGEX, pattern, param)

    @classmethod
    def choice(
        cls, choices: Sequence[str], *, param: str = "structured_outputs"
    ) -> "StructuredOutput":
        """Exactly one of the texts."""
        return cls(StructuredKind.CHOICE, _dump(list(choices), param), param)

    @classmethod
    def grammar(cls, text: str, *, param: str = "structured_outputs") -> "StructuredOutput":
        """A sentence of a context-free grammar in llguidance's variant of Lark."""
        return cls(StructuredKind.GRAMMAR, text, param)

    @classmethod
    def structural_tag(
        cls, tags: Mapping[str, object], *, param: str = "structured_outputs"
    ) -> "StructuredOutput":
        """Free text in which each trigger begins a tag whose body a schema constrains.

        ``tags`` has vLLM's shape: ``{"structures": [{"begin", "schema", "end"}, …], "triggers":
        […]}``.
        """
        return cls(StructuredKind.STRUCTURAL_TAG, _dump(tags, param), param)

    @classmethod
    def tool_calls(cls, calls: Mapping[str, object], *, param: str = "tools") -> "StructuredOutput":
        """Calls of tools, and nothing else unless there is a ``text``.

        ``calls`` is ``{"open": mark, "prefix": text, "choices": [{"begin", "schema", "end"}, …],
        "separator": text, "close": text, "max_calls": number}``; the mark is a text, or a control
        token's id. With ``"text": "any"`` the answer is free text up to a mark, if any; with
        ``"not an object"`` calls also come without one, where the answer begins with a brace.
        ``"thought": [open, close]`` are control tokens between which reasoning may come first;
        ``[close]`` alone, where the prompt ends inside of it.
        """
        return cls(StructuredKind.TOOL_CALLS, _dump(calls, param), param)


def _dump(value: object, param: str) -> str:
    """Write JSON, keys in their order: that of a schema's properties means something."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequestError(f"{param} is nested too deeply.", param=param) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{param} is not JSON: {error}.", param=param) from None
