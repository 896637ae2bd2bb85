"""Paged attention on each instruction set equals numpy's for any ragged batch."""

import gc
from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Array, Attention, KVSpec, Ops, Rope
from support_attention import Shape, attention_line, tolerance
from support_models import f32_tensor
from support_native import ISAS, Float32, backend_of, make_batch, run_line

pytestmark = pytest.mark.parametrize("isa", ISAS)

QUICK = settings(
    max_examples=10,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def both(
    isa: str, shape: Shape, batches: list[StepBatch], num_blocks: int, threads: int = 2
) -> tuple[list[Float32], list[Float32]]:
    """Results of numpy and of ``isa``."""
    line = attention_line(shape)
    wanted = run_line(NumpyBackend(), line, batches, shape.spec, num_blocks)
    got = run_line(backend_of(isa, threads=threads), line, batches, shape.spec, num_blocks)
    return wanted, got


def filled(lengths: list[int], cached: list[int], shape: Shape, seed: int) -> list[StepBatch]:
    """Steps that fill the cache and then compute the rest, on the same blocks."""
    whole = make_batch(
        [a + b for a, b in zip(cached, lengths, strict=True)],
        [0] * len(lengths),
        block_size=shape.block_size,
        seed=seed,
    )
    last = make_batch(lengths, cached, block_size=shape.block_size, seed=seed)
    return [whole, last]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 70)), min_size=1, max_size=5),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 5),
    st.sampled_from([4, 10, 16, 40, 64]),
    st.sampled_from([1, 3, 4, 16, 17, 32]),
    st.sampled_from([None, 1, 5, 30]),
    st.sampled_from([None, 2.0]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.booleans(),
    st.integers(1, 3),
)
@QUICK
def test_ragged_batches(
    isa: str,
    sequences: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: str,
    qk_norm: bool,
    layers: int,
) -> None:
    """Chunks and decodes mixed, any head and block size, windows, soft caps, all KV formats, and
    several layers in a block."""
    shape = Shape(
        kv_heads, group, dim, block_size, window, softcap, dim // 2, qk_norm, dtype, layers
    )
    batches = filled(
        [a for a, _ in sequences], [b for _, b in sequences], shape, seed=len(sequences)
    )
    wanted, got = both(isa, shape, batches, num_blocks=600)
    for right, left in zip(wanted, got, strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=layers * tolerance(isa, dtype))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_one_long_context_among_short_ones(isa: str, threads: int, dtype: str) -> None:
    """A row of 1,300 tokens is cut into parts and joined as if one thread had read it all."""
    shape = Shape(dtype=dtype)
    lengths, cached = [1, 1, 1, 5], [1299, 0, 17, 300]
    batches = filled(lengths, cached, shape, seed=3)
    wanted, got = both(isa, shape, batches, num_blocks=120, threads=threads)
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=tolerance(isa, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_eight_thousand_tokens(isa: str, dtype: str) -> None:
    """A decode, then a chunk, over 8,192 tokens that were computed as sixteen sequences of 512: red
    if sums or offsets of so long a row go wrong."""
    shape = Shape(dtype=dtype)
    fill = make_batch([512] * 16, [0] * 16, block_size=shape.block_size, seed=5)
    table = fill.block_tables.reshape(1, -1)
    long = [
        replace(make_batch([count], [8192 - count], seed=count), block_tables=table)
        for count in (1, 40)
    ]
    wanted, got = both(isa, shape, [fill, *long], num_blocks=table.size)
    most = max(1e-4, tolerance(isa, dtype))  # sums of so many terms differ by more
    for right, left in zip(wanted[1:], got[1:], strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=most)


@pytest.mark.parametrize("window", [100, 1000])
def test_window_of_a_long_context(isa: str, window: int) -> None:
    """Parts of a split start at the window, not at the first token."""
    shape = Shape(window=window)
    batches = filled([1, 3], [2000, 1500], shape, seed=4)
    wanted, got = both(isa, shape, batches, num_blocks=300)
    np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dim", [16, 64])  # the latter is one that matrix registers take
@pytest.mark.parametrize("length", [1, 7, 16, 31])
def test_stale_blocks_do_not_leak(isa: str, dtype: str, length: int, dim: int) -> None:
    """A reused block whose last owner left NaN behind the new owner's tokens: red if a weight of
    0 meets it."""
    shape = Shape(dim=dim, dtype=dtype)
    heads = shape.kv_heads * shape.group
    line = attention_line(shape)
    backend = backend_of(isa)
    backend.allocate_kv(shape.spec, 2)
    poison = np.full((50, 20), np.nan, np.float32)
    width = (heads + 2 * shape.kv_heads) * shape.dim

    def poisoned(ops: Ops) -> Array:
        attention = Attention(
            0, heads, shape.kv_heads, shape.dim, 1.0, Rope(np.ones(dim // 2, np.float32))
        )
        q = ops.rope_and_store(ops.linear(ops.embed(table), matrix), attention)
        return ops.logits_rows(ops.paged_attention(q, attention))

    table = backend.embedding(f32_tensor(poison))
    matrix = backend.linear_weight([f32_tensor(np.ones((width, 20)))])
    spoil = backend.compile(poisoned)
    step = backend.compile(line(backend))
    assert np.isnan(spoil(make_batch([32], [0], num_blocks=2))).all()
    batch = make_batch([length], [0], num_blocks=2)
    (wanted,) = run_line(NumpyBackend(), line, [batch], shape.spec, 2)
    np.testing.assert_allclose(step(batch), wanted, rtol=0, atol=tolerance(isa, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_copied_blocks_hold_the_same(isa: str, dtype: str) -> None:
    """Copy-on-write: a sequence moved to a copy of its block, scales and all, in every layer, goes
    on as before."""
    shape = Shape(dtype=dtype, layers=3)
    line, backend = attention_line(shape), backend_of(isa)
    backend.allocate_kv(shape.spec, 8)
    step = backend.compile(line(backend))
    first = make_batch([10], [0])
    step(first)
    second = make_batch([2], [10])
    wanted = step(second).copy()
    step(first)
    backend.copy_blocks([BlockCopy(0, 5)])
    moved = make_batch([2], [10])
    moved.block_tables[:] = 5
    np.testing.assert_array_equal(step(moved), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_bytes_of_a_block_are_those_that_it_takes(isa: str, dtype: str, block_size: int) -> None:
    """The engine divides its memory by this: red if scales or padding are forgotten, or if blocks
    of whole vectors cost more than their values and scales."""
    backend = backend_of(isa)
    spec = KVSpec(3, 2, 64, block_size, dtype)  # type: ignore[arg-type]
    taken = backend.kv_block_bytes(spec)
    assert taken >= spec.block_bytes
    if block_size % 16 == 0:
        assert taken == spec.block_bytes
    num_blocks = (64 << 20) // taken
    process = psutil.Process()
    gc.collect()  # what earlier tests left must not go meanwhile
    before = process.memory_info().vms
    backend.allocate_kv(spec, num_blocks)
    assert process.memory_info().vms - before == pytest.approx(taken * num_blocks, rel=0.02)
