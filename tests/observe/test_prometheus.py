"""Metrics: names, labels and arithmetic, read back through the official parser."""

import math
import re
import subprocess
import sys
from dataclasses import astuple, replace

import pytest

from octavo.core.errors import SettingError
from octavo.core.events import (
    CacheUsage,
    EvictionTotals,
    RequestFinished,
    RequestRejected,
    StateChanged,
)
from octavo.core.request import FinishReason
from octavo.observe import series
from octavo.observe.prometheus import CacheInfo, PrometheusObserver
from support import REPO
from support_observe import FINISHED, STATS, STEP, Scrape, finished

DASHBOARD = (
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
    "inter_token_latency_seconds_bucket",
    "inter_token_latency_seconds_sum",
    "inter_token_latency_seconds_count",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "kv_cache_usage_perc",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_success_total",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
)
"""Every series that vLLM's bundled Grafana dashboard reads."""


@pytest.fixture
def observer() -> PrometheusObserver:
    """An observer of an engine with 100 blocks."""
    observer = PrometheusObserver(model_name="smollm2")
    observer.configure(CacheInfo(16, 100, True, "float32"), max_model_len=2048)
    return observer


@pytest.mark.parametrize("prefix", ["octavo:", "vllm:"])
def test_every_name_a_dashboard_reads_exists_before_the_first_request(prefix: str) -> None:
    """ME-11: turns red if a series is renamed, loses its suffix or starts absent instead of 0."""
    scrape = Scrape(PrometheusObserver(model_name="m", prefix=prefix))
    for name in DASHBOARD:
        assert scrape.all(prefix + name, model_name="m", engine="0"), name


@pytest.mark.parametrize("prefix", ["octavo:", "vllm:"])
def test_each_series_has_its_type_and_help(prefix: str) -> None:
    """ME-11: turns red if a counter is exposed without _total, or HELP or TYPE is missing."""
    families = Scrape(PrometheusObserver(model_name="m", prefix=prefix)).families
    counters = (*series.COUNTERS, series.REQUEST_SUCCESS[0], series.REQUESTS_REJECTED[0])
    kinds = {
        "gauge": (*series.GAUGES, series.KV_BLOCKS[0]),
        "counter": counters,
        "histogram": (*series.LATENCIES, *series.REQUEST_TOKENS, series.STEP_TOKENS_SERIES[0]),
    }
    for kind, names in kinds.items():
        for name in names:
            family = families[prefix + name]
            assert family.type == kind, name
            assert family.documentation, name
    for name in counters:
        samples = families[prefix + name].samples
        assert {sample.name for sample in samples} == {f"{prefix}{name}_total"}


def test_gauges_are_those_of_the_last_change(observer: PrometheusObserver) -> None:
    """Turns red if an abort between steps leaves the gauges as they were."""
    usage = CacheUsage(num_total=100, num_free=50, num_cached=20, num_used=30)
    busy = replace(STATS, num_running=3, num_waiting=2, usage=usage)
    observer.on_event(replace(STEP, stats=busy))
    scrape = Scrape(observer)
    assert scrape("octavo:num_requests_running") == 3
    assert scrape("octavo:num_requests_waiting") == 2
    assert scrape("octavo:kv_cache_usage_perc") == pytest.approx(0.3)
    states = {state: scrape("octavo:kv_cache_blocks", state=state) for state in ("free", "cached")}
    assert states == {"free": 50, "cached": 20}
    observer.on_event(StateChanged(STATS))
    scrape = Scrape(observer)
    assert scrape("octavo:num_requests_running") == scrape("octavo:kv_cache_usage_perc") == 0
    assert scrape("octavo:kv_cache_blocks", state="used") == 0


def test_cache_settings_are_labels(observer: PrometheusObserver) -> None:
    """Turns red if a gateway can no longer read block size or block count."""
    name = "octavo:cache_config_info"
    labels = {"block_size": "16", "num_gpu_blocks": "100", "enable_prefix_caching": "True"}
    assert Scrape(observer)(name, **labels) == 1


def test_recompute_after_preemption_is_no_prefix_hit(observer: PrometheusObserver) -> None:
    """ME-01: turns red if resumed sequences' tokens flow into prefix_cache_queries or _hits."""
    stats = replace(
        STATS,
        prefix_queries_total=1000,
        prefix_hits_total=0,
        preemptions_total=4,
        preempted_queries_total=400,
        preempted_hits_total=320,
    )
    observer.on_event(replace(STEP, num_prompt_tokens=1080, stats=stats))
    scrape = Scrape(observer)
    assert scrape("octavo:prefix_cache_queries_total") == 1000
    assert scrape("octavo:prefix_cache_hits_total") == 0
    assert scrape("octavo:preempted_prefix_cache_queries_total") == 400
    assert scrape("octavo:preempted_prefix_cache_hits_total") == 320
    assert scrape("octavo:num_preemptions_total") == 4


