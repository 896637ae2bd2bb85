"""Engines for tests: the real core, thread and front ends around a fake runner or a tiny model."""

import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from octavo.core.clock import Clock
from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.events import Event
from octavo.core.plan import ModelRunner, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import CacheIdentity
from octavo.core.sampling import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.core import EngineCore
from octavo.engine.factory import EngineParts, EngineSettings, build_engine
from octavo.engine.grammars import GrammarPool
from octavo.engine.outputs import GenerationDelta, ModelInfo
from octavo.engine.requests import RequestBuilder
from octavo.kvcache.manager import KVCacheManager
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.models.tokenizer_source import FolderTokenizerSource
from octavo.runner.fake import FakeRunner, Faults
from octavo.scheduler.intake import Intake
from octavo.scheduler.scheduler import Scheduler
from support import PATIENCE_S
from support_loading import tokenizer_tokens, write_hf_folder, write_tokenizer_files

IDENTITY = CacheIdentity("model", "tokenizer", "float32")
VOCAB_SIZE = len(tokenizer_tokens())


class Recorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


class Held:
    """A fake runner that stops before its step ``after`` until it is let go."""

    def __init__(self, *, after: int, num_blocks: int = 64, block_size: int = 4) -> None:
        self._runner = FakeRunner(
            block_size=block_size, num_blocks=num_blocks, vocab_size=VOCAB_SIZE
        )
        self._after = after
        self._steps = 0
        self.gate = threading.Event()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        if self._steps == self._after:
            assert self.gate.wait(PATIENCE_S)
        self._steps += 1
        return self._runner.execute(plan)


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer whose first 256 ids are the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer_files(folder)
    return load_tokenizer(FolderTokenizerSource(folder))


def fake_parts(
    tokenizer: Tokenizer,
    observer: Recorder,
    *,
    runner: ModelRunner | None = None,
    faults: Faults | None = None,
    clock: Clock = time.monotonic,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 128,
    end_token_ids: frozenset[int] = frozenset(),
) -> EngineParts:
    """Wire a real engine around ``runner`` (None: the fake one), checking every invariant."""
    cache = CacheConfig(num_blocks=num_blocks, block_size=block_size)
    config = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        end_token_ids=end_token_ids,
        vocab_size=VOCAB_SIZE,
    )
    fake = FakeRunner(
        block_size=block_size, num_blocks=num_blocks, vocab_size=VOCAB_SIZE, faults=faults
    )
    scheduler = Scheduler(config, KVCacheManager(cache), debug=True)
    info = ModelInfo(
        served_name="fake",
        backend="fake",
        dtype="float32",
        precision="float32",
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduling_policy="fcfs",
        enable_prefix_caching=True,
    )
    return EngineParts(
        core=EngineCore(scheduler, runner or fake, clock, observer),
        tokenizer=tokenizer,
        requests=RequestBuilder(
            IDENTITY,
            Intake(config, num_blocks * block_size, cache).resolve_max_tokens,
            clock,
            random.Random(0),
            partial(tokenizer.encode, add_special_tokens=False, parse_special=False),
        ),
        info=info,
        observer=observer,
    )


def tiny_parts(
    folder: Path, observer: Recorder, architecture: str = "llama", **settings: object
) -> EngineParts:
    """Write a tiny random model and build a real engine for it, the same in every run: in float32,
    for rounded to 8 bits or bfloat16 its near-ties hang on who shares a step."""
    settings = {"seed": 0, "dtype": "float32", **settings}
    if not (folder / "config.json").exists():
        write_hf_folder(folder, architecture)
    return build_engine(
        EngineSettings(model=folder, served_model_name="tiny", **settings),  # type: ignore[arg-type]
        observer,
    )


def patient_engine(parts: EngineParts) -> AsyncEngine:
    """Put the front end of servers before an engine; grammars get a slow machine's time."""
    grammars = (
        None if parts.grammars is None else GrammarPool(parts.grammars, time_limit_s=PATIENCE_S)
    )
    return AsyncEngine(
        parts.core, parts.tokenizer, parts.requests, parts.info, parts.observer, grammars
    )


@asynccontextmanager
async def running(parts: EngineParts) -> AsyncIterator[AsyncEngine]:
    """Serve while the block runs."""
    engine = patient_engine(parts)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()


async def collect(
    engine: AsyncEngine, prompt: Sequence[int], sampling: SamplingParams, name: str = "r"
) -> list[GenerationDelta]:
    """Run one request to its end."""
    return [delta async for delta in engine.generate(prompt, sampling, request_id=name)]


def text_of(deltas: Sequence[GenerationDelta], index: int = 0) -> str:
    """Join the text of one completion."""
    return "".join(delta.text for delta in deltas if delta.index == index)
