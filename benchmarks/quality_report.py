"""The figures of ``quality.py`` as tables, and what they say of the default settings."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from quality_metrics import Quality

AUTO: Final = "auto"
"""What the names of variants begin with that are judged: the default settings, or one changed."""
MOST_EXTRA_PERPLEXITY: Final = 0.01
"""What the default settings may cost against the file's own weights in float32."""


@dataclass(frozen=True, slots=True)
class Result:
    """One engine against the reference."""

    name: str
    settings: Mapping[str, Any]
    together: Quality
    """All tokens, computed in the engine's steps."""
    tails: Quality
    """The last tokens of each document, out of the same steps."""
    tails_single: Quality
    """The same tokens, computed one at a time."""

    @property
    def formats(self) -> str:
        """What Octavo says of its weights and KV; nothing of a peer, whose name tells."""
        if "precision" not in self.settings:
            return ""
        return f"{self.settings['precision']}, KV {self.settings['dtype']}"


@dataclass(frozen=True, slots=True)
class Report:
    """All of a run."""

    model: str
    reference: str
    sizes: Mapping[str, int]
    """Tokens of each source of text."""
    longest: int
    """Tokens of the longest document."""
    results: tuple[Result, ...]
    absent: Mapping[str, str]
    peer_of: Mapping[str, str]
    """The peer of each of their variants."""

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)


def markdown(report: Report) -> str:
    """Return tables and verdicts."""
    sizes = ", ".join(f"{count} of {name}" for name, count in report.sizes.items())
    about = (
        f"Against {report.reference}, the file's own weights; tokens: {sizes}; contexts up to "
        f"{report.longest}. KL in nats over the whole vocabulary; ± is one standard error."
    )
    lines = [
        f"# Quality of {report.model}",
        "",
        about,
        "",
        "| engine | formats | mean KL | 99 % KL | perplexity | to reference's | same top token |",
        "|---|---|---:|---:|---:|---:|---:|",
        *(_row(result) for result in report.results),
        "",
        "Decode: the last tokens of each document one at a time, and the same out of whole steps.",
        "",
        "| engine | tokens | mean KL | in steps | 99 % KL | in steps | perplexity | in steps |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
        *(_decode_row(result) for result in report.results),
        "",
        *_verdicts(report),
        *(f"* {name} stayed out: {why}" for name, why in report.absent.items()),
    ]
    return "\n".join(lines).rstrip()


def _row(result: Result) -> str:
    found = result.together
    return (
        f"| {result.name} | {result.formats} | {found.mean_kl:.2e} | {found.kl_99:.2e} "
        f"| {found.perplexity:.3f} | {_extra(found)} | {found.top1_agreement:.1%} |"
    )


def _decode_row(result: Result) -> str:
    single, steps = result.tails_single, result.tails
    return (
        f"| {result.name} | {single.num_tokens} | {single.mean_kl:.2e} | {steps.mean_kl:.2e} "
        f"| {single.kl_99:.2e} | {steps.kl_99:.2e} "
        f"| {single.perplexity:.3f} | {steps.perplexity:.3f} |"
    )


def _extra(found: Quality) -> str:
    return f"{found.perplexity_ratio - 1:+.2%} ± {found.ratio_error:.2%}"


def _verdicts(report: Report) -> list[str]:
    """Say of each variant called ``auto...`` whether it keeps its bound and each peer's quality."""
    peers = [result for result in report.results if result.name in report.peer_of]
    lines: list[str] = []
    for result in report.results:
        if not result.name.startswith(AUTO):
            continue
        found = result.together
        verb = "is within" if found.perplexity_ratio - 1 <= MOST_EXTRA_PERPLEXITY else "MISSES"
        bound = f"{verb} {MOST_EXTRA_PERPLEXITY:.0%} of float32"
        lines.append(f"* {result.name}: perplexity {_extra(found)}, {bound}.")
        lines += [_against(result.name, found, peer) for peer in peers]
    return lines


def _against(name: str, found: Quality, peer: Result) -> str:
    theirs = peer.together
    word = "no worse" if found.mean_kl <= theirs.mean_kl else "WORSE"
    return (
        f"* {name} is {word} than {peer.name} by mean KL ({found.mean_kl:.2e} against "
        f"{theirs.mean_kl:.2e}); perplexity {_extra(found)} against {_extra(theirs)}."
    )