def test_without_queries_no_value_is_nan(observer: PrometheusObserver) -> None:
    """ME-01: turns red if a ratio over nothing is computed for the exposition."""
    assert not any(math.isnan(value) for value in Scrape(observer).samples.values())


def test_every_accepted_request_ends_in_one_reason(observer: PrometheusObserver) -> None:
    """ME-03: turns red if aborted requests are left out, or rejected ones counted with them."""
    reasons = [FinishReason.ABORT] * 5 + [FinishReason.STOP] * 3 + [FinishReason.LENGTH] * 2
    for reason in [*reasons, FinishReason.ERROR]:
        observer.on_event(RequestFinished(finished(finish_reason=reason)))
    for _ in range(2):
        observer.on_event(RequestRejected(400))
    observer.on_event(RequestRejected(418))
    scrape = Scrape(observer)
    by_reason = {
        reason: scrape("octavo:request_success_total", finished_reason=reason)
        for reason in ("abort", "stop", "length", "error")
    }
    assert by_reason == {"abort": 5, "stop": 3, "length": 2, "error": 1}
    assert sum(scrape.all("octavo:request_success_total").values()) == 11
    assert scrape("octavo:requests_rejected_total", status="400") == 2
    assert scrape("octavo:requests_rejected_total", status="418") == 1
    assert scrape("octavo:requests_rejected_total", status="429") == 0


def test_token_totals_and_request_sums_reconcile(observer: PrometheusObserver) -> None:
    """ME-03: turns red if cached prompt tokens vanish from prompt_tokens, or aborts from sums."""
    stats = replace(STATS, prefix_queries_total=200, prefix_hits_total=64)
    observer.on_event(replace(STEP, num_prompt_tokens=136, num_generation_tokens=2, stats=stats))
    observer.on_event(replace(STEP, num_generation_tokens=8, stats=stats))
    observer.on_event(RequestFinished(FINISHED))
    observer.on_event(RequestFinished(finished(finish_reason=FinishReason.ABORT)))
    scrape = Scrape(observer)
    assert scrape("octavo:prompt_tokens_total") == 200
    assert scrape("octavo:prompt_tokens_total") == scrape("octavo:request_prompt_tokens_sum")
    assert scrape("octavo:prompt_tokens_cached_total") == 64
    computed = scrape("octavo:request_prefill_kv_computed_tokens_sum")
    assert computed == 200 - scrape("octavo:prompt_tokens_cached_total")
    generated = scrape("octavo:generation_tokens_total")
    assert generated == scrape("octavo:request_generation_tokens_sum") == 10


LIVES = {
    "whole": {},
    "preempted after tokens": {"num_preemptions": 2, "last_token_time": 400.0, "finish_time": 401},
    "aborted in the queue": {
        "first_scheduled_time": None,
        "first_token_time": None,
        "last_token_time": None,
        "num_generation_tokens": 0,
    },
    "aborted in prefill": {
        "first_token_time": None,
        "last_token_time": None,
        "num_generation_tokens": 0,
    },
    "one token": {"last_token_time": 13.0, "num_generation_tokens": 1, "finish_time": 13.0},
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES.keys())
def test_phases_add_up_to_the_whole(observer: PrometheusObserver, life: dict[str, object]) -> None:
    """ME-04: turns red if time spent preempted or queued falls out of queue + prefill + decode."""
    observer.on_event(RequestFinished(finished(**life)))
    scrape = Scrape(observer)
    phases = [
        scrape(f"octavo:request_{phase}_time_seconds_sum")
        for phase in ("queue", "prefill", "decode")
    ]
    assert min(phases) >= 0
    assert sum(phases) == pytest.approx(scrape("octavo:e2e_request_latency_seconds_sum"))
    inference = scrape("octavo:request_inference_time_seconds_sum")
    assert inference == pytest.approx(sum(phases[1:]))


def test_time_per_output_token_is_last_minus_first_over_gaps(observer: PrometheusObserver) -> None:
    """Turns red if TPOT divides by tokens instead of gaps, or counts one-token outputs."""
    observer.on_event(RequestFinished(FINISHED))
    one = {"num_generation_tokens": 1, "last_token_time": 13.0}
    observer.on_event(RequestFinished(finished(**one)))
    scrape = Scrape(observer)
    assert scrape("octavo:request_time_per_output_token_seconds_count") == 1
    assert scrape("octavo:request_time_per_output_token_seconds_sum") == pytest.approx(4.0 / 4)


def test_first_token_is_counted_once_a_sequence(observer: PrometheusObserver) -> None:
    """ME-09: turns red if TTFT is counted per step or per finished request."""
    for tenth in range(1, 101):
        latencies = (tenth / 10, tenth / 10 + 0.01)
        observer.on_event(replace(STEP, first_token_latencies_s=latencies))
    for _ in range(50):  # aborted before their first token
        observer.on_event(RequestFinished(finished(first_token_time=None, last_token_time=None)))
    scrape = Scrape(observer)
    assert scrape("octavo:time_to_first_token_seconds_count") == 200
    expected = sum(2 * tenth / 10 + 0.01 for tenth in range(1, 101))
    assert scrape("octavo:time_to_first_token_seconds_sum") == pytest.approx(expected)


