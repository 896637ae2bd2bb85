"""Time to choose the tokens of a step: the numpy sampler and the native one, interleaved.

``python benchmarks/sampler.py`` takes about two minutes. Logits are normal with a standard
deviation of ``--spread``: 3 is flatter than what a model gives, which is hard on top-p. ``reads``
is the time to read the logits once at this machine's bandwidth, measured in the same run.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from common import describe_machine

from octavo.core.ids import SequenceId
from octavo.core.plan import NewSequence
from octavo.core.sampling import SamplingParams
from octavo.kernels.native.backend import NativeBackend, NativeOptions
from octavo.kernels.sampling.interface import Float32, Mask, Sampler
from octavo.kernels.sampling.numpy_sampler import NumpySampler

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=0.8)
CASES = {
    "greedy": GREEDY,
    "temperature": PLAIN,
    "top_k 50": replace(PLAIN, top_k=50),
    "top_p 0.9": replace(PLAIN, top_p=0.9),
    "min_p 0.05": replace(PLAIN, min_p=0.05),
    "top_k 50, top_p 0.95": replace(PLAIN, top_k=50, top_p=0.95),
    "greedy, penalties": replace(GREEDY, repetition_penalty=1.1, frequency_penalty=0.1),
    "top_p 0.9, penalties": replace(PLAIN, top_p=0.9, presence_penalty=0.5),
    "greedy, logprobs 5": replace(GREEDY, logprobs=5),
    "greedy, bitmask": GREEDY,
    "top_p 0.9, bitmask": replace(PLAIN, top_p=0.9),
}
NUM_PROMPT_TOKENS = 500
NUM_OUTPUT_TOKENS = 100


class Contender:
    """One sampler with the states of its rows."""

    def __init__(self, sampler: Sampler, sequences: list[NewSequence]) -> None:
        self._sampler = sampler
        self._states = [sampler.state(sequence) for sequence in sequences]
        self.seconds: list[float] = []
        self.tokens: list[list[int]] = []

    def step(self, logits: Float32, draw: int, masks: Mapping[int, Mask]) -> None:
        """Choose a token for each row."""
        started = time.perf_counter()
        result = self._sampler.sample(logits, self._states, [draw] * len(self._states), masks)
        self.seconds.append(time.perf_counter() - started)
        self.tokens.append(result.token_ids)

    @property
    def milliseconds(self) -> float:
        """Median of the steps."""
        return 1e3 * statistics.median(self.seconds)


def sequences_of(params: SamplingParams, rows: int, vocab_size: int) -> list[NewSequence]:
    """Return sequences in the midst of their output."""
    rng = np.random.default_rng(1)
    size = (rows, NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS)
    return [
        NewSequence(
            SequenceId(i),
            tuple(tokens[:NUM_PROMPT_TOKENS]),
            tuple(tokens[NUM_PROMPT_TOKENS:]),
            params,
            i,
            frozenset(),
        )
        for i, tokens in enumerate(rng.integers(vocab_size, size=size).tolist())
    ]


def compare(
    name: str, logits: Float32, backend: NativeBackend, repeats: int
) -> tuple[float, float]:
    """Return milliseconds of numpy and native, their steps taken in turn."""
    rows, vocab_size = logits.shape
    sequences = sequences_of(CASES[name], rows, vocab_size)
    numpy = Contender(NumpySampler(vocab_size), sequences)
    native = Contender(backend.sampler(vocab_size), sequences)
    masks: dict[int, Mask] = {}
    if "bitmask" in name:
        allowed = np.random.default_rng(2).random((rows, vocab_size)) < 0.1
        masks = dict(enumerate(np.packbits(allowed, axis=1, bitorder="little")))
    for draw in range(repeats + 1):
        for contender in (numpy, native):
            contender.step(logits, draw, masks)
    if numpy.tokens != native.tokens:
        raise SystemExit(f"{name}: the two samplers chose different tokens.")
    return numpy.milliseconds, native.milliseconds


def main() -> None:
    """Print one line per vocabulary, number of rows and kind of sampling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 152_064])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--spread", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto")
    args = parser.parse_args()
    backend = NativeBackend(options=NativeOptions(args.isa, args.threads))
    bandwidth = backend.machine.read_gb_per_s(2**28)
    print(f"{describe_machine()}; {backend.isa}, {backend.threads} threads")
    print(
        f"load {os.getloadavg()[0]:.1f}, barrier {backend.machine.barrier_ns():.0f} ns, "
        f"reads {bandwidth:.1f} GB/s; milliseconds a step, median of {args.repeats + 1} steps"
    )
    print(
        f"{'vocabulary':>10}{'rows':>6}  {'sampling':<22}{'numpy':>9}{'native':>9}"
        f"{'ratio':>8}{'reads':>9}"
    )
    for vocab_size in args.vocab:
        for rows in args.rows:
            rng = np.random.default_rng(0)
            logits = args.spread * rng.standard_normal((rows, vocab_size), dtype=np.float32)
            reads = 1e3 * logits.nbytes / (1e9 * bandwidth)
            for name in args.cases:
                numpy, native = compare(name, logits.astype(np.float32), backend, args.repeats)
                print(
                    f"{vocab_size:>10}{rows:>6}  {name:<22}{numpy:9.3f}{native:9.3f}"
                    f"{numpy / native:8.1f}{reads:9.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
