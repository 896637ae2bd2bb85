"""Time around the model in steps of 1 and 64 decodes: scheduler, cache, batch, sampler, output.

    python benchmarks/step_overhead.py                 # shares of a step of the default model
    python benchmarks/step_overhead.py --kinds         # all kinds of sampling, without a model

Contexts are short (128 tokens and up), so the model's part is as small as it gets. Sequences reach
the ends of their blocks in turn, so every step of 64 allocates and registers some. On a machine
that others use, trust the least values, not the medians. "scheduler" is ``schedule`` and ``update``
without what they spend in the KV cache, which a second run measures; "output" is what the front
end's thread does with the tokens; "around" is all but the model.

The model reads its weights through all caches, so what comes after it finds neither its code nor
its data there. At batch 1 that costs more than the work itself; ``--kinds`` shows warm caches.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Final

import numpy as np
from baseline_systems import Choice, Limits, LoadedModel
from common import describe_machine
from numpy.typing import NDArray

from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.events import NullObserver
from octavo.core.ids import BlockId, RequestId, SequenceId, TokenId
from octavo.core.plan import BlockCopy
from octavo.core.request import CacheIdentity, Request
from octavo.core.sampling import SamplingParams
from octavo.engine.output_processor import OutputProcessor
from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Backend
from octavo.kvcache.manager import KVCacheManager
from octavo.models.checkpoint import open_checkpoint
from octavo.models.source import default_cache_dir, resolve_model
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.runner.runner import Runner
from octavo.scheduler.scheduler import Scheduler

NUM_SEQUENCES: Final = 64
NUM_PROMPT_TOKENS: Final = 128
BLOCK_SIZE: Final = 16
MAX_MODEL_LEN: Final = 512
NUM_BLOCKS: Final = NUM_SEQUENCES * MAX_MODEL_LEN // BLOCK_SIZE

PLAIN = SamplingParams(temperature=0.8, max_tokens=300, ignore_eos=True)
GREEDY = replace(PLAIN, temperature=0.0)
KINDS = {
    "greedy": GREEDY,
    "temperature": PLAIN,
    "top_k 50, top_p 0.95": replace(PLAIN, top_k=50, top_p=0.95),
    "top_p 0.95": replace(PLAIN, top_p=0.95),
    "min_p 0.05": replace(PLAIN, min_p=0.05),
    "penalties": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.1),
    "greedy, logprobs 5": replace(GREEDY, logprobs=5),
}

StepFunction = Callable[[StepBatch], NDArray[np.float32]]


@dataclass(frozen=True)
class Parts:
    """Milliseconds of one step, or their medians over many."""

    scheduler: float
    kvcache: float
    batch: float
    model: float
    sampler: float
    output: float

    @property
    def total(self) -> float:
        """The engine thread's step: all but the output."""
        return self.scheduler + self.kvcache + self.batch + self.model + self.sampler

    @property
    def around(self) -> float:
        """All but the model."""
        return self.total - self.model + self.output

    @property
    def share(self) -> float:
        """What scheduler and KV cache take of a step."""
        return (self.scheduler + self.kvcache) / self.total

    def __str__(self) -> str:
        return "".join(f"{getattr(self, field.name):>11.3f}" for field in fields(self))


HEAD = "".join(f"{field.name:>11}" for field in fields(Parts))


class TimedStep:
    """Calls the model, or nothing but prepared logits, and notes when."""

    def __init__(self, step: StepFunction) -> None:
        self._step = step
        self.began = self.ended = 0.0

    def __call__(self, batch: StepBatch) -> NDArray[np.float32]:
        """Pass on."""
        self.began = time.perf_counter()
        logits = self._step(batch)
        self.ended = time.perf_counter()
        return logits


