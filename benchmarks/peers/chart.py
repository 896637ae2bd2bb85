"""A bar chart of a comparison as one SVG file, readable without any script or network."""

from html import escape
from typing import Final

from report import Comparison
from scenarios import Scenario
from variants import OCTAVO

WIDTH: Final = 760
LABEL_WIDTH: Final = 150
VALUE_WIDTH: Final = 90
BAR: Final = 16
GAP: Final = 4
TITLE: Final = 34
MARGIN: Final = 16
COLOURS: Final = {
    OCTAVO: "#b5462f",
    "openvino": "#3f6d9e",
    "llama.cpp": "#6f8f5a",
    "vllm": "#8a6ba8",
}
OTHER_COLOUR: Final = "#777777"


def svg(comparison: Comparison) -> str:
    """Return the chart: a group of bars a scenario, longer always meaning faster."""
    parts: list[str] = []
    y = MARGIN
    for scenario in comparison.scenarios:
        group, y = _group(comparison, scenario, y)
        parts += group
    style = "font: 12px system-ui, sans-serif; fill: #222"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + MARGIN}" '
        f'width="{WIDTH}" height="{y + MARGIN}" role="img" aria-label="Octavo against its peers">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n<g style="{style}">\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>\n"
    )


def _group(comparison: Comparison, scenario: Scenario, y: int) -> tuple[list[str], int]:
    """Return a scenario's bars from ``y`` down, and where they end."""
    title = f"{scenario.name} ({scenario.figure}, {scenario.unit})"
    parts = [_text(MARGIN, y + TITLE - 14, title, "font-weight: bold")]
    y += TITLE
    bars = [
        (item.variant, median, 1 / median if scenario.figure == "wall" else median)
        for item in comparison.engines
        if (median := comparison.median(scenario, item.variant.name)) is not None
    ]
    fastest = max((speed for _, _, speed in bars), default=1.0)
    for variant, median, speed in bars:
        length = (WIDTH - LABEL_WIDTH - VALUE_WIDTH - 2 * MARGIN) * speed / fastest
        colour = COLOURS.get(variant.peer, OTHER_COLOUR)
        x = MARGIN + LABEL_WIDTH
        parts += [
            _text(MARGIN, y + BAR - 4, variant.name),
            f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>',
            _text(x + length + 6, y + BAR - 4, f"{median:.4g}"),
        ]
        y += BAR + GAP
    return parts, y


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" style="{style}">{escape(text)}</text>'
