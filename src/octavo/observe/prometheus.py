"""Turns engine events into Prometheus series, under Octavo's own or vLLM's names."""

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from octavo.core.errors import SettingError
from octavo.core.events import (
    Event,
    EvictionTotals,
    RequestFinished,
    RequestRejected,
    SchedulerStats,
    StateChanged,
    StepCompleted,
)
from octavo.core.request import FinishReason, RequestStats
from octavo.observe import buckets, series
from octavo.observe.buckets import BucketCounts

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Media type of what ``PrometheusObserver.render`` returns."""

ENGINE_LABEL: Final = "0"
"""Value of the ``engine`` label: one engine a process."""

SHOWN_STATUSES: Final = (400, 401, 404, 429, 503)
"""Rejections shown as 0 before the first, so that a rate over them is right from the start."""


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What ``cache_config_info`` says; field names are vLLM's labels."""

    block_size: int
    num_gpu_blocks: int
    """Blocks in the pool, wherever they lie; the name is what gateways look for."""
    enable_prefix_caching: bool
    cache_dtype: str


class PrometheusObserver(Collector):
    """Counts events; ``render`` gives the text that Prometheus scrapes.

    Events may come from any thread. Every label value is ours or the operator's, never a client's.

    Raises:
        SettingError: no metric name can begin with ``prefix``.
    """

    def __init__(self, *, model_name: str, prefix: str = "octavo:") -> None:
        if not re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
            raise SettingError(
                "--metrics-prefix must be letters, digits, _ and : (and begin with no digit), "
                f"not {prefix!r:.100}.",
                name="--metrics-prefix",
            )
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": ENGINE_LABEL}
        self._lock = threading.Lock()
        self._cache_info: CacheInfo | None = None
        self._max_model_len = float("inf")
        self._gauges = dict.fromkeys(series.GAUGES, 0.0)
        self._blocks = {"free": 0, "cached": 0, "used": 0}
        self._counters = dict.fromkeys(series.COUNTERS, 0)
        self._eviction: tuple[EvictionTotals, ...] = ()
        self._finished = dict.fromkeys(FinishReason, 0)
        self._rejected = dict.fromkeys(SHOWN_STATUSES, 0)
        self._latencies = {
            name: BucketCounts(bounds) for name, (bounds, _) in series.LATENCIES.items()
        }
        self._tokens = {name: BucketCounts(buckets.TOKENS) for name in series.REQUEST_TOKENS}
        self._step_tokens = BucketCounts(buckets.STEP_TOKENS)
        self._prompt_tokens_computed = 0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def configure(self, cache: CacheInfo, *, max_model_len: int) -> None:
        """Say what the engine is like, once it is known: labels and range of token buckets."""
        with self._lock:
            self._cache_info = cache
            self._max_model_len = max_model_len
            self._blocks["free"] = cache.num_gpu_blocks

    def on_event(self, event: Event) -> None:
        """Count the event."""
        with self._lock:
            match event:
                case StepCompleted():
                    self._count_step(event)
                case StateChanged(stats):
                    self._take_stats(stats)
                case RequestFinished(stats):
                    self._count_request(stats)
                case RequestRejected(status):
                    self._rejected[status] = self._rejected.get(status, 0) + 1

    def render(self) -> bytes:
        """Return all series as text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield each series once; called by the registry."""
        with self._lock:
            yield from self._collect_gauges()
            yield from self._collect_counters()
            yield from self._collect_histograms()

    def _count_step(self, event: StepCompleted) -> None:
        self._prompt_tokens_computed += event.num_prompt_tokens
        self._counters["generation_tokens"] += event.num_generation_tokens
        self._latencies["time_to_first_token_seconds"].observe_all(event.first_token_latencies_s)
        self._latencies["inter_token_latency_seconds"].observe_all(event.inter_token_latencies_s)
        num_tokens = event.num_prompt_tokens + event.num_generation_tokens
        if num_tokens:
            self._step_tokens.observe(num_tokens)
            self._latencies["step_time_seconds"].observe(event.duration_s)
        self._take_stats(event.stats)

    def _take_stats(self, stats: SchedulerStats) -> None:
        usage = stats.usage
        self._gauges["num_requests_running"] = stats.num_running
        self._gauges["num_requests_waiting"] = stats.num_waiting
        self._gauges["kv_cache_usage_perc"] = usage.used_ratio
        self._blocks = {"free": usage.num_free, "cached": usage.num_cached, "used": usage.num_used}
        self._counters["num_preemptions"] = stats.preemptions_total
        self._counters["prefix_cache_queries"] = stats.prefix_queries_total
        self._counters["prefix_cache_hits"] = stats.prefix_hits_total
        self._counters["preempted_prefix_cache_queries"] = stats.preempted_queries_total
        self._counters["preempted_prefix_cache_hits"] = stats.preempted_hits_total
        self._counters["kv_cache_evictions"] = stats.evictions_total
        self._eviction = stats.eviction
        self._counters["prompt_tokens_cached"] = stats.prefix_hits_total
        self._counters["prompt_tokens"] = self._prompt_tokens_computed + stats.prefix_hits_total

    def _count_request(self, stats: RequestStats) -> None:
        self._finished[stats.finish_reason] += 1
        for name, seconds in _request_latencies(stats).items():
            self._latencies[name].observe(seconds)
        for name, tokens in _request_tokens(stats).items():
            self._tokens[name].observe(tokens)

    def _collect_gauges(self) -> Iterator[Metric]:
        for name, text in series.GAUGES.items():
            yield self._series(GaugeMetricFamily, (name, text), [({}, self._gauges[name])])
        states = [({"state": state}, count) for state, count in self._blocks.items()]
        yield self._series(GaugeMetricFamily, series.KV_BLOCKS, states)
        if self._eviction:
            rows = [({"policy": item.policy}, item.is_in_force) for item in self._eviction]
            yield self._series(GaugeMetricFamily, series.EVICTION_POLICY_INFO, rows)
        if self._cache_info is not None:
            labels = {name: str(value) for name, value in asdict(self._cache_info).items()}
            yield self._series(GaugeMetricFamily, series.CACHE_CONFIG_INFO, [(labels, 1)])

    def _collect_counters(self) -> Iterator[Metric]:
        for name, text in series.COUNTERS.items():
            yield self._series(CounterMetricFamily, (name, text), [({}, self._counters[name])])
        if self._eviction:
            for name, (field, text) in series.EVICTION.items():
                totals = [({"policy": e.policy}, getattr(e, field)) for e in self._eviction]
                yield self._series(CounterMetricFamily, (name, text), totals)
        reasons = [({"finished_reason": item.value}, n) for item, n in self._finished.items()]
        yield self._series(CounterMetricFamily, series.REQUEST_SUCCESS, reasons)
        statuses = [({"status": str(status)}, n) for status, n in self._rejected.items()]
        yield self._series(CounterMetricFamily, series.REQUESTS_REJECTED, statuses)

    def _collect_histograms(self) -> Iterator[Metric]:
        for name, (_, text) in series.LATENCIES.items():
            yield self._histogram(name, text, self._latencies[name])
        for name, text in series.REQUEST_TOKENS.items():
            yield self._histogram(name, text, self._tokens[name], self._max_model_len)
        name, text = series.STEP_TOKENS_SERIES
        yield self._histogram(name, text, self._step_tokens)

    def _series(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        entry: tuple[str, str],
        rows: Sequence[tuple[Mapping[str, str], float]],
    ) -> Metric:
        """Return a family with a row per value; every row has the same further labels."""
        name, text = entry
        family = kind(self._prefix + name, text, labels=[*self._labels, *rows[0][0]])
        for labels, value in rows:
            family.add_metric([*self._labels.values(), *labels.values()], value)
        return family

    def _histogram(
        self, name: str, text: str, counts: BucketCounts, limit: float = float("inf")
    ) -> Metric:
        family = HistogramMetricFamily(self._prefix + name, text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), counts.cumulative(limit), counts.total)
        return family


