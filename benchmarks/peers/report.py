"""From single runs to medians, ratios, a Markdown table and a JSON file."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from machine import Machine
from scenarios import Scenario
from variants import OCTAVO, Variant


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one scenario on one engine."""

    scenario: str
    variant: str
    round: int
    wall_s: float
    figure: float
    stolen_share: float
    """CPU time that the hypervisor gave to other guests meanwhile."""
    times_s: Sequence[Sequence[float]] | None
    """When each token came, where the figure needs it."""
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """An engine that took part."""

    variant: Variant
    version: str
    load_s: float
    settings: Mapping[str, Any]
    install_s: float | None
    size_mb: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that was seen."""

    model: str
    threads: int
    machine: Machine
    ceilings: tuple[Mapping[str, Any] | None, ...]
    """One a round: the machine's state may change within a run."""
    scenarios: tuple[Scenario, ...]
    engines: tuple[Loaded, ...]
    absent: Mapping[str, str]
    """Why a variant is missing, or where it fell out, in a sentence each."""
    measurements: tuple[Measurement, ...]

    def median(self, scenario: Scenario, variant: str) -> float | None:
        """Return the median figure, None if it never ran."""
        figures = self._figures(scenario, variant)
        return statistics.median(figures) if figures else None

    def spread(self, scenario: Scenario, variant: str) -> tuple[float, float]:
        """Return the lowest and the highest figure."""
        figures = self._figures(scenario, variant)
        return min(figures), max(figures)

    def octavo_variants(self) -> list[str]:
        """Names of Octavo's own variants."""
        return [item.variant.name for item in self.engines if item.variant.peer == OCTAVO]

    def best_ratios(self, scenario: Scenario, variant: str) -> dict[str, float]:
        """Return by each peer how many times faster ``variant`` is than that peer's best."""
        own = self.median(scenario, variant)
        ratios: dict[str, float] = {}
        for item in self.engines:
            other = self.median(scenario, item.variant.name)
            if own is not None and other is not None and item.variant.peer != OCTAVO:
                ratio, peer = scenario.ratio(own, other), item.variant.peer
                ratios[peer] = min(ratio, ratios.get(peer, ratio))
        return ratios

    def agreement(self, scenario: Scenario, variant: str) -> tuple[float, float] | None:
        """Compare greedy tokens with the first Octavo variant's.

        Returns the share of requests whose first token is the same, and the mean share of tokens
        before the first difference; None if there is nothing to compare.
        """
        names = self.octavo_variants()
        ours = self._tokens(scenario, names[0]) if names else {}
        theirs = self._tokens(scenario, variant)
        pairs = [
            (left, right)
            for number in ours.keys() & theirs.keys()
            for left, right in zip(ours[number], theirs[number], strict=True)
        ]
        if not pairs:
            return None
        prefixes = [_common_prefix(left, right) for left, right in pairs]
        first = sum(length > 0 for length in prefixes) / len(pairs)
        return first, statistics.mean(prefixes) / scenario.max_tokens

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, medians and ratios included, for a JSON file."""
        summary = {
            scenario.name: {
                "unit": scenario.unit,
                "medians": {
                    item.variant.name: self.median(scenario, item.variant.name)
                    for item in self.engines
                },
                "ratios_to_the_best_of_each_peer": {
                    name: self.best_ratios(scenario, name) for name in self.octavo_variants()
                },
            }
            for scenario in self.scenarios
        }
        return {
            "summary": summary,
            "model": self.model,
            "threads": self.threads,
            "machine": self.machine.as_dict(),
            "ceilings": list(self.ceilings),
            "engines": [asdict(item) for item in self.engines],
            "absent": dict(self.absent),
            "scenarios": [asdict(scenario) for scenario in self.scenarios],
            "measurements": [asdict(item) for item in self.measurements],
        }

    def _figures(self, scenario: Scenario, variant: str) -> list[float]:
        return [item.figure for item in self._of(scenario, variant)]

    def _tokens(self, scenario: Scenario, variant: str) -> dict[int, tuple[tuple[int, ...], ...]]:
        return {item.round: item.tokens for item in self._of(scenario, variant)}

    def _of(self, scenario: Scenario, variant: str) -> Iterable[Measurement]:
        return (
            item
            for item in self.measurements
            if item.scenario == scenario.name and item.variant == variant
        )


def markdown(comparison: Comparison) -> str:
    """Return the whole report as Markdown."""
    parts = [
        f"Model {comparison.model}, {comparison.threads} threads",
        str(comparison.machine),
        _ceilings(comparison.ceilings),
        *(f"absent: {name}: {why}" for name, why in comparison.absent.items()),
        *(_table(comparison, scenario) for scenario in comparison.scenarios),
    ]
    if comparison.octavo_variants():
        parts.append(_ratios(comparison))
    return "\n\n".join(parts)


def _ceilings(ceilings: Sequence[Mapping[str, Any] | None]) -> str:
    if not any(ceilings):
        return "ceilings: not measured (benchmarks/kernels.py is not here or has none)"
    lines = [
        f"round {number}: {dict(item) if item else 'not measured'}"
        for number, item in enumerate(ceilings, 1)
    ]
    return "ceilings:\n" + "\n".join(lines)


def _table(comparison: Comparison, scenario: Scenario) -> str:
    title = f"### {scenario.name}: {_described(scenario)}, {scenario.figure} in {scenario.unit}"
    head = ("engine", "median", "lowest – highest", "first token = octavo's", "tokens = octavo's")
    rows = []
    for item in comparison.engines:
        name = item.variant.name
        median = comparison.median(scenario, name)
        if median is None:
            continue
        low, high = comparison.spread(scenario, name)
        same = comparison.agreement(scenario, name)
        shares = ("–", "–") if same is None else tuple(f"{share:.0%}" for share in same)
        rows.append((f"{name} {item.version}", _number(median), _range(low, high), *shares))
    return title + "\n\n" + _lines([head, *rows])


def _ratios(comparison: Comparison) -> str:
    peers = list(
        dict.fromkeys(i.variant.peer for i in comparison.engines if i.variant.peer != OCTAVO)
    )
    rows = [("scenario", "octavo variant", *peers)]
    for scenario in comparison.scenarios:
        for name in comparison.octavo_variants():
            ratios = comparison.best_ratios(scenario, name)
            cells = (f"{ratios[peer]:.2f} ×" if peer in ratios else "–" for peer in peers)
            rows.append((scenario.name, name, *cells))
    return "### How many times faster Octavo is than each peer's best variant\n\n" + _lines(rows)


def _described(scenario: Scenario) -> str:
    counts = {n: scenario.prompt_lengths.count(n) for n in dict.fromkeys(scenario.prompt_lengths)}
    requests = " + ".join(f"{count} × {length} in" for length, count in counts.items())
    return f"{requests}, {scenario.max_tokens} out"


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    rule = ["-" * width for width in widths]
    return "\n".join(f"| {' | '.join(row)} |" for row in [padded[0], rule, *padded[1:]])


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _range(low: float, high: float) -> str:
    return f"{_number(low)} – {_number(high)}"


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    for index, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine != other:
            return index
    return min(len(left), len(right))
