"""How much of the room above LRU each eviction policy takes, on real and on made streams.

    python benchmarks/eviction.py                       # the Mooncake trace, made streams, a scan
    python benchmarks/eviction.py --trace my.jsonl --sizes 2000,8000 --policies lru,predict
    python benchmarks/eviction.py --quick --plot eviction.svg

Every policy replays the same prompts through the cache that serves (octavo.kvcache), one request
after the other, without a model. ``optimum`` knows the future (Belady); "gap" is the share closed
of the way from LRU to the optimum. A trace is a file of lines with ``hash_ids`` and
``input_length`` (Mooncake), or with ``token_ids`` (``--block-size`` says how many make a block).
Without ``--trace`` the Mooncake conversation trace is taken from ``--shared``, the project's shared
folder (by default ``../shared`` beside this clone).
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eviction_plot import line_chart

from octavo.core.errors import OctavoError
from octavo.kvcache.eviction.registry import EVICTION_POLICIES
from octavo.simulate.cache_replay import ReplayResult, replay
from octavo.simulate.clairvoyant import Clairvoyant
from octavo.workload.cache_trace import (
    CacheTrace,
    hash_trace,
    read_mooncake,
    read_sessions,
    read_token_ids,
)
from octavo.workload.synthetic import scanned, streams

OPTIMUM = "optimum"
SHARED = Path(__file__).resolve().parents[2] / "shared"
MOONCAKE = Path("traces", "mooncake", "conversation_trace.jsonl")
SESSIONS = Path("traces", "miniswe")


def main() -> None:
    """Print the tables."""
    args = parse()
    trace = open_trace(args)
    if args.quick:
        trace = trace.head(3000)
    compare_on_trace(trace, args.sizes, args.policies, args.plot)
    sessions = args.shared / SESSIONS
    extra = {"miniswe sessions": read_sessions(sessions)} if sessions.is_dir() else {}
    for size in args.stream_sizes:
        made = streams(size, min(args.requests, 4000) if args.quick else args.requests)
        compare_on_streams({**made, **extra}, size, args.policies)
    scan(args.policies, 1000)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="a trace file (default: Mooncake's)")
    parser.add_argument("--block-size", type=int, default=16, help="for traces of token ids")
    parser.add_argument("--shared", type=Path, default=SHARED, help="the shared folder")
    parser.add_argument("--sizes", type=numbers, default=[1000, 3000, 10_000, 30_000])
    parser.add_argument("--stream-sizes", type=numbers, default=[1000], help="for made streams")
    parser.add_argument("--requests", type=int, default=8000, help="of each made stream")
    parser.add_argument("--policies", type=names, default=list(EVICTION_POLICIES.names))
    parser.add_argument("--quick", action="store_true", help="3,000 requests, small streams")
    parser.add_argument("--plot", type=Path, help="write an SVG chart of hit ratio by size")
    return parser.parse_args()


def numbers(text: str) -> list[int]:
    """Read a list of numbers."""
    return [int(part) for part in text.split(",")]


def names(text: str) -> list[str]:
    """Read a list of policies; LRU is always among them, for comparison."""
    found = text.split(",")
    return found if "lru" in found else ["lru", *found]


def open_trace(args: argparse.Namespace) -> CacheTrace:
    """Read the trace that the command line names."""
    path: Path = args.trace or args.shared / MOONCAKE
    if not path.is_file():
        raise SystemExit(
            f"{path} is not there: name a trace with --trace, or the project's shared folder, "
            f"which holds {MOONCAKE}, with --shared."
        )
    with path.open(encoding="utf-8") as lines:
        by_hash = '"hash_ids"' in lines.readline()
    return read_mooncake(path) if by_hash else read_token_ids(path, args.block_size)


def compare_on_trace(
    trace: CacheTrace, sizes: Sequence[int], policies: Sequence[str], plot: Path | None
) -> None:
    """Print hit ratios and the share of the gap closed, and draw them."""
    print(
        f"{trace.name}: {len(trace.requests)} requests, {trace.num_tokens} tokens, "
        f"{trace.num_touches} blocks of {trace.tokens_per_block} tokens"
    )
    print(f"{'blocks':>7} {'policy':>9} {'token hits':>10} {'x LRU':>7} {'gap':>6} {'M/min':>6}")
    curves: dict[str, list[tuple[int, float]]] = {}
    for size in sizes:
        optimum = timed(trace, size, OPTIMUM)
        results = {name: timed(trace, size, name) for name in policies} | {OPTIMUM: optimum}
        base, best = results["lru"][0].token_hit_ratio, optimum[0].token_hit_ratio
        for name, (result, seconds) in results.items():
            ratio = result.token_hit_ratio
            gap = (ratio - base) / (best - base) if best > base else 0.0
            speed = trace.num_touches / seconds * 60e-6
            times = f"{ratio / base:.3f}" if base else "-"
            row = f"{size:7} {name:>9} {ratio:10.4f} {times:>7} {gap:6.1%} {speed:6.2f}"
            print(row, flush=True)
            curves.setdefault(name, []).append((size, ratio))
    if plot is not None:
        title = f"{trace.name}: share of prompt tokens found in the cache"
        plot.write_text(line_chart(title, "blocks", curves), encoding="utf-8")
        print(f"chart: {plot}")


def timed(trace: CacheTrace, size: int, name: str) -> tuple[ReplayResult, float]:
    """Replay under a policy, and say how much CPU time it took."""
    policy = Clairvoyant(trace) if name == OPTIMUM else name
    start = time.process_time()
    result = replay(trace, size, policy, on_request=Progress(trace, f"{name}, {size} blocks"))
    return result, time.process_time() - start


class Progress:
    """Says on a terminal how far a replay is."""

    def __init__(self, trace: CacheTrace, label: str) -> None:
        self._total = len(trace.requests)
        self._label = label
        self._shown = sys.stderr.isatty()

    def __call__(self, index: int, hits: int) -> None:
        """Take in that a request is done."""
        if self._shown and (index % 500 == 0 or index + 1 == self._total):
            end = "\r\033[K" if index + 1 == self._total else ""
            print(f"\r{self._label}: {index + 1}/{self._total}{end}", end="", file=sys.stderr)


def compare_on_streams(traces: dict[str, CacheTrace], size: int, policies: Sequence[str]) -> None:
    """Print, for each stream, LRU's ratio and the others' relative to it."""
    others = [name for name in policies if name != "lru"]
    print(f"\nmade streams, {size} blocks; LRU's token hits, and the others' relative to them")
    print(f"{'stream':>18} {'lru':>7} " + " ".join(f"{name:>8}" for name in others))
    for name, trace in traces.items():
        base = replay(trace, size, "lru").num_hit_tokens
        cells = []
        for policy in others:
            hits = replay(trace, size, policy).num_hit_tokens
            cells.append(f"{hits / base:8.3f}" if base else f"{'+' if hits else '='}{hits:>7}")
        print(f"{name:>18} {base / trace.num_tokens:7.4f} " + " ".join(cells), flush=True)


def scan(policies: Sequence[str], size: int) -> None:
    """Print how much of its hits a hot set keeps while one-off documents pass through."""
    print(f"\nhot set of {size // 2} blocks of {size}, a fifth of the requests scans {size // 10}")
    for name in policies:
        with_scan, without = (hot_hits(name, size, share) for share in (0.2, 0.0))
        print(
            f"{name:>9} {with_scan:7.4f} of hot blocks hit, unscanned {without:7.4f}: "
            f"{with_scan / without:.1%} kept",
            flush=True,
        )


def hot_hits(policy: str, size: int, scan_share: float) -> float:
    """Return the share of touches of hot blocks that hit, after a warm-up."""
    prompts = scanned(6000, size // 4, scan_share, size // 10)
    hits: list[int] = []
    replay(
        hash_trace("scan", prompts), size, policy, on_request=lambda _, count: hits.append(count)
    )
    hot = [
        min(count, 2) for prompt, count in zip(prompts, hits, strict=True) if prompt[0][0] == "hot"
    ]
    measured = hot[len(hot) // 2 :]
    return sum(measured) / (2 * len(measured))


if __name__ == "__main__":
    try:
        main()
    except OctavoError as error:
        raise SystemExit(error.message) from None
