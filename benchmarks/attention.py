"""What cutting long contexts, reading shared prefixes once, and determinism do to attention.

python benchmarks/attention.py
python benchmarks/attention.py --calibrate

Steps of nothing but attention layers (the default model's sizes unless asked otherwise) over filled
KV, with two settings in turn on the same backend; the ratio is of their medians. What a whole step
gains is less: attention is a part of it. With ``--threads 1`` times are those of the processor, so
other work on the machine disturbs them less; cuts need more threads. ``--calibrate`` prints what
one thread of this machine takes beside the constants of ``native/src/attention_cost.h``.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import get_args

import numpy as np

from kernels import make_batch
from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.native.backend import KV_TYPES, NativeBackend
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.ops import Array, Attention, KVDtype, KVSpec, Ops, Rope, StepFunction
from octavo.kernels.weights import Encoding, WeightTensor

BLOCK_SIZE = 16
VOCAB = 64
HIDDEN = 64


@dataclass(frozen=True)
class Sizes:
    """Of every attention layer."""

    layers: int
    heads: int
    kv_heads: int
    dim: int


@dataclass(frozen=True)
class Settings:
    """What the planner may do."""

    split: bool = True
    share: bool = True
    deterministic: bool = False


@dataclass(frozen=True)
class Case:
    """Two settings to compare on a batch: the first is the baseline."""

    name: str
    batch: StepBatch
    old: Settings
    new: Settings


def tensor(rows: int, columns: int, seed: int) -> WeightTensor:
    """Random weights in F32."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)) * 0.1
    data = np.ascontiguousarray(values, np.float32).view(np.uint8)
    return WeightTensor("t", Encoding.F32, (rows, columns), data)


