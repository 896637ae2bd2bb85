"""What a run of one system shows: speed, latencies, and how its KV memory was spent."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from common import quantile

from octavo.core.events import SchedulerStats
from octavo.core.request import RequestStats
from octavo.scheduler.occupancy import KVOccupancy
from octavo.scheduler.outcome import StepUpdate

PERCENTILES: Final = (0.5, 0.9, 0.99)
PARTS: Final = ("stored", "pending", "reserved", "internal", "external")


@dataclass
class MemoryAccount:
    """Slots by use, averaged over time: sampled after each step, weighted with its duration."""

    seconds: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    peak_allocated: int = 0

    def add(self, occupancy: KVOccupancy, seconds: float) -> None:
        """Take in the state after a step."""
        self.seconds += seconds
        for name in ("total", "allocated", *PARTS):
            slots: int = getattr(occupancy, f"num_{name}")
            self.sums[name] = self.sums.get(name, 0.0) + slots * seconds
        self.peak_allocated = max(self.peak_allocated, occupancy.num_allocated)

    def share(self, name: str) -> float:
        """Return the average share of the pool."""
        return self.sums[name] / self.sums["total"]

    @property
    def waste_ratio(self) -> float:
        """Time-averaged share of the allocated slots that belonged to no token."""
        return (self.sums["reserved"] + self.sums["internal"]) / self.sums["allocated"]


@dataclass
class Recorder:
    """Collects while a system runs."""

    memory: MemoryAccount = field(default_factory=MemoryAccount)
    finished: list[RequestStats] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    running_seconds: float = 0.0

    def add(
        self, update: StepUpdate, occupancy: KVOccupancy, stats: SchedulerStats, seconds: float
    ) -> None:
        """Take in a step."""
        self.memory.add(occupancy, seconds)
        self.running_seconds += stats.num_running * seconds
        self.finished += update.finished
        for output in update.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)

    def result(self, seconds: float, stats: SchedulerStats) -> "Result":
        """Sum up."""
        done = self.finished
        spread = [(_of(r.first_token_time), _of(r.last_token_time), r) for r in done]
        outputs = [str(self.tokens[name]).encode() for name in sorted(self.tokens)]
        return Result(
            seconds=seconds,
            num_requests=len(done),
            num_output_tokens=sum(r.num_generation_tokens for r in done),
            normalised_s=[(r.finish_time - r.arrival_time) / r.num_generation_tokens for r in done],
            ttft_s=[first - r.arrival_time for first, _, r in spread],
            tpot_s=[
                (last - first) / (r.num_generation_tokens - 1)
                for first, last, r in spread
                if r.num_generation_tokens > 1
            ],
            memory={name: self.memory.share(name) for name in ("allocated", *PARTS)},
            peak_allocated_slots=self.memory.peak_allocated,
            waste_ratio=self.memory.waste_ratio,
            mean_running=self.running_seconds / self.memory.seconds,
            hit_ratio=stats.prefix_hits_total / max(1, stats.prefix_queries_total),
            num_preemptions=stats.preemptions_total,
            digests=tuple(hashlib.blake2b(text, digest_size=8).hexdigest() for text in outputs),
        )


@dataclass(frozen=True)
class Result:
    """One system on one workload."""

    seconds: float
    """From the first arrival to the last token."""
    num_requests: int
    num_output_tokens: int
    normalised_s: Sequence[float]
    """Per request: arrival to end, divided by its output tokens (Orca, PagedAttention)."""
    ttft_s: Sequence[float]
    tpot_s: Sequence[float]
    memory: dict[str, float]
    """Average share of the pool: allocated, and the parts of ``KVOccupancy``."""
    peak_allocated_slots: int
    waste_ratio: float
    mean_running: float
    hit_ratio: float
    num_preemptions: int
    digests: tuple[str, ...]
    """Of each request's output tokens, by request."""

    @property
    def throughput(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds

    @property
    def normalised_mean_s(self) -> float:
        """Mean normalised latency in seconds a token."""
        return sum(self.normalised_s) / len(self.normalised_s)

    def as_json(self) -> dict[str, object]:
        """Return the figures that are reported."""
        figures: dict[str, object] = {
            "output_tokens_per_s": self.throughput,
            "seconds": self.seconds,
            "num_requests": self.num_requests,
            "num_output_tokens": self.num_output_tokens,
            "kv_share_of_pool": self.memory,
            "kv_waste_ratio": self.waste_ratio,
            "peak_allocated_slots": self.peak_allocated_slots,
            "mean_running": self.mean_running,
            "prefix_hit_ratio": self.hit_ratio,
            "num_preemptions": self.num_preemptions,
            "normalised_latency_mean_s": self.normalised_mean_s,
        }
        for name in ("normalised_s", "ttft_s", "tpot_s"):
            values: Sequence[float] = getattr(self, name)
            figures[name] = {f"p{100 * q:.0f}": quantile(values, q) for q in PERCENTILES if values}
        return figures


def table(results: dict[str, Result]) -> str:
    """Return the table that is printed."""
    head = (
        f"{'':<12}{'out tok/s':>10}{'normalised latency s/token':>31}{'TTFT s':>31}{'TPOT s':>31}"
    )
    lines = [head, f"{'':<22}" + f"{'p50':>11}{'p90':>10}{'p99':>10}" * 3]
    for name, result in results.items():
        cells = "".join(
            _percentiles(v) for v in (result.normalised_s, result.ttft_s, result.tpot_s)
        )
        lines.append(f"{name:<12}{result.throughput:>10.1f}{cells}")
    lines += ["", f"{'':<12}" + "".join(f"{h:>11}" for h in _MEMORY_HEAD)]
    for name, result in results.items():
        shares = [f"{result.memory[part]:.1%}" for part in ("allocated", *PARTS)]
        cells = [*shares, f"{result.waste_ratio:.1%}", f"{result.mean_running:.1f}"]
        cells += [f"{result.num_preemptions}", f"{result.hit_ratio:.1%}"]
        lines.append(f"{name:<12}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)


_MEMORY_HEAD: Final = ("allocated", *PARTS, "KV waste", "running", "preempted", "cache hits")


def _percentiles(values: Sequence[float]) -> str:
    p50, p90, p99 = (quantile(values, q) if values else float("nan") for q in PERCENTILES)
    return f"{p50:>11.3f}{p90:>10.3f}{p99:>10.3f}"


def _of(time: float | None) -> float:
    if time is None:
        raise ValueError("a request ended without a token")
    return time
