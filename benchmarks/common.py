"""What the benchmarks share: an engine for the default model, prompts, and quantiles."""

import platform
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from octavo.core.events import NullObserver
from octavo.core.sampling import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.factory import EngineSettings, async_engine, build_engine
from octavo.models.source import default_cache_dir, resolve_model

PARAGRAPH = (
    "A library keeps its books on shelves, and a reader who asks for one is brought it by someone "
    "who knows where it stands. The art lies in putting next to each other what is asked for "
    "together, and in clearing away what nobody has asked for in a long time. "
)


@asynccontextmanager
async def running_engine(model: str, **settings: object) -> AsyncIterator[AsyncEngine]:
    """Load ``model`` and serve it in this process while the block runs."""
    source = resolve_model(model, cache_dir=default_cache_dir())
    parts = build_engine(
        EngineSettings(model=source.path, served_model_name=source.served_name, **settings),
        NullObserver(),
    )
    engine = async_engine(parts)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


def prompt_of(engine: AsyncEngine, num_tokens: int, *, salt: str) -> list[int]:
    """Return a prompt of exactly ``num_tokens`` tokens of prose that no other salt shares."""
    tokens = engine.tokenizer.encode(f"{salt}: ")
    paragraph = engine.tokenizer.encode(PARAGRAPH)
    while len(tokens) < num_tokens:
        tokens += paragraph
    return tokens[:num_tokens]


@dataclass
class Timeline:
    """When each token of one completion came, in seconds."""

    started: float
    times: list[float] = field(default_factory=list)
    text: str = ""
    num_cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.times[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


async def complete(
    engine: AsyncEngine, prompt: Sequence[int], max_tokens: int, *, name: str
) -> Timeline:
    """Run one greedy completion of ``max_tokens`` tokens to its end."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    timeline = Timeline(time.perf_counter())
    async for delta in engine.generate(prompt, sampling, request_id=name):
        now = time.perf_counter()
        timeline.times += [now] * len(delta.token_ids)
        timeline.text += delta.text
        timeline.num_cached_tokens = delta.num_cached_tokens
    return timeline


def quantile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def describe_machine() -> str:
    """Return one line about where this runs."""
    return f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}"


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)
