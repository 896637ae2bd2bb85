"""Metrics of the real engine core: what /metrics says equals what callers saw."""

import random
from dataclasses import dataclass, field

import pytest

from octavo.core.clock import ManualClock
from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.events import RequestFinished
from octavo.core.ids import RequestId
from octavo.core.request import CacheIdentity, Request, RequestStats
from octavo.core.sampling import SamplingParams
from octavo.engine.core import EngineCore
from octavo.kvcache.manager import KVCacheManager
from octavo.observe.prometheus import PrometheusObserver
from octavo.runner.fake import FakeRunner
from octavo.scheduler.scheduler import Scheduler
from support_observe import Scrape

NUM_BLOCKS = 12
BLOCK_SIZE = 4
VOCAB = 1000


@dataclass
class Traffic:
    """A tiny engine under load, and what its callers saw."""

    observer: PrometheusObserver = field(
        default_factory=lambda: PrometheusObserver(model_name="fake")
    )
    clock: ManualClock = field(default_factory=ManualClock)
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    live: dict[RequestId, int] = field(default_factory=dict)
    """Tokens seen of each request that has not ended."""
    ended: list[RequestStats] = field(default_factory=list)
    num_first_tokens: int = 0
    num_tokens: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, watermark=0.0)
        settings = SchedulerConfig(
            max_model_len=40, max_num_batched_tokens=16, max_num_seqs=6, vocab_size=VOCAB
        )
        runner = FakeRunner(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, vocab_size=VOCAB)
        scheduler = Scheduler(settings, KVCacheManager(cache), debug=True)
        self.core = EngineCore(scheduler, runner, self.clock, self.observer)

    def arrive(self, name: int, prompt: tuple[int, ...], max_tokens: int) -> None:
        request = Request(
            request_id=RequestId(f"r{name}"),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, seed=name, ignore_eos=True),
            identity=CacheIdentity("m", "t", "float32"),
            arrival_time=self.clock(),
        )
        self.core.add(request)
        self.live[request.request_id] = 0
        self.num_prompt_tokens += len(prompt)

    def step(self) -> None:
        self.clock.advance(0.05)
        update = self.core.step()
        for output in update.outputs:
            if output.new_token_ids and self.live[output.request_id] == 0:
                self.num_first_tokens += 1
            self.live[output.request_id] += len(output.new_token_ids)
            self.num_tokens += len(output.new_token_ids)
        for stats in update.finished:
            self._end(stats)

    def abort(self) -> None:
        (stats,) = self.core.abort(self.rng.choice(list(self.live)))
        self._end(stats)

    def drain(self) -> None:
        while self.core.has_work():
            self.step()

    def fresh_prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.randrange(VOCAB) for _ in range(length))

    def _end(self, stats: RequestStats) -> None:
        assert self.live.pop(stats.request_id) >= stats.num_generation_tokens
        self.ended.append(stats)
        self.observer.on_event(RequestFinished(stats))


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    """80 requests with prompts of their own, a fifth of them aborted, in a pool that preempts."""
    traffic = Traffic()
    for name in range(80):
        length, wanted = traffic.rng.randint(4, 20), traffic.rng.choice([1, 4, 12, 20])
        traffic.arrive(name, traffic.fresh_prompt(length), wanted)
        for _ in range(traffic.rng.randint(0, 4)):
            traffic.step()
        if traffic.live and traffic.rng.random() < 0.2:
            traffic.abort()
    traffic.drain()
    return traffic


def test_prompts_that_share_nothing_hit_nothing(traffic: Traffic) -> None:
    """ME-01: turns red if recompute after preemption is counted as prefix reuse."""
    scrape = Scrape(traffic.observer)
    assert scrape("octavo:num_preemptions_total") > 0
    assert scrape("octavo:prefix_cache_hits_total") == 0
    assert scrape("octavo:prompt_tokens_cached_total") == 0
    queries = scrape("octavo:prefix_cache_queries_total")
    assert 0 < queries <= traffic.num_prompt_tokens
    hits = scrape("octavo:preempted_prefix_cache_hits_total")
    assert 0 <= hits <= scrape("octavo:preempted_prefix_cache_queries_total")


def test_reasons_add_up_to_accepted_requests(traffic: Traffic) -> None:
    """ME-03: turns red if aborted requests leave no trace, or per-request sums lose one."""
    scrape = Scrape(traffic.observer)
    aborted = sum(stats.finish_reason == "abort" for stats in traffic.ended)
    assert aborted > 0
    assert scrape("octavo:request_success_total", finished_reason="abort") == aborted
    assert sum(scrape.all("octavo:request_success_total").values()) == 80
    assert scrape("octavo:request_prompt_tokens_count") == 80
    assert scrape("octavo:request_prompt_tokens_sum") == traffic.num_prompt_tokens
    assert scrape("octavo:generation_tokens_total") == traffic.num_tokens
    assert scrape("octavo:request_generation_tokens_sum") == traffic.num_tokens


def test_phases_add_up_whatever_preempts(traffic: Traffic) -> None:
    """ME-04: turns red if preempted time vanishes from end-to-end time, or TTFT is reset by it."""
    scrape = Scrape(traffic.observer)
    assert any(stats.num_preemptions for stats in traffic.ended)
    phases = [
        scrape(f"octavo:request_{phase}_time_seconds_sum")
        for phase in ("queue", "prefill", "decode")
    ]
    whole = sum(stats.finish_time - stats.arrival_time for stats in traffic.ended)
    assert min(phases) >= 0
    assert sum(phases) == pytest.approx(whole)
    assert scrape("octavo:e2e_request_latency_seconds_sum") == pytest.approx(whole)
    first = [s.first_token_time - s.arrival_time for s in traffic.ended if s.first_token_time]
    assert scrape("octavo:time_to_first_token_seconds_sum") == pytest.approx(sum(first))


def test_first_tokens_are_counted_once_each(traffic: Traffic) -> None:
    """ME-09: turns red if TTFT is missing for aborted requests, or counted again on resumption."""
    scrape = Scrape(traffic.observer)
    assert 0 < traffic.num_first_tokens < 80
    assert scrape("octavo:time_to_first_token_seconds_count") == traffic.num_first_tokens
    gaps = traffic.num_tokens - traffic.num_first_tokens
    assert scrape("octavo:inter_token_latency_seconds_count") == gaps


def test_nothing_is_left(traffic: Traffic) -> None:
    """Turns red if the gauges of an idle engine show work or blocks in use."""
    scrape = Scrape(traffic.observer)
    assert scrape("octavo:num_requests_running") == scrape("octavo:num_requests_waiting") == 0
    assert scrape("octavo:kv_cache_usage_perc") == 0
    blocks = scrape.all("octavo:kv_cache_blocks")
    assert sum(blocks.values()) == NUM_BLOCKS


def test_a_shared_prefix_is_counted_where_it_was_found() -> None:
    """Turns red if prompt_tokens leaves out cached tokens, or counts them as computed."""
    traffic = Traffic()
    prompt = traffic.fresh_prompt(18)
    for name in range(3):
        traffic.arrive(name, prompt, 1)
        traffic.drain()
    scrape = Scrape(traffic.observer)
    assert scrape("octavo:prefix_cache_queries_total") == 3 * 18
    assert scrape("octavo:prefix_cache_hits_total") == 2 * 16
    assert scrape("octavo:prompt_tokens_total") == 3 * 18
    assert scrape("octavo:request_prefill_kv_computed_tokens_sum") == 18 + 2 * 2