def _request_latencies(stats: RequestStats) -> dict[str, float]:
    """Return the phases that the request entered; they add up to its end-to-end time."""
    end = stats.finish_time
    started, first = stats.first_scheduled_time, stats.first_token_time
    seconds = {
        "e2e_request_latency_seconds": end - stats.arrival_time,
        "request_queue_time_seconds": (end if started is None else started) - stats.arrival_time,
    }
    if started is not None:
        seconds["request_inference_time_seconds"] = end - started
        seconds["request_prefill_time_seconds"] = (end if first is None else first) - started
    if first is not None:
        seconds["request_decode_time_seconds"] = end - first
        if stats.last_token_time is not None and stats.num_generation_tokens > 1:
            gaps = stats.num_generation_tokens - 1
            seconds["request_time_per_output_token_seconds"] = (
                stats.last_token_time - first
            ) / gaps
    return seconds


def _request_tokens(stats: RequestStats) -> dict[str, int]:
    tokens = {
        "request_prompt_tokens": stats.num_prompt_tokens,
        "request_generation_tokens": stats.num_generation_tokens,
        "request_max_num_generation_tokens": stats.num_generation_tokens,
        "request_params_max_tokens": stats.max_tokens,
    }
    if stats.first_scheduled_time is not None:
        computed = stats.num_prompt_tokens - stats.num_cached_tokens
        tokens["request_prefill_kv_computed_tokens"] = computed
    return tokens
