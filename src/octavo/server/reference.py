"""The compatibility table: every field of every body, from the models that check them.

``python -m octavo.server.reference > docs/api.md`` writes it; a test fails when it is stale.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, get_args

from pydantic.fields import FieldInfo

from octavo.server.endpoints import ROUTES
from octavo.server.protocol.validation import StrictModel, Unsupported

_HEAD: Final = """\
# The API, field by field

Written by `python -m octavo.server.reference` from the models that check bodies; do not edit.

*honoured*: does what OpenAI's (or Anthropic's, or vLLM's) documentation says.
*difference*: accepted, but not quite that.
*refused*: the request ends with status 400, and the message names the field.

Fields that are in no table are refused too. `null` always means the default, and a refused field
may hold what asks for nothing but what happens anyway.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One field of a body."""

    field: str
    status: str
    note: str


def reference() -> str:
    """Return the whole page."""
    sections = [_HEAD]
    shown: set[type[StrictModel]] = set()
    for path, models in ROUTES.items():
        parts: list[type[StrictModel]] = []
        sections.append(f"## POST {path}\n")
        for model in models:
            sections.append(_table(model))
            parts += [part for part in parts_of(model) if part not in parts]
        new = [part for part in parts if part not in shown and rows_of(part)]
        shown.update(new)
        for part in new:
            sections.append(f"### {part.__name__}\n\n{_table(part)}")
    return "\n".join(sections)


def rows_of(model: type[StrictModel]) -> list[Row]:
    """Return a body's fields: first those that are read, then those that are refused."""
    rows = []
    for name, field in model.model_fields.items():
        name = field.alias or name
        difference = model.differences.get(name)
        told = " ".join((field.description or "").split())
        notes = [told, difference] if difference else [told]
        status = "honoured" if difference is None else "difference"
        rows.append(Row(name, status, "; ".join(note.rstrip(".") for note in notes if note)))
    return rows + [
        Row(name, "refused", _why(unsupported))
        for name, unsupported in model.unsupported.items()
        if name not in model.model_fields
    ]


def parts_of(model: type[StrictModel]) -> Iterator[type[StrictModel]]:
    """Yield the models inside a body's fields, each once, outer ones first."""
    waiting, found = [model], {model}
    while waiting:
        for field in waiting.pop(0).model_fields.values():
            for part in _models_in(field):
                if part not in found:
                    found.add(part)
                    waiting.append(part)
                    yield part


def _models_in(annotation: Any) -> Iterator[type[StrictModel]]:
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if inspect.isclass(annotation) and issubclass(annotation, StrictModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _why(unsupported: Unsupported) -> str:
    if not unsupported.neutral:
        return unsupported.why
    values = ", ".join(f"`{_json(value)}`" for value in unsupported.neutral)
    return f"{unsupported.why} (but {values} may be sent)"


def _json(value: object) -> str:
    words: Mapping[object, str] = {True: "true", False: "false"}
    if isinstance(value, bool):
        return words[value]
    return str(value).replace("'", '"') if not isinstance(value, str) else f'"{value}"'


def _table(model: type[StrictModel]) -> str:
    doc = inspect.getdoc(model) or ""
    lines = [doc.split("\n\n")[0], "", "| field | | |", "|---|---|---|"]
    for row in rows_of(model):
        lines.append(f"| `{row.field}` | {row.status} | {row.note.replace('|', chr(92) + '|')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(reference())
