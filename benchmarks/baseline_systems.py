"""The systems that are compared, each the same engine with other policies, and what runs them."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from octavo.core.clock import Clock, ManualClock
from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.events import NullObserver
from octavo.core.plan import ModelRunner, ModelRunnerOutput, SchedulerOutput
from octavo.engine.backends import Compute, DtypeName, QuantizationName, choose_backend
from octavo.engine.core import EngineCore
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.weights import Encoding, WeightTensor
from octavo.kvcache.manager import KVCacheManager
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import DecoderConfig, RopeConfig
from octavo.models.decoder import build_decoder
from octavo.models.source import default_cache_dir, resolve_model
from octavo.models.tensor_layout import decoder_layout
from octavo.runner.runner import Runner
from octavo.scheduler.scheduler import Scheduler


@dataclass(frozen=True)
class System:
    """One way to batch, to reserve KV and to find prefixes."""

    name: str
    what: str
    batching: str = "continuous"
    reservation: str = "paged"
    prefix_cache: str | None = None


SYSTEMS: Final = (
    System("static", "static batching, contiguous max (FasterTransformer)", "static", "max"),
    System("orca-max", "continuous, contiguous max (Orca)", reservation="max"),
    System("orca-pow2", "continuous, contiguous next power of two", reservation="pow2"),
    System("orca-oracle", "continuous, contiguous true length", reservation="oracle"),
    System("paged", "continuous, paged, no prefix cache"),
    System("paged-flat", "continuous, paged, flat hash-chain cache (vLLM)", prefix_cache="flat"),
    System("paged-radix", "continuous, paged, radix tree (Octavo's default)", prefix_cache="radix"),
)


@dataclass(frozen=True)
class Limits:
    """What all systems have alike."""

    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    watermark: float
    """Share of the pool that admission leaves free for growth; what is contiguous needs none."""

    @property
    def num_slots(self) -> int:
        """Tokens of KV that fit at once."""
        return self.num_blocks * self.block_size


def build_core(
    system: System, limits: Limits, vocab_size: int, runner: ModelRunner, clock: Clock
) -> EngineCore:
    """Wire the engine as the factory does, around any runner and clock."""
    is_static = system.batching == "static"
    cache = CacheConfig(
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        enable_prefix_caching=system.prefix_cache is not None,
        prefix_cache=system.prefix_cache or "radix",
        kv_reservation=system.reservation,
        watermark=limits.watermark if system.reservation == "paged" else 0.0,
    )
    budget = limits.max_num_batched_tokens
    scheduler = SchedulerConfig(
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=max(budget, limits.num_slots) if is_static else budget,
        max_num_seqs=limits.max_num_seqs,
        batching_policy=system.batching,
        vocab_size=vocab_size,
    )
    return EngineCore(Scheduler(scheduler, KVCacheManager(cache)), runner, clock, NullObserver())


@dataclass(frozen=True)
class StepCost:
    """A linear model of a step's duration: the weights, then each token, then each KV token read.

    The defaults were fitted (R2 0.99) to the processor time of steps of the default model with the
    numpy backend and one thread: 1 to 16 decodes, and prompts of 20 to 500 tokens. They stand for
    that balance of memory and arithmetic and for no other; a real run prints its own.
    """

    step_s: float = 0.113
    token_s: float = 0.0029
    context_token_s: float = 0.0000164

    def seconds(self, num_tokens: int, num_context: int) -> float:
        """Return how long a step takes."""
        return self.step_s + num_tokens * self.token_s + num_context * self.context_token_s


def work_of(plan: SchedulerOutput) -> tuple[int, int]:
    """Return the tokens that a plan computes, and the tokens of KV that it reads."""
    return plan.num_tokens, sum(item.start + len(item.token_ids) for item in plan.scheduled)


class SimulatedRunner:
    """Computes nothing: moves the clock by the step's cost and answers with token 0."""

    def __init__(self, clock: ManualClock, cost: StepCost) -> None:
        self._clock = clock
        self._cost = cost

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Take as long as the model says."""
        self._clock.advance(self._cost.seconds(*work_of(plan)))
        return ModelRunnerOutput(
            {item.sequence_id: (0,) for item in plan.scheduled if item.samples}
        )


@dataclass
class TimedRunner:
    """Executes plans with the real model and notes how long each took."""

    runner: ModelRunner
    clock: Clock
    steps: list[tuple[int, int, float]] = field(default_factory=list)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Pass on."""
        started = self.clock()
        result = self.runner.execute(plan)
        self.steps.append((*work_of(plan), self.clock() - started))
        return result


