"""How long a text a grammar may force at once, roughly and from above.

llguidance looks for all of a forced text in one go, which nothing can interrupt: a constant of
50 KB, repeated a thousand times, would hold up every request. A grammar that could do so is
followed without looking ahead, at the cost of one forward pass a token.
"""

import json
import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Final

from octavo.runner.joined_parts import objects_in, pointed_at

MAX_FORCED_BYTES: Final = 32 << 10
"""Longest text that may be forced at once."""
SHORT: Final = 100
"""Longest piece (key, constant, pattern) that may come any number of times: the parser's own limits
end such a text soon enough."""
_ENDLESS: Final = 1 << 40
_COUNTS: Final = re.compile(r"\{(\d{1,9})")


def forces_much(schemas: Iterable[Mapping[str, Any]], times: int = 1) -> bool:
    """Whether texts of ``schemas``, one of them ``times`` over, may have too long forced pieces."""
    for schema in schemas:
        longest = max((size for part in objects_in(schema) for size in _pieces(part)), default=0)
        if longest > SHORT and times * _Measure(schema).size(schema) > MAX_FORCED_BYTES:
            return True
    return False


def pattern_forces(pattern: str) -> int:
    """Return at most how many bytes a pattern forces: its length, times its repetitions."""
    return len(pattern.encode(errors="replace")) * prod(
        max(int(count), 1) for count in _COUNTS.findall(pattern)
    )


def _pieces(part: Mapping[str, Any]) -> Iterable[int]:
    """Yield the sizes of what one object of a schema can force by itself."""
    if "const" in part:
        yield _size(part["const"])
    listed, pattern = part.get("enum"), part.get("pattern")
    if isinstance(listed, list):
        yield max(map(_size, listed), default=0)
    if isinstance(pattern, str):
        yield pattern_forces(pattern)
    for key in ("properties", "required"):
        names = part.get(key)
        if isinstance(names, dict | list):
            yield max(map(_size, names), default=0)


def _size(value: object) -> int:
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


class _Measure:
    """Adds up all that a value may hold, each optional part of it included."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, int] = {}

    def size(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 0
        own = 4 + max(_pieces(schema), default=0)
        inside = sum(self._inside(schema))
        joined = sum(map(self.size, _listed(schema, "allOf")))
        for key in ("anyOf", "oneOf"):
            joined += max(map(self.size, _listed(schema, key)), default=0)
        return min(own + inside + joined + self._referred(schema.get("$ref")), _ENDLESS)

    def _inside(self, schema: Mapping[str, Any]) -> Iterable[int]:
        for key in ("properties", "patternProperties"):
            named = schema.get(key)
            for name, value in named.items() if isinstance(named, dict) else ():
                yield _size(name) + self.size(value)
        yield self.size(schema.get("additionalProperties"))
        yield from map(self.size, _listed(schema, "prefixItems"))
        items, num_items = schema.get("items"), schema.get("minItems")
        times = num_items if isinstance(num_items, int) else 1
        for item in items if isinstance(items, list) else (items,):
            yield max(times, 1) * self.size(item)

    def _referred(self, reference: Any) -> int:
        if not isinstance(reference, str):
            return 0
        if reference not in self._known:
            self._known[reference] = _ENDLESS  # while it is measured: it holds itself
            target = pointed_at(self._root, reference)
            self._known[reference] = _ENDLESS if target is None else self.size(target)
        return self._known[reference]


def _listed(schema: Mapping[str, Any], key: str) -> Iterable[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else ()
