"""How many parts of a JSON schema one value may have to fit at once.

llguidance joins them when it compiles, which doubles in cost with each of some patterns, and with
each part that has two alternatives.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

_MANY: Final = 1_000_000
"""References that double the count at each level must not make numbers of a thousand digits."""


class Joined(NamedTuple):
    """Upper bounds for a schema."""

    patterns: int
    """Most patterns that meet on one text."""
    alternatives: int
    """Most alternatives that come of joining several parts which have some."""


class _Count(NamedTuple):
    """Most patterns that meet on the value itself, and on any value inside of it."""

    here: int
    inside: int
    options: int = 1
    """Alternatives for the value itself."""


def objects_in(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield all objects inside a JSON value; without recursion, as depth is the client's."""
    stack: list[Any] = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield value
            stack += value.values()
        elif isinstance(value, list):
            stack += value


def joined_parts(schema: Mapping[str, Any]) -> Joined:
    """Return upper bounds: parts joined by ``allOf`` or beside a ``$ref`` are taken to meet.

    Raises:
        RecursionError: the schema is nested too deeply.
    """
    counter = _Counter(schema)
    count = counter.count(schema)
    return Joined(max(count.here, count.inside), counter.most_joined)


class _Counter:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._known: dict[str, _Count] = {}
        self._total = sum(map(_num_own, objects_in(root)))
        self._num_options = sum(map(_num_options, objects_in(root)))
        # Inside a part with an id of its own, a pointer begins at that part.
        self._has_parts = any("$id" in part for part in objects_in(root) if part is not root)
        self.most_joined = 0

    def count(self, schema: Any) -> _Count:
        """Count in one schema; a reference to what is being counted adds nothing."""
        if not isinstance(schema, dict):
            return _Count(0, 0)
        inside = max((max(c.here, c.inside) for c in map(self.count, _children(schema))), default=0)
        joined = [_Count(_num_own(schema), inside), self._referred(schema.get("$ref"))]
        joined += map(self.count, _listed(schema, "allOf"))
        for key in ("anyOf", "oneOf"):
            options = [self.count(option) for option in _listed(schema, key)]
            if options:
                most = (max(o.here for o in options), max(o.inside for o in options))
                joined.append(_Count(*most, sum(o.options for o in options)))
        factors = [part.options for part in joined if part.options > 1]
        together = min(prod(factors), _MANY)
        if len(factors) > 1:
            self.most_joined = max(self.most_joined, together)
        return _Count(
            min(sum(part.here for part in joined), _MANY),
            min(sum(part.inside for part in joined), _MANY),
            together,
        )

    def _referred(self, reference: Any) -> _Count:
        if not isinstance(reference, str):
            return _Count(0, 0)
        if reference not in self._known:
            self._known[reference] = _Count(0, 0)
            target = self._target(reference)
            # What is named in another way than by a pointer may be anything in the schema.
            anything = _Count(self._total, self._total, max(self._num_options, 1))
            found = anything if target is None else self.count(target)
            self._known[reference] = found
        return self._known[reference]

    def _target(self, reference: str) -> Any:
        """Follow a pointer; None if it is none, or leads nowhere."""
        return None if self._has_parts else pointed_at(self._root, reference)


def pointed_at(root: Mapping[str, Any], reference: str) -> Any:
    """Follow a pointer from the root; None if it is none, or leads nowhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    value: Any = root
    for part in unquote(reference).split("/")[1:]:
        step = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(step)] if step.isdecimal() and int(step) < len(value) else None
        else:
            value = value.get(step) if isinstance(value, dict) else None
    return value


def _num_own(schema: Mapping[str, Any]) -> int:
    return isinstance(schema.get("pattern"), str) + isinstance(schema.get("format"), str)


def _num_options(schema: Mapping[str, Any]) -> int:
    return sum(len(list(_listed(schema, key))) for key in ("anyOf", "oneOf"))


def _listed(schema: Mapping[str, Any], key: str) -> Iterable[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else ()


def _children(schema: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the schemas of values inside."""
    for key in ("properties", "patternProperties"):
        named = schema.get(key)
        if isinstance(named, dict):
            yield from named.values()
    yield from _listed(schema, "prefixItems")
    items = schema.get("items")
    yield from items if isinstance(items, list) else (items,)
    yield schema.get("additionalProperties")
    yield schema.get("additionalItems")