def test_a_stall_shows_among_gaps(observer: PrometheusObserver) -> None:
    """ME-04: turns red if inter-token latency becomes a mean per request, which hides a stall."""
    gaps = (0.01,) * 99 + (1.0,)
    observer.on_event(replace(STEP, inter_token_latencies_s=gaps))
    scrape = Scrape(observer)
    name = "octavo:inter_token_latency_seconds_bucket"
    assert (scrape(name, le="0.01"), scrape(name, le="0.75"), scrape(name, le="1.0")) == (
        99,
        99,
        100,
    )


def test_counters_never_decrease(observer: PrometheusObserver) -> None:
    """ME-11: turns red if a total is shown as a difference, or reset by a later event."""
    before: dict[object, float] = {}
    for number in range(1, 6):
        stats = replace(
            STATS,
            preemptions_total=number // 2,
            prefix_queries_total=number * 10,
            prefix_hits_total=number * 3,
            evictions_total=number,
        )
        observer.on_event(replace(STEP, num_prompt_tokens=7, num_generation_tokens=1, stats=stats))
        observer.on_event(RequestFinished(FINISHED))
        after = Scrape(observer).samples
        names = ("_total", "_count", "_sum", "_bucket")
        for (name, labels), value in after.items():
            if name.startswith("octavo:") and name.endswith(names):
                assert value >= before.get((name, labels), 0), name
        before = dict(after)


def test_eviction_is_counted_by_policy(observer: PrometheusObserver) -> None:
    """Turns red if a policy's totals are lost or mixed when another is put in force."""
    old = EvictionTotals("lru", False, 0, 9, 5, 1, 4, 64)
    new = EvictionTotals("my.module:Mine", True, 2, 3, 2, 0, 7, 112)
    observer.on_event(StateChanged(replace(STATS, eviction=(old,))))
    observer.on_event(StateChanged(replace(STATS, eviction=(old, new))))
    scrape = Scrape(observer)
    for totals in (old, new):
        found = [
            scrape(f"octavo:kv_cache_policy_{name}_total", policy=totals.policy)
            for name in (
                "switches",
                "evictions",
                "unused_evictions",
                "expected_evictions",
                "hits",
                "saved_tokens",
            )
        ]
        assert found == list(astuple(totals)[2:])
        info = scrape("octavo:kv_cache_eviction_policy_info", policy=totals.policy)
        assert info == totals.is_in_force


def test_no_label_value_comes_from_a_client(observer: PrometheusObserver) -> None:
    """Turns red if request ids or other unbounded values become labels."""
    before = {key for key in Scrape(observer).samples if key[0].startswith("octavo:")}
    for number in range(50):
        observer.on_event(RequestFinished(finished(request_id=f"user-{number}")))
    after = {key for key in Scrape(observer).samples if key[0].startswith("octavo:")}
    assert after == before


def test_token_buckets_end_at_the_context_length(observer: PrometheusObserver) -> None:
    """Turns red if token histograms show bounds that no request can reach."""
    rows = Scrape(observer).all("octavo:request_prompt_tokens_bucket")
    bounds = {dict(labels)["le"] for labels in rows}
    assert "2000.0" in bounds
    assert "5000.0" not in bounds


def test_a_model_name_with_quotes_stays_one_label() -> None:
    """Turns red if label values are put in the text unescaped."""
    name = 'a"b\\c\nd'
    scrape = Scrape(PrometheusObserver(model_name=name))
    assert scrape("octavo:num_requests_running", model_name=name) == 0


@pytest.mark.parametrize("prefix", ["", "1vllm:", "a b", "octavo-", 'x{y="z"} 1\n'])
def test_a_prefix_that_no_name_can_have_is_refused(prefix: str) -> None:
    """Turns red if a mistyped --metrics-prefix makes every scrape unreadable."""
    with pytest.raises(SettingError, match="--metrics-prefix"):
        PrometheusObserver(model_name="m", prefix=prefix)


def test_observing_loads_no_tensors_and_no_server() -> None:
    """Turns red if metrics pull numpy, fastapi or the engine into a process that only counts."""
    code = (
        "import sys, octavo.observe.prometheus\n"
        "heavy = {'numpy', 'torch', 'fastapi', 'octavo.engine', 'octavo.kvcache'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_every_name_in_the_docs_exists() -> None:
    """ME-11: turns red if a page or benchmark names an octavo: series that is not exposed."""
    observer = PrometheusObserver(model_name="m")
    observer.configure(CacheInfo(16, 100, True, "float32"), max_model_len=2048)
    known = {name for name, _ in Scrape(observer).samples} | set(Scrape(observer).families)
    pages = [*REPO.glob("*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("benchmarks/**/*.py")]
    used = {name for page in pages for name in re.findall(r"octavo:[a-z][a-z_]*", page.read_text())}
    assert used - known == set()