def attention_step(
    backend: NativeBackend, sizes: Sizes, kv_dtype: KVDtype, num_blocks: int
) -> StepFunction:
    """Return a step of attention layers over KV whose memory is all in use."""
    width = (sizes.heads + 2 * sizes.kv_heads) * sizes.dim
    table = backend.embedding(tensor(VOCAB, HIDDEN, 0))
    qkv = backend.linear_weight([tensor(width, HIDDEN, 1)])
    rope = Rope(np.logspace(0, -4, sizes.dim // 2).astype(np.float32))
    layers = [
        Attention(i, sizes.heads, sizes.kv_heads, sizes.dim, sizes.dim**-0.5, rope)
        for i in range(sizes.layers)
    ]

    def forward(ops: Ops) -> Array:
        x = ops.embed(table)
        out = None
        for attention in layers:
            out = ops.paged_attention(ops.rope_and_store(ops.linear(x, qkv), attention), attention)
        return ops.logits_rows(out)

    spec = KVSpec(sizes.layers, sizes.kv_heads, sizes.dim, BLOCK_SIZE, kv_dtype)
    backend.allocate_kv(spec, num_blocks)
    step = backend.compile(forward)
    step(make_batch([BLOCK_SIZE], [0], VOCAB))
    backend.copy_blocks([BlockCopy(0, block) for block in range(1, num_blocks)])
    return step


def decodes(contexts: list[int], shared: int = 0) -> StepBatch:
    """One token for each context; the first ``shared`` tokens of all lie in the same blocks."""
    batch = make_batch([1] * len(contexts), [context - 1 for context in contexts], VOCAB)
    batch.block_tables[:, : shared // BLOCK_SIZE] = batch.block_tables[0, : shared // BLOCK_SIZE]
    return batch


def cases() -> list[Case]:
    """Long and mixed contexts, shared prefixes, and the price of determinism."""
    plain, cut = Settings(split=False, share=False), Settings(share=False)
    exact = Settings(share=False, deterministic=True)
    split = {
        "one of 8192": decodes([8192]),
        "8192 and 31 of 128": decodes([8192] + [128] * 31),
        "8192 and 7 of 128": decodes([8192] + [128] * 7),
        "32 of 2048": decodes([2048] * 32),
        "32 of 256": decodes([256] * 32),
    }
    shared = {
        "32 of 2112, 2048 shared": decodes([2112] * 32, 2048),
        "4 of 1100, 1024 shared": decodes([1100] * 4, 1024),
        "32 of 400, 256 shared": decodes([400] * 32, 256),
        "32 of 400, none shared": decodes([400] * 32),
    }
    same = {
        "one of 1024": decodes([1024]),
        "one of 8192": decodes([8192]),
        "8 of 1024": decodes([1024] * 8),
        "32 of 1024": decodes([1024] * 32),
        "8192 and 31 of 128": decodes([8192] + [128] * 31),
        "prompt of 1024": make_batch([1024], [0], VOCAB),
    }
    return [
        *(Case(f"cut: {name}", batch, plain, cut) for name, batch in split.items()),
        *(Case(f"shared: {name}", batch, cut, Settings()) for name, batch in shared.items()),
        *(Case(f"deterministic: {name}", batch, cut, exact) for name, batch in same.items()),
    ]


def measure(backend: NativeBackend, step: StepFunction, case: Case, rounds: int) -> list[float]:
    """Median seconds of the old and the new settings, in turn."""
    clock = time.thread_time if backend.threads == 1 else time.perf_counter
    times: list[list[float]] = [[], []]
    for round_ in range(rounds + 1):
        for which, chosen in enumerate((case.old, case.new)):
            backend.machine.set_attention(chosen.split, chosen.share, chosen.deterministic)
            begin = clock()
            step(case.batch)
            if round_:
                times[which].append(clock() - begin)
    return [statistics.median(each) for each in times]


def report(backend: NativeBackend, sizes: Sizes, kv_dtype: KVDtype, rounds: int) -> None:
    """Print all cases."""
    todo = cases()
    num_blocks = max(int(case.batch.kv_lens.sum()) // BLOCK_SIZE + 64 for case in todo)
    step = attention_step(backend, sizes, kv_dtype, num_blocks)
    print(f"{'case':40}{'old ms':>9}{'new ms':>9}{'new/old':>9}{'GB/s new':>10}")
    token = KVSpec(sizes.layers, sizes.kv_heads, sizes.dim, 1, kv_dtype).block_bytes
    for case in todo:
        old, new = measure(backend, step, case, rounds)
        read = float(case.batch.kv_lens.sum()) * token / new / 1e9
        print(f"{case.name:40}{old * 1e3:9.2f}{new * 1e3:9.2f}{new / old:9.3f}{read:10.1f}")


def calibrate(backend: NativeBackend, sizes: Sizes, kv_dtype: KVDtype) -> None:
    """Print measured costs beside the constants."""
    heads = sizes.heads // sizes.kv_heads
    names = ("item", "token", "tile_token", "vector_token", "state")
    kinds = [
        backend.machine.attention_costs(KV_TYPES[kv_dtype], heads, sizes.dim, measured)
        for measured in (False, True)
    ]
    print(f"{'ns':14}{'constant':>10}{'measured':>10}")
    for name, constant, measured in zip(names, *kinds, strict=True):
        print(f"{name:14}{constant:10.1f}{measured:10.1f}")


def main() -> None:
    """Parse the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--kv-dtype", choices=get_args(KVDtype), default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--calibrate", action="store_true")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.layers, arguments.heads, arguments.kv_heads, arguments.dim)
    options = NativeOptions(isa=arguments.isa, threads=arguments.threads)
    backend = NativeBackend("float32", options)
    machine = backend.machine
    print(
        f"{backend.isa}, {backend.threads} threads, KV {arguments.kv_dtype}; barrier "
        f"{machine.barrier_ns():.0f} ns, read {machine.read_gb_per_s(256 << 20):.1f} GB/s, "
        f"float {machine.peak_float_ops() / 1e9:.0f} GFLOP/s, "
        f"{machine.bfloat_product()} {machine.peak_bfloat_ops() / 1e9:.0f} GFLOP/s"
    )
    if arguments.calibrate:
        calibrate(backend, sizes, arguments.kv_dtype)
    else:
        report(backend, sizes, arguments.kv_dtype, arguments.rounds)


if __name__ == "__main__":
    main()
