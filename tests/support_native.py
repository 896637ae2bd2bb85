"""What tests of the native backend share: one fixture per instruction set, and plain batches."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kernels.batch import StepBatch
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.ops import Backend, Forward, KVSpec

native = pytest.importorskip(
    "octavo.kernels.native.backend", reason="this installation has no compiled native backend"
)
extension = pytest.importorskip("octavo.kernels.native._native")

ISAS: list[str] = extension.available_isas()

BFLOAT16_PRODUCTS = {"amx", "amx-emulated", "avx512bf16", "avx512-emulated"}
"""Sets that round what meets bfloat16 weights and KV to bfloat16."""

Float32 = NDArray[np.float32]
Line = Callable[[Backend], Forward]
"""Packs weights with a backend and returns the calls of a step."""


def make_batch(
    lengths: Sequence[int],
    cached: Sequence[int],
    *,
    block_size: int = 16,
    vocab: int = 50,
    seed: int = 0,
    num_blocks: int | None = None,
) -> StepBatch:
    """A batch of sequences with ``cached`` tokens computed and ``lengths`` to compute, on shuffled
    blocks; the logits of all tokens are wanted."""
    rng = np.random.default_rng(seed)
    new, done = np.array(lengths, np.int64), np.array(cached, np.int64)
    blocks = -(-(new + done) // block_size)
    order = rng.permutation(num_blocks or int(blocks.sum()))
    tables = np.zeros((len(new), int(blocks.max(initial=0))), np.int32)
    taken = 0
    for i, count in enumerate(blocks):
        tables[i, :count] = order[taken : taken + count]
        taken += count
    num_tokens = int(new.sum())
    return StepBatch(
        token_ids=rng.integers(0, vocab, num_tokens).astype(np.int32),
        cu_query_lens=np.concatenate([[0], np.cumsum(new)]).astype(np.int32),
        kv_lens=(new + done).astype(np.int32),
        block_tables=tables,
        logits_rows=np.arange(num_tokens, dtype=np.int32),
    )


def run_line(
    backend: Backend,
    line: Line,
    batches: Sequence[StepBatch],
    spec: KVSpec | None = None,
    num_blocks: int = 64,
) -> list[Float32]:
    """Results of a line of calls over steps that follow one another."""
    backend.allocate_kv(spec or KVSpec(1, 1, 8, 16), num_blocks)
    step = backend.compile(line(backend))
    return [step(batch).copy() for batch in batches]


def backend_of(
    isa: str, precision: str = "float32", threads: int = 2, deterministic: bool = False
) -> Backend:
    """A native backend that leaves the machine's CPUs to the scheduler."""
    options = NativeOptions(
        isa=isa, threads=threads, pin_threads=False, deterministic=deterministic
    )
    return native.NativeBackend(precision, options)  # type: ignore[no-any-return]