def fit_cost(steps: Sequence[tuple[int, int, float]]) -> tuple[StepCost, float]:
    """Return the least-squares step cost, no part of it negative, and the explained variance."""
    table = np.array(steps)
    work = np.column_stack([np.ones(len(table)), table[:, :2]])
    seconds = table[:, 2]
    kept = [0, 1, 2]
    while True:
        found, *_ = np.linalg.lstsq(work[:, kept], seconds, rcond=None)
        if (found >= 0).all():
            break
        kept.pop(int(found.argmin()))
    parts = dict.fromkeys(range(3), 0.0) | dict(zip(kept, found.tolist(), strict=True))
    error = seconds - work[:, kept] @ found
    return StepCost(*parts.values()), 1.0 - float(error.var() / seconds.var())


@dataclass(frozen=True)
class Choice:
    """Which model, and what computes it; by default what the server takes by default."""

    model: str = "smollm2"
    """A model's name, or ``tiny``: a random one, to try a benchmark."""
    backend: str = "auto"
    dtype: DtypeName = "auto"
    quantization: QuantizationName = "auto"
    threads: int = 0

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Let the command line choose."""
        parser.add_argument("--model", default="smollm2", help="a model, or `tiny`, random, to try")
        parser.add_argument("--backend", default="auto", help="auto, native or numpy")
        parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
        parser.add_argument("--quantization", default="auto", help="auto, none, file, int8, int4")
        parser.add_argument("--threads", type=int, default=0, help="0: all that there are")

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> "Choice":
        """Return what the command line chose."""
        return cls(args.model, args.backend, args.dtype, args.quantization, args.threads)

    def compute(self, tensors: Iterable[WeightTensor]) -> Compute:
        """Make the backend for a model's weights."""
        options = NativeOptions(threads=self.threads)
        return choose_backend(self.backend, self.dtype, self.quantization, options, tensors=tensors)


class LoadedModel:
    """A real decoder on the backend that serves, loaded once; all systems have its KV memory."""

    def __init__(self, choice: Choice, limits: Limits) -> None:
        if choice.model == "tiny":
            config, tensors = _tiny_model(limits.max_model_len)
        else:
            source = resolve_model(choice.model, cache_dir=default_cache_dir())
            checkpoint = open_checkpoint(source.path)
            config, tensors = checkpoint.config, checkpoint.tensors
        compute = choice.compute(tensors.values())
        self.what = f"{choice.model} on {compute.backend.name}, {compute.precision}"
        decoder = build_decoder(config, tensors, compute.backend)
        spec = decoder.kv_spec(limits.block_size, compute.kv_dtype)
        compute.backend.allocate_kv(spec, limits.num_blocks)
        self.backend = compute.backend
        self.step = self.backend.compile(decoder.forward)
        self.vocab_size = config.vocab_size
        self.token_bytes = spec.block_bytes // limits.block_size

    def runner(self, limits: Limits) -> Runner:
        """Return a runner without sequences."""
        return Runner(
            self.step,
            self.backend.copy_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=self.vocab_size,
            sampler=self.backend.sampler(self.vocab_size),
        )


def _tiny_model(max_position: int) -> tuple[DecoderConfig, dict[str, WeightTensor]]:
    """Return a random llama of two layers, for smoke tests of the benchmark itself."""
    config = DecoderConfig(
        architecture="llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=max_position,
        norm_eps=1e-5,
        rope=RopeConfig(10000.0, 8),
        attention_scale=8**-0.5,
        tied_embeddings=True,
    )
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in decoder_layout(config, ()).shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32) * shape[-1] ** -0.5
        rows = values.reshape(-1, shape[-1]).view(np.uint8)
        tensors[name] = WeightTensor(name, Encoding.F32, shape, rows)
    return config, tensors
