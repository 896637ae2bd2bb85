"""The page at ``/docs``: every route and field, in one file that loads nothing from elsewhere."""

from collections.abc import Iterable, Iterator
from html import escape
from typing import Any, Final

from octavo.server.endpoints import ROUTES
from octavo.server.protocol.validation import StrictModel
from octavo.server.reference import parts_of, rows_of

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1.5rem }
td, th { text-align: left; vertical-align: top; padding: .25rem .5rem; border-top: 1px solid #8884 }
code { font: 14px ui-monospace, monospace }
summary { cursor: pointer; font-weight: 600; margin: .75rem 0 }
.refused { opacity: .65 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd } a { color: #8bf } }
"""


def docs_page(document: dict[str, Any]) -> str:
    """Return the page that describes an application.

    Args:
        document: its OpenAPI document.
    """
    title = f"{document['info']['title']} {document['info']['version']}"
    body = "".join(_route(path, methods) for path, methods in document["paths"].items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f'<p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>'
        f"{body}</body></html>"
    )


def _route(path: str, methods: dict[str, Any]) -> str:
    return "".join(
        f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
        f"<p>{escape(about.get('description', ''))}</p>{''.join(_bodies(path))}"
        for method, about in methods.items()
    )


def _bodies(path: str) -> Iterator[str]:
    models = ROUTES.get(path, ())
    yield from map(_table, models)
    parts: list[type[StrictModel]] = []
    for model in models:
        parts += [part for part in parts_of(model) if part not in parts]
    if parts:
        tables = _tables(parts)
        yield f"<details><summary>What fields are made of</summary>{tables}</details>"


def _tables(models: Iterable[type[StrictModel]]) -> str:
    return "".join(f"<h3>{escape(model.__name__)}</h3>{_table(model)}" for model in models)


def _table(model: type[StrictModel]) -> str:
    rows = "".join(
        f'<tr class="{row.status}"><td><code>{escape(row.field)}</code></td>'
        f"<td>{row.status}</td><td>{escape(row.note)}</td></tr>"
        for row in rows_of(model)
    )
    return f"<table><tr><th>Field</th><th></th><th></th></tr>{rows}</table>"