class TimedCache(KVCacheManager):
    """Counts the time in calls of a step of decodes."""

    seconds = 0.0

    def advance(self, now: float) -> None:
        """Pass on."""
        began = time.perf_counter()
        super().advance(now)
        self.seconds += time.perf_counter() - began

    def extend(self, sequence_id: SequenceId, num_tokens: int, first_written: int) -> bool:
        """Pass on."""
        began = time.perf_counter()
        extended = super().extend(sequence_id, num_tokens, first_written)
        self.seconds += time.perf_counter() - began
        return extended

    def take_changes(self, sequence_id: SequenceId) -> tuple[int, tuple[BlockId, ...]]:
        """Pass on."""
        began = time.perf_counter()
        changes = super().take_changes(sequence_id)
        self.seconds += time.perf_counter() - began
        return changes

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Pass on."""
        began = time.perf_counter()
        copies = super().take_copies()
        self.seconds += time.perf_counter() - began
        return copies

    def commit(
        self, sequence_id: SequenceId, token_ids: Sequence[TokenId], num_computed: int
    ) -> None:
        """Pass on."""
        began = time.perf_counter()
        super().commit(sequence_id, token_ids, num_computed)
        self.seconds += time.perf_counter() - began


class Bench:
    """Sequences on a scheduler and a runner."""

    def __init__(
        self,
        step: StepFunction,
        backend: Backend,
        vocab_size: int,
        sampling: SamplingParams,
        *,
        num_sequences: int = NUM_SEQUENCES,
        tokenizer: Tokenizer | None = None,
        cache: type[KVCacheManager] = KVCacheManager,
    ) -> None:
        self.model = TimedStep(step)
        self.cache = cache(CacheConfig(NUM_BLOCKS, BLOCK_SIZE))
        config = SchedulerConfig(
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=NUM_SEQUENCES * NUM_PROMPT_TOKENS,
            max_num_seqs=NUM_SEQUENCES,
            vocab_size=vocab_size,
        )
        self.scheduler = Scheduler(config, self.cache)
        self.runner = Runner(
            self.model,
            backend.copy_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=NUM_SEQUENCES,
            vocab_size=vocab_size,
            sampler=backend.sampler(vocab_size),
        )
        self.processor = None if tokenizer is None else OutputProcessor(tokenizer, NullObserver())
        rng = np.random.default_rng(1)
        for index in range(num_sequences):
            length = NUM_PROMPT_TOKENS + index % BLOCK_SIZE
            self._add(index, rng.integers(vocab_size, size=length).tolist(), sampling)
        while any(s.num_uncomputed > 1 for s in self.scheduler.running.values()) or (
            self.scheduler.waiting
        ):
            self.step()

    def _add(self, index: int, prompt: list[int], sampling: SamplingParams) -> None:
        identity = CacheIdentity("model", "tokenizer", "float32")
        request = Request(
            RequestId(str(index)), tuple(prompt), replace(sampling, seed=index), identity, 0.0
        )
        self.scheduler.add(request)
        if self.processor is not None:
            self.processor.add(request)

    def step(self) -> Parts:
        """Run one step; the scheduler's part includes the cache's."""
        times = [time.perf_counter()]
        plan = self.scheduler.schedule(0.0)
        times.append(time.perf_counter())
        result = self.runner.execute(plan)
        times += [self.model.began, self.model.ended, time.perf_counter()]
        update = self.scheduler.update(plan, result, 0.0)
        self.scheduler.stats()
        times.append(time.perf_counter())
        if self.processor is not None:
            self.processor.process(update.outputs)
        times.append(time.perf_counter())
        schedule, batch, model, sampler, advance, output = (
            1e3 * (after - before) for before, after in pairwise(times)
        )
        return Parts(schedule + advance, 0.0, batch, model, sampler, output)

    def measure(self, num_steps: int) -> list[Parts]:
        """Run steps."""
        return [self.step() for _ in range(num_steps)]


def prepared(logits: NDArray[np.float32]) -> StepFunction:
    """Return a step that computes nothing."""
    return lambda batch: logits[: len(batch.logits_rows)]


def cache_share(num_steps: int, num_sequences: int = NUM_SEQUENCES) -> float:
    """Return the KV cache's share of what scheduler and KV cache take together."""
    logits = np.zeros((NUM_SEQUENCES, 64), np.float32)
    bench = Bench(
        prepared(logits),
        NumpyBackend("float32"),
        64,
        GREEDY,
        num_sequences=num_sequences,
        cache=TimedCache,
    )
    cache = bench.cache
    assert isinstance(cache, TimedCache)
    shares = []
    for _ in range(num_steps):
        cache.seconds = 0.0
        parts = bench.step()
        shares.append(1e3 * cache.seconds / parts.scheduler)
    return statistics.median(shares)


