"""A model in this process that is asked one thing after another, from plain synchronous code."""

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.cli.console import byte_progress, spinner
from octavo.core.events import NullObserver
from octavo.core.sampling import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.backends import DtypeName, KVCacheDtypeName, QuantizationName
from octavo.engine.factory import EngineSettings, async_engine, build_engine
from octavo.engine.outputs import GenerationDelta
from octavo.models.source import (
    ResolvedModel,
    default_cache_dir,
    packed_cache_dir,
    resolve_model,
)


@dataclass(frozen=True, slots=True)
class EngineChoices:
    """What a user may choose about the engine of a one-person command."""

    backend: str
    dtype: DtypeName
    quantization: QuantizationName
    kv_cache_dtype: KVCacheDtypeName
    threads: int
    cpu_affinity: tuple[int, ...] | None
    packed_cache: bool
    deterministic: bool
    isa: str
    max_model_len: int | None
    kv_cache_memory_bytes: int | None


def find_model(name: str) -> ResolvedModel:
    """Return where the model lies, fetching it with a progress bar if need be.

    Raises:
        LoadError: there is no such model, or it cannot be fetched.
    """
    with byte_progress(f"Fetching {name}") as show:
        return resolve_model(name, cache_dir=default_cache_dir(), on_progress=show)


def find_packed_cache(is_wanted: bool) -> Path | None:
    """Return the folder for packed weights, if they are to be kept."""
    return packed_cache_dir(default_cache_dir()) if is_wanted else None


class Session:
    """Asks a running engine; use through ``open_session``."""

    def __init__(self, engine: AsyncEngine, runner: asyncio.Runner) -> None:
        self._engine = engine
        self._runner = runner
        self._ids = itertools.count()

    @property
    def served_name(self) -> str:
        """The model's name."""
        return self._engine.info.served_name

    def text_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text to be continued."""
        return self._engine.tokenizer.encode(text)

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation whose next message is the model's.

        Raises:
            InvalidRequestError: the model has no chat template, or it refuses the messages.
        """
        text = self._engine.tokenizer.render_chat(messages)
        return self._engine.tokenizer.encode(text, add_special_tokens=False)

    def ask(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        on_delta: Callable[[GenerationDelta], None],
    ) -> None:
        """Generate, passing on each delta as it comes. Ctrl-C ends it and leaves the engine usable.

        Raises:
            RequestError: the request is refused, or computing it failed.
            KeyboardInterrupt: the user pressed Ctrl-C.
        """
        self._runner.run(self._ask(prompt_token_ids, sampling, on_delta))

    async def _ask(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        on_delta: Callable[[GenerationDelta], None],
    ) -> None:
        name = f"cli-{next(self._ids)}"
        stream = self._engine.generate(prompt_token_ids, sampling, request_id=name)
        try:
            async for delta in stream:
                if delta.error is not None:
                    raise delta.error
                on_delta(delta)
        finally:
            await stream.aclose()


@contextmanager
def open_session(model: str, choices: EngineChoices) -> Iterator[Session]:
    """Load the model and run its engine while the block runs.

    Raises:
        SetupError: there is no such model, or a setting is wrong.
    """
    source = find_model(model)
    settings = EngineSettings(
        model=source.path,
        served_model_name=source.served_name,
        backend=choices.backend,
        dtype=choices.dtype,
        quantization=choices.quantization,
        kv_cache_dtype=choices.kv_cache_dtype,
        threads=choices.threads,
        cpu_affinity=choices.cpu_affinity,
        packed_cache_dir=find_packed_cache(choices.packed_cache),
        deterministic=choices.deterministic,
        isa=choices.isa,
        max_model_len=choices.max_model_len,
        kv_cache_memory_bytes=choices.kv_cache_memory_bytes,
    )
    with spinner(f"Loading {source.served_name}"):
        engine = async_engine(build_engine(settings, NullObserver()))
    with asyncio.Runner() as runner:
        runner.run(_start(engine))
        try:
            yield Session(engine, runner)
        finally:
            engine.shutdown()


async def _start(engine: AsyncEngine) -> None:
    engine.start()
