"""One page of charts for the baselines: plain SVG, no libraries."""

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Final

from baseline_results import PARTS, Result

COLOURS: Final = ("#1b6ca8", "#7fb2d9", "#e0a030", "#c8553d", "#8a6fae", "#d9d9d9")
LINES: Final = ("#c8553d", "#e0a030", "#b8860b", "#8a6fae", "#888888", "#3a9a6a", "#1b6ca8")
WIDTH: Final = 760
LEFT: Final = 130
ROW: Final = 26


def page(title: str, note: str, charts: Sequence[str]) -> str:
    """Return an HTML page that works without a network."""
    body = "\n".join(charts)
    return (
        f"<!doctype html><meta charset='utf-8'><title>{escape(title)}</title>"
        "<style>body{font:14px sans-serif;max-width:800px;margin:2em auto;color:#222;"
        "background:#fff}text{font:12px sans-serif;fill:#222}</style>"
        f"<h1>{escape(title)}</h1><p>{escape(note)}</p>\n{body}\n"
    )


def throughput_chart(results: Mapping[str, Result]) -> str:
    """Return bars of output tokens a second."""
    best = max(result.throughput for result in results.values())
    rows = [
        (name, [(r.throughput / best, COLOURS[0])], f"{r.throughput:.1f}")
        for name, r in results.items()
    ]
    return "<h2>Output tokens a second</h2>" + _bars(rows)


def memory_chart(results: Mapping[str, Result]) -> str:
    """Return stacked bars: what the pool's slots were used for, averaged over time."""
    rows = []
    for name, result in results.items():
        parts = [
            (result.memory[part], colour) for part, colour in zip(PARTS, COLOURS, strict=False)
        ]
        free = 1.0 - sum(share for share, _ in parts)
        rows.append((name, [*parts, (max(free, 0.0), COLOURS[-1])], ""))
    keys = zip((*PARTS, "free"), COLOURS, strict=True)
    legend = " ".join(f"<span style='color:{colour}'>■</span> {part}" for part, colour in keys)
    return f"<h2>KV memory by use</h2><p>{legend}</p>" + _bars(rows)


def latency_chart(by_rate: Mapping[float, Mapping[str, Result]]) -> str:
    """Return lines of mean normalised latency over the request rate, on a logarithmic scale."""
    names = list(next(iter(by_rate.values())))
    points = {
        name: [(rate, r[name].normalised_mean_s) for rate, r in by_rate.items()] for name in names
    }
    values = [value for line in points.values() for _, value in line]
    low, high = log10(min(values)), log10(max(values)) + 1e-9
    fastest = max(by_rate)
    height, bottom = 280, 30

    def place(rate: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 120) * rate / fastest
        return x, 10 + (height - bottom - 10) * (high - log10(value)) / (high - low)

    parts = []
    for (name, line), colour in zip(points.items(), LINES, strict=False):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in line))
        x, y = place(*line[-1])
        parts.append(f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts.append(f"<text x='{x + 6:.1f}' y='{y + 4:.1f}'>{escape(name)}</text>")
    for rate in by_rate:
        x, _ = place(rate, max(values))
        parts.append(f"<text x='{x:.1f}' y='{height - 8}' text-anchor='middle'>{rate:g}/s</text>")
    for value in (min(values), max(values)):
        _, y = place(fastest, value)
        label = f"{value:.3g} s/token"
        parts.append(f"<text x='{LEFT - 8}' y='{y + 4:.1f}' text-anchor='end'>{label}</text>")
    return "<h2>Mean normalised latency by request rate</h2>" + _svg(height, parts)


def _bars(rows: Sequence[tuple[str, Sequence[tuple[float, str]], str]]) -> str:
    """Draw a row per (name, parts as (share, colour), label)."""
    space = WIDTH - LEFT - 60
    parts = []
    for index, (name, shares, label) in enumerate(rows):
        y, x = index * ROW, float(LEFT)
        parts.append(f"<text x='{LEFT - 8}' y='{y + 16}' text-anchor='end'>{escape(name)}</text>")
        for share, colour in shares:
            width = share * space
            parts.append(
                f"<rect x='{x:.1f}' y='{y + 3}' width='{width:.1f}' height='{ROW - 8}' "
                f"fill='{colour}'><title>{share:.1%}</title></rect>"
            )
            x += width
        parts.append(f"<text x='{x + 6:.1f}' y='{y + 16}'>{escape(label)}</text>")
    return _svg(len(rows) * ROW, parts)


def _svg(height: int, parts: Sequence[str]) -> str:
    return f"<svg width='{WIDTH}' height='{height}' role='img'>{''.join(parts)}</svg>"
