"""Time around the model: scheduling, batch building and sampling of a step of 64 decodes.

``python benchmarks/step_overhead.py`` takes a few seconds and prints medians in milliseconds;
``--sampler numpy`` chooses the reference instead of the native sampler.
The model is replaced by prepared logits, so what is left is what Octavo adds to a step.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.ids import RequestId
from octavo.core.plan import BlockCopy
from octavo.core.request import CacheIdentity, Request
from octavo.core.sampling import SamplingParams
from octavo.engine.backends import choose_backend
from octavo.kernels.batch import StepBatch
from octavo.kernels.ops import Backend
from octavo.kvcache.manager import KVCacheManager
from octavo.runner.runner import Runner
from octavo.scheduler.scheduler import Scheduler

NUM_SEQUENCES = 64
NUM_PROMPT_TOKENS = 500
NUM_STEPS = 30
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 16

PLAIN = SamplingParams(temperature=0.8, max_tokens=1000, ignore_eos=True)
CASES = {
    "greedy": replace(PLAIN, temperature=0.0),
    "temperature": PLAIN,
    "top_k 50, top_p 0.95": replace(PLAIN, top_k=50, top_p=0.95),
    "top_p 0.95": replace(PLAIN, top_p=0.95),
    "min_p 0.05": replace(PLAIN, min_p=0.05),
    "penalties": replace(PLAIN, temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1),
    "greedy, logprobs 5": replace(PLAIN, temperature=0.0, logprobs=5),
}


class PreparedLogits:
    """A step function that computes nothing and notes when it was called."""

    def __init__(self, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        shape = (NUM_SEQUENCES, vocab_size)
        self.logits: NDArray[np.float32] = 3 * rng.standard_normal(shape, dtype=np.float32)
        self.called_at = 0.0

    def __call__(self, batch: StepBatch) -> NDArray[np.float32]:
        """Return as many rows as the batch wants."""
        self.called_at = time.perf_counter()
        return self.logits[: len(batch.logits_rows)]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy nothing: there is no KV."""


def measure(backend: Backend, vocab_size: int, sampling: SamplingParams) -> tuple[float, ...]:
    """Return median milliseconds of schedule, batch building, sampling and update."""
    blocks = NUM_SEQUENCES * (-(-MAX_MODEL_LEN // BLOCK_SIZE))
    config = SchedulerConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=NUM_SEQUENCES * NUM_PROMPT_TOKENS,
        max_num_seqs=NUM_SEQUENCES,
        vocab_size=vocab_size,
    )
    scheduler = Scheduler(config, KVCacheManager(CacheConfig(blocks, BLOCK_SIZE)))
    model = PreparedLogits(vocab_size)
    runner = Runner(
        model,
        model.copy_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_SEQUENCES,
        vocab_size=vocab_size,
        sampler=backend.sampler(vocab_size),
    )
    prompts = np.random.default_rng(1).integers(vocab_size, size=(NUM_SEQUENCES, NUM_PROMPT_TOKENS))
    for i, prompt in enumerate(prompts.tolist()):
        identity = CacheIdentity("model", "tokenizer", "float32")
        params = replace(sampling, seed=i)
        scheduler.add(Request(RequestId(str(i)), tuple(prompt), params, identity, 0.0))
    parts = [step(scheduler, runner, model) for _ in range(NUM_STEPS + 1)][1:]  # first: prefill
    return tuple(1e3 * statistics.median(part) for part in zip(*parts, strict=True))


def step(scheduler: Scheduler, runner: Runner, model: PreparedLogits) -> tuple[float, ...]:
    """Run one step; return the seconds of its parts."""
    times = [time.perf_counter()]
    plan = scheduler.schedule(0.0)
    times.append(time.perf_counter())
    result = runner.execute(plan)
    times.extend((model.called_at, time.perf_counter()))
    scheduler.update(plan, result, 0.0)
    times.append(time.perf_counter())
    return tuple(after - before for before, after in pairwise(times))


def main() -> None:
    """Print one line per vocabulary and kind of sampling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sampler", choices=("auto", "native", "numpy"), default="auto")
    args = parser.parse_args()
    backend = choose_backend(args.sampler, "auto", "auto", threads=0, isa="auto").backend
    print(f"{backend.name} sampler, load {os.getloadavg()[0]:.1f}")
    print(f"milliseconds a step, median of {NUM_STEPS} steps of {NUM_SEQUENCES} decodes")
    print(
        f"{'vocabulary':>10}  {'sampling':<22}{'schedule':>9}{'batch':>9}{'sample':>9}{'update':>9}"
    )
    for vocab_size in (49_152, 151_936):
        for name, sampling in CASES.items():
            parts = "".join(f"{part:9.2f}" for part in measure(backend, vocab_size, sampling))
            print(f"{vocab_size:>10}  {name:<22}{parts}", flush=True)


if __name__ == "__main__":
    main()
