"""What tests of metrics share: events with plain values, and reading an exposition back."""

from collections.abc import Mapping
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from octavo.core.events import CacheUsage, SchedulerStats, StepCompleted
from octavo.core.ids import RequestId
from octavo.core.request import FinishReason, RequestStats
from octavo.observe.prometheus import PrometheusObserver

USAGE = CacheUsage(num_total=100, num_free=100, num_cached=0, num_used=0)
STATS = SchedulerStats(
    num_running=0,
    num_waiting=0,
    usage=USAGE,
    preemptions_total=0,
    prefix_queries_total=0,
    prefix_hits_total=0,
    preempted_queries_total=0,
    preempted_hits_total=0,
    evictions_total=0,
)
STEP = StepCompleted(
    time=0.0,
    duration_s=0.01,
    num_prompt_tokens=0,
    num_generation_tokens=0,
    first_token_latencies_s=(),
    inter_token_latencies_s=(),
    stats=STATS,
)
FINISHED = RequestStats(
    request_id=RequestId("r"),
    num_prompt_tokens=100,
    num_cached_tokens=32,
    num_generation_tokens=5,
    max_tokens=16,
    finish_reason=FinishReason.STOP,
    num_preemptions=0,
    arrival_time=10.0,
    first_scheduled_time=11.0,
    first_token_time=13.0,
    last_token_time=17.0,
    finish_time=17.5,
)


def finished(**changes: object) -> RequestStats:
    """Return the life of a request that differs from a plain one in these fields."""
    return replace(FINISHED, **changes)  # type: ignore[arg-type]


class Scrape:
    """An exposition read by the official parser."""

    def __init__(self, observer: PrometheusObserver) -> None:
        self.text = observer.render().decode()
        self.families = {item.name: item for item in text_string_to_metric_families(self.text)}
        self.samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        """Return the one sample of this name whose labels include these."""
        found = self.all(name, **labels)
        assert len(found) == 1, f"{len(found)} samples of {name}{labels}"
        return next(iter(found.values()))

    def all(self, name: str, **labels: str) -> Mapping[tuple[tuple[str, str], ...], float]:
        """Return the samples of this name whose labels include these."""
        return {
            key: value
            for (sample, key), value in self.samples.items()
            if sample == name and labels.items() <= dict(key).items()
        }
