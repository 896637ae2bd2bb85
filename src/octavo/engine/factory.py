"""The composition root: from settings to an engine whose parts are wired together."""

import random
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.errors import SettingError
from octavo.core.events import Observer
from octavo.core.request import CacheIdentity
from octavo.engine.backends import (
    Compute,
    DtypeName,
    KVCacheDtypeName,
    QuantizationName,
    choose_backend,
)
from octavo.engine.core import EngineCore
from octavo.engine.memory import available_memory_bytes
from octavo.engine.outputs import ModelInfo
from octavo.engine.pin_file import read_pins
from octavo.engine.requests import RequestBuilder
from octavo.kernels.native.options import NativeOptions, PackedCache
from octavo.kvcache.manager import KVCacheManager
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.decoder import Decoder, build_decoder, kv_spec
from octavo.models.fingerprint import file_version
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.runner.grammar import GrammarCompiler, Vocabulary
from octavo.runner.grammar_rows import GrammarRows
from octavo.runner.pooling import Pooler
from octavo.runner.runner import Runner
from octavo.scheduler.intake import Intake
from octavo.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine

DEFAULT_KV_BYTES: Final = 4 << 30
"""KV memory unless asked otherwise, as in vLLM's CPU build; less where memory is short."""
KV_MEMORY_SHARE: Final = 0.4
"""Largest share of available memory taken for KV without being asked."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a user may choose. None: chosen for the model and the machine."""

    model: Path
    """A ``.gguf`` file or a Hugging Face style folder."""
    served_model_name: str
    """The name that clients use."""
    backend: str = "auto"
    """What computes: ``native`` (C++ for this CPU), ``numpy``, or ``auto``: native if built."""
    dtype: DtypeName = "auto"
    """Number format of KV and of weights that are not quantised; ``auto`` is bfloat16 on the
    native backend and float32 on numpy. Asking for one turns ``auto`` quantisation off."""
    quantization: QuantizationName = "auto"
    """What meets what in products. ``none``: weights in ``dtype``. ``file``: weights as the file
    has them. ``int8``: 8 bits a weight and a scale per 32. ``int4``: 4 bits with a scale and
    minimum for each 32 (8 bits for the embedding table and the head; what the file has in 4 bits
    stays as it is). Activations of all these are rounded to 8 bits, the widest to 15 (ADR 7).
    ``auto``: file if the file holds quantised weights, else int8; none on numpy."""
    kv_cache_dtype: KVCacheDtypeName = "auto"
    """Number format of KV; ``auto``: that of ``dtype``. ``int8`` has a scale for each token and KV
    head: half the memory of bfloat16, less exact."""
    threads: int = 0
    """Threads of a step; 0: as many as affinity and container limits allow."""
    cpu_affinity: tuple[int, ...] | None = None
    """CPUs that the threads of a step stay on, one each; the first is the engine thread's. None:
    those that this process may use, and the engine thread moves freely."""
    deterministic: bool = False
    """Whether a request's tokens and logprobs keep their last bit whatever its batch-mates, the
    chunks of its prompt, what of it was cached, and preemptions. Native backend only."""
    isa: str = "auto"
    """Instruction set of the native kernels; ``auto``: the fastest that this CPU has."""
    packed_cache_dir: Path | None = None
    """Where packed weights are kept on disk for the next start; None: nowhere."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; None: what the model was made for."""
    max_num_batched_tokens: int = 512
    """Token budget of a step: the longest gap that a prompt can put between others' tokens."""
    max_num_seqs: int = 64
    """Most sequences that run at once."""
    block_size: int = 16
    """Token slots per KV block."""
    kv_cache_memory_bytes: int | None = None
    """Memory for KV; None: 4 GiB, or 40 % of what is available if that is less."""
    enable_prefix_caching: bool = True
    """Whether requests share the KV of equal prefixes."""
    enable_chunked_prefill: bool = True
    """Whether long prompts are computed in chunks beside running requests."""
    batching_policy: str = "continuous"
    """``continuous``, or ``static``: a batch runs until all of it is done."""
    kv_reservation: str = "paged"
    """Room taken at a request's start: ``paged``; or contiguous: ``max``, ``pow2``, ``oracle``."""
    prefix_cache: str = "radix"
    """What finds equal prefixes: ``radix`` or ``flat``."""
    eviction_policy: str = "predict"
    """What is forgotten first: ``lru``, ``lfu``, ``slru``, ``cost``, ``predict``, or
    ``module:Class``."""
    pin_file: Path | None = None
    """Prefixes that are never evicted once they are computed; see ``engine.pin_file``."""
    scheduling_policy: str = "fcfs"
    """Queue order: ``fcfs``, ``priority``, ``cache-aware``, or ``module:Class``."""
    seed: int | None = None
    """Seed of requests that name none; None: different in each run."""
    enable_jump_forward: bool = True
    """Whether tokens that a grammar forces are taken without a forward pass each."""
    debug_invariants: bool = False
    """Check every invariant after each step (slow)."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """An engine without a front end."""

    core: EngineCore
    tokenizer: Tokenizer
    requests: RequestBuilder
    info: ModelInfo
    observer: Observer
    grammars: GrammarCompiler | None = None
    """Compiles structured output; None where the runner cannot follow it."""


def build_engine(settings: EngineSettings, observer: Observer) -> EngineParts:
    """Load the model and wire an engine around it.

    Raises:
        SetupError: a setting or a model file is wrong.
    """
    checkpoint = open_checkpoint(settings.model)
    tokenizer = load_tokenizer(
        checkpoint.tokenizer_source, model_vocab_size=checkpoint.config.vocab_size
    )
    compute = choose_backend(
        settings.backend,
        settings.dtype,
        settings.quantization,
        _native_options(settings, checkpoint),
        settings.kv_cache_dtype,
        checkpoint.tensors.values(),
    )
    cache_config, scheduler_config = _configs(settings, checkpoint, tokenizer, compute)
    decoder = build_decoder(checkpoint.config, checkpoint.tensors, compute.backend)
    grammars = GrammarCompiler(
        Vocabulary(tokenizer, scheduler_config.vocab_size, scheduler_config.end_token_ids)
    )
    rows = GrammarRows(
        grammars,
        vocab_size=scheduler_config.vocab_size,
        jump_forward=settings.enable_jump_forward,
    )
    runner = _runner(decoder, compute, cache_config, scheduler_config, rows)
    identity = _identity(checkpoint, tokenizer, compute, deterministic=settings.deterministic)
    manager = KVCacheManager(cache_config)
    if settings.pin_file is not None:
        pins = read_pins(settings.pin_file, tokenizer, identity, cache_config.block_size)
        for owner, token_ids in pins:
            manager.pin(owner, token_ids)
    scheduler = Scheduler(scheduler_config, manager, debug=settings.debug_invariants)
    info = _info(settings, compute, cache_config, scheduler_config)
    requests = RequestBuilder(
        identity=identity,
        check=Intake(scheduler_config, manager.num_slots, cache_config).resolve_max_tokens,
        clock=time.monotonic,
        chance=random.Random(settings.seed),
        encode=partial(tokenizer.encode, add_special_tokens=False, parse_special=False),
    )
    core = EngineCore(scheduler, runner, time.monotonic, observer)
    return EngineParts(core, tokenizer, requests, info, observer, grammars)


def async_engine(parts: EngineParts) -> "AsyncEngine":
    """Put the front end of servers before an engine."""
    from octavo.engine.async_engine import AsyncEngine  # offline use needs no asyncio
    from octavo.engine.grammars import GrammarPool

    grammars = None if parts.grammars is None else GrammarPool(parts.grammars)
    return AsyncEngine(
        parts.core, parts.tokenizer, parts.requests, parts.info, parts.observer, grammars
    )


def _native_options(settings: EngineSettings, checkpoint: Checkpoint) -> NativeOptions:
    folder = settings.packed_cache_dir
    version = f"{checkpoint.fingerprint} {file_version(checkpoint.path)}"
    return NativeOptions(
        isa=settings.isa,
        deterministic=settings.deterministic,
        threads=settings.threads,
        cpus=settings.cpu_affinity or (),
        packed_cache=None if folder is None else PackedCache(folder, checkpoint.path, version),
    )


def _identity(
    checkpoint: Checkpoint, tokenizer: Tokenizer, compute: Compute, *, deterministic: bool
) -> CacheIdentity:
    model = f"{checkpoint.fingerprint} {compute.backend.name} {compute.precision}"
    if deterministic:
        model += " deterministic"
    return CacheIdentity(model, tokenizer.fingerprint, compute.kv_dtype)


def _configs(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    compute: Compute,
) -> tuple[CacheConfig, SchedulerConfig]:
    if settings.block_size < 1:
        raise SettingError(
            f"--block-size must be at least 1, not {settings.block_size}.", name="--block-size"
        )
    max_model_len = _max_model_len(settings, checkpoint)
    spec = kv_spec(checkpoint.config, settings.block_size, compute.kv_dtype)
    block_bytes = compute.backend.kv_block_bytes(spec)
    cache = CacheConfig(
        num_blocks=_num_blocks(settings, block_bytes, max_model_len),
        block_size=settings.block_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        prefix_cache=settings.prefix_cache,
        kv_reservation=settings.kv_reservation,
        eviction_policy=settings.eviction_policy,
    )
    if cache.is_contiguous:  # nothing grows, so nothing need be left free for it
        cache = replace(cache, watermark=0.0)
    budget = settings.max_num_batched_tokens
    if not settings.enable_chunked_prefill:
        budget = max(budget, max_model_len)  # a whole prompt must fit one step
    if settings.batching_policy == "static":  # all prompts of a batch are computed in one step
        in_pool = cache.num_blocks * cache.block_size
        budget = max(budget, min(in_pool, settings.max_num_seqs * max_model_len))
    scheduler = SchedulerConfig(
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        max_num_seqs=settings.max_num_seqs,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        batching_policy=settings.batching_policy,
        policy=settings.scheduling_policy,
        end_token_ids=frozenset(checkpoint.end_token_ids | tokenizer.end_token_ids),
        vocab_size=checkpoint.config.vocab_size,
    )
    return cache, scheduler


def _max_model_len(settings: EngineSettings, checkpoint: Checkpoint) -> int:
    limit = checkpoint.config.max_position
    if settings.max_model_len is None:
        return limit
    if not 1 <= settings.max_model_len <= limit:
        raise SettingError(
            f"--max-model-len must be between 1 and {limit} (what {checkpoint.name} was made "
            f"for), not {settings.max_model_len}.",
            name="--max-model-len",
        )
    return settings.max_model_len


def _num_blocks(settings: EngineSettings, block_bytes: int, max_model_len: int) -> int:
    asked = settings.kv_cache_memory_bytes
    available = available_memory_bytes()
    if asked is None:
        budget = min(DEFAULT_KV_BYTES, int(available * KV_MEMORY_SHARE))
        if block_bytes > budget:
            raise SettingError(
                f"--block-size {settings.block_size} makes a block of {block_bytes} bytes, "
                f"but there are {budget} for KV: choose a smaller block.",
                name="--block-size",
            )
        per_sequence = -(-max_model_len // settings.block_size)
        return min(budget // block_bytes, settings.max_num_seqs * per_sequence)
    if asked < block_bytes:
        raise SettingError(
            f"--kv-cache-memory-bytes must hold at least one block of {block_bytes} bytes, "
            f"not {asked}.",
            name="--kv-cache-memory-bytes",
        )
    if asked > available:
        raise SettingError(
            f"--kv-cache-memory-bytes must not exceed the {available} bytes of memory that are "
            f"available, not {asked}.",
            name="--kv-cache-memory-bytes",
        )
    return asked // block_bytes


def _runner(
    decoder: Decoder,
    compute: Compute,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    grammars: GrammarRows,
) -> Runner:
    backend = compute.backend
    backend.allocate_kv(decoder.kv_spec(cache.block_size, compute.kv_dtype), cache.num_blocks)
    return Runner(
        backend.compile(decoder.forward),
        backend.copy_blocks,
        block_size=cache.block_size,
        max_model_len=scheduler.max_model_len,
        max_num_seqs=scheduler.max_num_seqs,
        vocab_size=scheduler.vocab_size,
        sampler=backend.sampler(scheduler.vocab_size),
        grammars=grammars,
        pooler=Pooler(lambda: backend.compile(decoder.hidden), block_size=cache.block_size),
    )


def _info(
    settings: EngineSettings,
    compute: Compute,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
) -> ModelInfo:
    return ModelInfo(
        served_name=settings.served_model_name,
        backend=compute.backend.name,
        dtype=compute.kv_dtype,
        precision=compute.precision,
        max_model_len=scheduler.max_model_len,
        vocab_size=scheduler.vocab_size,
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        scheduling_policy=scheduler.policy,
        enable_prefix_caching=cache.enable_prefix_caching,
    )
