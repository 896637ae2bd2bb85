"""A line chart as SVG, with nothing but the standard library."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 420, 60, 48, 110, 48
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#9c6b4e", "#222222", "#a463f2")


def line_chart(title: str, x_label: str, curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Draw curves of (x, ratio) over a logarithmic x axis."""
    xs = sorted({x for points in curves.values() for x, _ in points})
    top = max(0.05, max(y for points in curves.values() for _, y in points))

    def place(x: int, y: float) -> tuple[float, float]:
        span = math.log(xs[-1] / xs[0]) or 1.0
        left = LEFT + (WIDTH - LEFT - RIGHT) * math.log(x / xs[0]) / span
        return left, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top

    parts = [text(LEFT, 24, title, size=15)]
    for step in range(5):
        y = top * step / 4
        _, height = place(xs[0], y)
        parts.append(f'<path d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, height + 4, f"{y:.2f}", anchor="end"))
    for x in xs:
        parts.append(text(place(x, 0)[0], HEIGHT - BOTTOM + 20, f"{x:,}", anchor="middle"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, x_label, anchor="middle"))
    for index, (name, points) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        line = " ".join(f"{left:.1f},{height:.1f}" for left, height in (place(*p) for p in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<path d="M{WIDTH - 100} {TOP + 20 * index}h16" stroke="{colour}"/>')
        parts.append(text(WIDTH - 78, TOP + 4 + 20 * index, name))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>\n'
        f"{body}\n</svg>\n"
    )


def text(x: float, y: float, value: str, *, anchor: str = "start", size: int = 12) -> str:
    """Return a piece of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">'
        f"{escape(value)}</text>"
    )
