"""Kernels against the ceilings of this machine, measured in the same run.

    python benchmarks/kernels.py [--model FILE] [--precision int8 ...] [--isa NAME] [--seconds 2]
    python benchmarks/kernels.py --ceilings    # the machine alone, as JSON, for other benchmarks

Prints barrier time, read bandwidth and the peak of the instructions that multiply (bytes, floats or
bfloat16, as the precision and the instruction set have it), then each step as tokens per second, as
share of the read bandwidth (bytes of weights and KV that a step must read) and as share of the peak
(operations of all products), and the numpy backend beside it. Best and median of the steps run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Backend, KVDtype, StepFunction
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.config import DecoderConfig
from octavo.models.decoder import build_decoder, kv_spec

BLOCK_SIZE = 16
CONTEXT = 256
READ_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """A batch and its name."""

    name: str
    batch: StepBatch


@dataclass(frozen=True)
class Ceilings:
    """What the machine can do at best, with the same threads."""

    barrier_ns: float
    read_gb_per_s: float
    product: str
    """Instructions that multiply activations."""
    ops: float
    """Operations per second with them."""
    matrix_rows: int
    """From so many tokens on, those of bfloat16 multiply quantised weights too; 0: never."""
    bfloat_product: str
    bfloat_ops: float

    def ops_for(self, num_tokens: int) -> float:
        """Operations per second with the instructions that a step of so many tokens takes."""
        return self.bfloat_ops if 0 < self.matrix_rows <= num_tokens else self.ops

    def __str__(self) -> str:
        many = ""
        if self.matrix_rows:
            peak = f"{self.bfloat_product} {self.bfloat_ops / 1e9:.0f} Gop/s"
            many = f", from {self.matrix_rows} tokens on {peak}"
        return (
            f"barrier {self.barrier_ns:.0f} ns, read {self.read_gb_per_s:.1f} GB/s, "
            f"{self.product} {self.ops / 1e9:.0f} Gop/s{many}"
        )


def make_batch(lengths: Sequence[int], cached: Sequence[int], vocab: int) -> StepBatch:
    """Sequences on consecutive blocks; the logits of each last token are wanted."""
    new, done = np.array(lengths), np.array(cached)
    blocks = -(-(new + done) // BLOCK_SIZE)
    first = np.concatenate([[0], np.cumsum(blocks)[:-1]])
    tables = (first[:, None] + np.arange(blocks.max())[None, :]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    ids = np.random.default_rng(0).integers(0, vocab, int(new.sum()))
    return StepBatch(
        token_ids=ids.astype(np.int32),
        cu_query_lens=starts,
        kv_lens=(new + done).astype(np.int32),
        block_tables=tables,
        logits_rows=(starts[1:] - 1).astype(np.int32),
    )


def cases(vocab: int) -> list[Case]:
    """Decodes at a context of 256, a prompt of 512, and a mix of both."""
    decodes = [
        Case(f"decode {n}", make_batch([1] * n, [CONTEXT - 1] * n, vocab)) for n in (1, 8, 32, 64)
    ]
    prefill = Case("prefill 512", make_batch([512], [0], vocab))
    mixed = Case("31 + 128 new", make_batch([1] * 31 + [128], [CONTEXT - 1] * 31 + [0], vocab))
    return [*decodes, prefill, mixed]


def operations(config: DecoderConfig, batch: StepBatch) -> float:
    """Multiplications and additions of all products of a step, attention included."""
    width = config.num_heads * config.head_dim
    qkv = config.hidden_size * (width + 2 * config.num_kv_heads * config.head_dim)
    behind = config.hidden_size * (width + 3 * config.intermediate_size)
    seen = float((batch.positions.astype(np.int64) + 1).sum())
    wanted, tokens = len(batch.logits_rows), batch.num_tokens
    layers = config.num_layers * (tokens * qkv + 2 * seen * width)
    layers += behind * ((config.num_layers - 1) * tokens + wanted)
    return 2.0 * (layers + wanted * config.vocab_size * config.hidden_size)


def kv_bytes(config: DecoderConfig, batch: StepBatch, kv_dtype: KVDtype) -> float:
    """Bytes of keys and values that a step must read at least once."""
    token = kv_spec(config, 1, kv_dtype).block_bytes
    return float(batch.kv_lens.astype(np.int64).sum()) * token


def measure(step: StepFunction, batch: StepBatch, seconds: float) -> tuple[float, float]:
    """Best and median seconds of a step."""
    step(batch)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        step(batch)
        times.append(time.perf_counter() - begin)
    return min(times), statistics.median(times)


def compiled(
    backend: Backend, checkpoint: Checkpoint, kv_dtype: KVDtype, num_blocks: int
) -> StepFunction:
    """A step function over KV that was all written: what never was is a page of zeros."""
    decoder = build_decoder(checkpoint.config, checkpoint.tensors, backend)
    backend.allocate_kv(decoder.kv_spec(BLOCK_SIZE, kv_dtype), num_blocks)
    step = backend.compile(decoder.forward)
    step(make_batch([BLOCK_SIZE], [0], checkpoint.config.vocab_size))
    backend.copy_blocks([BlockCopy(0, block) for block in range(1, num_blocks)])
    return step


def report(
    checkpoint: Checkpoint,
    backend: NativeBackend,
    kv_dtype: KVDtype,
    precision: str,
    seconds: float,
) -> None:
    """Print the table of one precision."""
    config = checkpoint.config
    begin = time.perf_counter()
    step = compiled(backend, checkpoint, kv_dtype, 64 * (CONTEXT // BLOCK_SIZE) + 64)
    load_s = time.perf_counter() - begin
    weights = backend.packed_bytes
    found = ceilings(backend, precision, weights)
    print(f"\n{precision}, KV {kv_dtype}: {weights / 1e6:.0f} MB packed in {load_s:.2f} s; {found}")
    print(f"  {'step':14}{'best ms':>9}{'median':>9}{'tokens/s':>10}{'of read':>9}{'of peak':>9}")
    for case in cases(config.vocab_size):
        best, median = measure(step, case.batch, seconds)
        read = weights + kv_bytes(config, case.batch, kv_dtype)
        print(
            f"  {case.name:14}{best * 1e3:9.2f}{median * 1e3:9.2f}"
            f"{case.batch.num_tokens / best:10.0f}"
            f"{read / best / 1e9 / found.read_gb_per_s:9.0%}"
            f"{operations(config, case.batch) / best / found.ops_for(case.batch.num_tokens):9.0%}"
        )


def ceilings(backend: NativeBackend, precision: str, num_bytes: int) -> Ceilings:
    """Measure the machine; reads go over as many bytes as the weights have."""
    machine = backend.machine
    bfloats = machine.bfloat_product(), machine.peak_bfloat_ops()
    matrix_rows = 0
    if precision == "float32":
        product, ops = "float products", machine.peak_float_ops()
    elif precision == "bfloat16":
        product, ops = bfloats
    else:
        product, ops = machine.byte_product(), machine.peak_byte_ops()
        matrix_rows = machine.matrix_rows()
    read = machine.read_gb_per_s(num_bytes)
    return Ceilings(machine.barrier_ns(), read, product, ops, matrix_rows, *bfloats)


def machine_as_json(options: NativeOptions) -> str:
    """Return all ceilings as one line of JSON; reads go over READ_BYTES."""
    backend = NativeBackend("int8", options)
    machine = backend.machine
    return json.dumps(
        {
            "isa": backend.isa,
            "threads": backend.threads,
            "barrier_ns": round(machine.barrier_ns(), 1),
            "read_gb_per_s": round(machine.read_gb_per_s(READ_BYTES), 2),
            "float_gop_per_s": round(machine.peak_float_ops() / 1e9, 1),
            machine.bfloat_product(): round(machine.peak_bfloat_ops() / 1e9, 1),
            machine.byte_product(): round(machine.peak_byte_ops() / 1e9, 1),
        }
    )


def report_numpy(checkpoint: Checkpoint, seconds: float) -> None:
    """Print the numpy backend's table."""
    step = compiled(NumpyBackend(), checkpoint, "float32", 64 * (CONTEXT // BLOCK_SIZE) + 64)
    print("\nnumpy, float32")
    for case in cases(checkpoint.config.vocab_size):
        best, median = measure(step, case.batch, seconds)
        rate = case.batch.num_tokens / best
        print(f"  {case.name:14}{best * 1e3:9.1f}{median * 1e3:9.1f}{rate:10.0f}")


def main() -> None:
    """Parse the command line and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    default = Path.home() / ".cache/octavo/models/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    parser.add_argument("--model", type=Path, default=default)
    parser.add_argument("--precision", nargs="+", default=["file", "int8", "bfloat16", "float32"])
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--kv-dtype", choices=get_args(KVDtype), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=2.0, help="per step")
    parser.add_argument("--numpy", action="store_true", help="also the numpy backend")
    parser.add_argument(
        "--ceilings", action="store_true", help="only the machine's, as JSON, and no step"
    )
    arguments = parser.parse_args()
    options = NativeOptions(isa=arguments.isa, threads=arguments.threads)
    if arguments.ceilings:
        print(machine_as_json(options))
        return
    checkpoint = open_checkpoint(arguments.model)
    for precision in arguments.precision:
        backend = NativeBackend(precision, options)
        print(f"{backend.isa}, {backend.threads} threads", end="")
        report(checkpoint, backend, arguments.kv_dtype, precision, arguments.seconds)
    if arguments.numpy:
        report_numpy(checkpoint, arguments.seconds)


if __name__ == "__main__":
    main()