def summary(
    steps: Sequence[Parts], cache: float, pick: Callable[[Iterable[float]], float]
) -> Parts:
    """Return the median or the least of each part; ``cache`` is the cache's of the scheduler's."""
    found = {
        field.name: pick(getattr(step, field.name) for step in steps) for field in fields(Parts)
    }
    both = found["scheduler"]
    return Parts(**found | {"scheduler": (1 - cache) * both, "kvcache": cache * both})


def with_model(choice: Choice, num_steps: int) -> None:
    """Print the shares of steps of a model."""
    limits = Limits(MAX_MODEL_LEN, NUM_BLOCKS, BLOCK_SIZE, NUM_SEQUENCES, 512, 0.0)
    model = LoadedModel(choice, limits)
    source = open_checkpoint(resolve_model(choice.model, cache_dir=default_cache_dir()).path)
    tokenizer = load_tokenizer(source.tokenizer_source, model_vocab_size=model.vocab_size)
    print(f"{model.what}, greedy: {num_steps} steps, milliseconds")
    print(f"{'decodes':<12}{HEAD}{'around':>11}{'step':>11}  scheduler + kvcache")
    for num_sequences in (1, NUM_SEQUENCES):
        bench = Bench(
            model.step,
            model.backend,
            model.vocab_size,
            GREEDY,
            num_sequences=num_sequences,
            tokenizer=tokenizer,
        )
        steps = bench.measure(num_steps)
        cache = cache_share(num_steps, num_sequences)
        for name, pick in (("median", statistics.median), ("least", min)):
            parts = summary(steps, cache, pick)
            print(
                f"{num_sequences:<4}{name:<8}{parts}{parts.around:>11.3f}{parts.total:>11.2f}"
                f"  {parts.scheduler + parts.kvcache:.3f} ms, {parts.share:.2%} of a step"
            )


def without_model(choice: Choice, num_steps: int) -> None:
    """Print one line per vocabulary and kind of sampling."""
    cache = cache_share(num_steps)
    compute = choice.compute(())
    print(
        f"no model, {compute.backend.name} sampler: medians of {num_steps} steps of "
        f"{NUM_SEQUENCES} decodes, ms"
    )
    print(f"{'vocabulary, sampling':<30}{HEAD}")
    for vocab_size in (49_152, 151_936):
        rng = np.random.default_rng(0)
        logits = 3 * rng.standard_normal((NUM_SEQUENCES, vocab_size), dtype=np.float32)
        for name, sampling in KINDS.items():
            bench = Bench(prepared(logits), compute.backend, vocab_size, sampling)
            parts = summary(bench.measure(num_steps), cache, statistics.median)
            print(f"{vocab_size:>7}  {name:<21}{parts}", flush=True)


def main() -> None:
    """Print what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    Choice.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kinds", action="store_true", help="kinds of sampling, without a model")
    args = parser.parse_args()
    choice = Choice.from_arguments(args)
    print(describe_machine())
    if args.kinds:
        without_model(choice, min(args.steps, 30))
    else:
        with_model(choice, args.steps)


if __name__ == "__main__":
    main()
