"""Limits on what JSON schemas may cost to compile, which llguidance cannot be asked to give up.

Compilation grows with the square of the optional properties of an object, with the cube of pattern
properties, with the multiples of ``multipleOf``, and doubles with each of some patterns, or parts
with alternatives, that are joined. Each limit alone is some 0.3 s of CPU on a slow machine.
"""

from collections.abc import Iterable, Mapping
from decimal import Decimal
from math import inf, lcm
from typing import Any, Final

from octavo.core.errors import InvalidRequestError
from octavo.core.structured import StructuredOutput
from octavo.runner.joined_parts import joined_parts, objects_in

MAX_PATTERN_CHARS: Final = 16 << 10
"""Longest regex, and longest sum of the patterns in a schema."""
MAX_OPTIONAL_PROPERTIES: Final = 1000
"""Most properties that may be left out; the square root of a sum of squares if in many objects."""
MAX_PROPERTIES: Final = 5000
"""Most properties of all objects together; OpenAI's limit."""
MAX_PATTERN_PROPERTIES: Final = 100
MAX_ALTERNATIVES: Final = 2000
"""Most entries of all ``anyOf`` and ``oneOf`` together."""
MAX_RANGES: Final = 1000
"""Most numbers with bounds."""
MAX_ENUM_PARTS: Final = 5000
"""Most values inside of arrays and objects that a schema names as constants."""
MAX_MULTIPLE: Final = 30_000
"""Largest ``multipleOf``, as a multiple of its last decimal place."""
MAX_JOINED_PATTERNS: Final = 12
"""Most patterns that one text may have to match at once."""
MAX_JOINED_ALTERNATIVES: Final = 256
"""Most alternatives that joining parts with alternatives may make."""


def check_schemas(schemas: Iterable[Mapping[str, Any]], spec: StructuredOutput) -> None:
    """Hold the schemas of one specification to the limits, all together.

    Raises:
        InvalidRequestError: they are too large or too deep.
    """
    total = _Sizes()
    for schema in schemas:
        for part in objects_in(schema):
            total.add(part)
    for number, limit, what in total.counted():
        if number > limit:
            raise refusal(spec, f"has {number} {what}; at most {limit} are possible")
    if total.optional_cost > MAX_OPTIONAL_PROPERTIES**2:
        raise refusal(
            spec,
            f"has too many optional properties; at most {MAX_OPTIONAL_PROPERTIES} are possible in "
            "one object, and fewer in each of several",
        )
    if (multiple := total.multiple()) > MAX_MULTIPLE:
        raise refusal(
            spec,
            f"needs multiples of {min(multiple, 10**18)} steps; a multipleOf, or all of them where "
            f"parts are joined, may make at most {MAX_MULTIPLE}",
        )
    for schema in schemas:
        _check_joined(schema, spec)


def _check_joined(schema: Mapping[str, Any], spec: StructuredOutput) -> None:
    try:
        joined = joined_parts(schema)
    except RecursionError:
        raise refusal(spec, "is nested too deeply") from None
    check_joined_patterns(joined.patterns, spec)
    if joined.alternatives > MAX_JOINED_ALTERNATIVES:
        raise refusal(
            spec,
            f"joins parts that make {joined.alternatives} alternatives together; at most "
            f"{MAX_JOINED_ALTERNATIVES} are possible",
        )


def check_joined_patterns(number: int, spec: StructuredOutput) -> None:
    """Refuse too many patterns for one text."""
    if number > MAX_JOINED_PATTERNS:
        raise refusal(
            spec,
            f"has {number} patterns that a text may have to match at once; at most "
            f"{MAX_JOINED_PATTERNS} are possible",
        )


def refusal(spec: StructuredOutput, problem: str) -> InvalidRequestError:
    """Return an error about the request's field; ``problem`` goes on after its name."""
    return InvalidRequestError(f"{spec.param} {problem}.", param=spec.param)


class _Sizes:
    """What costs time in schemas, summed."""

    def __init__(self) -> None:
        self.pattern_chars = self.properties = self.optional_cost = 0
        self.pattern_properties = self.alternatives = self.ranges = self.enum_parts = 0
        self._multiples: list[Decimal] = []
        self._joins = False

    def add(self, part: Mapping[str, Any]) -> None:
        """Count one object of a schema; not what is in it."""
        pattern, keyed = part.get("pattern"), part.get("patternProperties")
        self.pattern_chars += len(pattern) if isinstance(pattern, str) else 0
        if isinstance(keyed, dict):
            self.pattern_chars += sum(map(len, keyed))
            self.pattern_properties += len(keyed)
        num_named, num_required = _size(part, "properties", dict), _size(part, "required", list)
        self.properties += num_named
        self.optional_cost += max(num_named - num_required, 0) ** 2
        num_options = _size(part, "anyOf", list) + _size(part, "oneOf", list)
        self.alternatives += num_options
        self.ranges += not _BOUNDS.isdisjoint(part)
        listed = part.get("enum")
        for value in (part.get("const"), *(listed if isinstance(listed, list) else ())):
            self.enum_parts += _num_inside(value)
        self._add_multiple(part, joins=bool(num_options) or "$ref" in part)
        self._joins |= "allOf" in part

    def _add_multiple(self, part: Mapping[str, Any], *, joins: bool) -> None:
        value = part.get("multipleOf")
        if isinstance(value, int | float) and value is not True and 0 < value < inf:
            self._multiples.append(Decimal(repr(value)))
            self._joins |= joins

    def counted(self) -> Iterable[tuple[int, int, str]]:
        """Yield what there is, at most may be, and its name."""
        yield self.properties, MAX_PROPERTIES, "properties"
        yield self.pattern_chars, MAX_PATTERN_CHARS, "characters of patterns"
        yield self.pattern_properties, MAX_PATTERN_PROPERTIES, "pattern properties"
        yield self.alternatives, MAX_ALTERNATIVES, "entries of anyOf and oneOf"
        yield self.ranges, MAX_RANGES, "numbers with bounds"
        yield self.enum_parts, MAX_ENUM_PARTS, "values inside of constants"

    def multiple(self) -> int:
        """Return the largest number that multiples are counted by."""
        if not self._joins:
            return max(map(_digits, self._multiples), default=0)
        places = [-int(value.normalize().as_tuple().exponent) for value in self._multiples]
        step = Decimal(10) ** -min(max(places, default=0), 40)
        return lcm(*(max(1, int(value / step)) for value in set(self._multiples)))


_BOUNDS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


def _digits(value: Decimal) -> int:
    return int("".join(map(str, value.normalize().as_tuple().digits)))


def _size(part: Mapping[str, Any], key: str, kind: type[dict[Any, Any]] | type[list[Any]]) -> int:
    value = part.get(key)
    return len(value) if isinstance(value, kind) else 0


def _num_inside(value: object) -> int:
    """Return how many values are in an array or object, however deep."""
    if not isinstance(value, dict | list):
        return 0
    num, stack = 0, [value]
    while stack:
        inner = stack.pop()
        values = list(inner.values() if isinstance(inner, dict) else inner)
        num += len(values)
        stack += [v for v in values if isinstance(v, dict | list)]
    return num
