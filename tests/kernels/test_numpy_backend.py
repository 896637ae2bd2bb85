"""What is the numpy backend's own: precision, memory and order of use."""

import gc
import tracemalloc

import gguf
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import InvariantError
from octavo.core.plan import BlockCopy
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.numpy_kv import NumpyKV, from_bfloat16, round_to_bfloat16
from octavo.kernels.ops import Array, Attention, KVSpec, Ops, Rope
from support_models import PagedDriver, f32_tensor


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_bfloat16_rounding(values: list[float]) -> None:
    """Nearest, ties to even, infinities kept, NaN never turned into a number."""
    given_values = np.array(values, np.float32)
    rounded = from_bfloat16(round_to_bfloat16(given_values))
    kind = gguf.GGMLQuantizationType.BF16
    wanted = gguf.dequantize(gguf.quantize(given_values[None], kind), kind)[0]
    np.testing.assert_array_equal(rounded, wanted)


def test_bfloat16_weights_are_rounded_once() -> None:
    """Each weight, bias and table entry is its nearest bfloat16; arithmetic stays in float32."""
    values = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)
    backend = NumpyBackend("bfloat16")
    packed = backend.linear_weight([f32_tensor(values)], [f32_tensor(values[:, 0])])
    wanted = from_bfloat16(round_to_bfloat16(values))
    np.testing.assert_array_equal(packed.values, wanted)
    np.testing.assert_array_equal(packed.bias, wanted[:, 0])
    np.testing.assert_array_equal(backend.embedding(f32_tensor(values)).values, wanted)
    exact = NumpyBackend().linear_weight([f32_tensor(values)])
    np.testing.assert_array_equal(exact.values, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_kv_takes_the_memory_that_the_spec_says(dtype: str) -> None:
    """The engine sizes the pool by ``KVSpec.block_bytes``: red if the backend takes more."""
    spec = KVSpec(3, 2, 64, 16, dtype)  # type: ignore[arg-type]
    num_blocks = (256 << 20) // spec.block_bytes
    process = psutil.Process()
    gc.collect()  # what earlier tests left must not go meanwhile
    before = process.memory_info().vms
    kv = NumpyKV(spec, num_blocks)
    taken = process.memory_info().vms - before
    assert kv.spec is spec
    assert taken == pytest.approx(spec.block_bytes * num_blocks, rel=0.05)


def test_first_tokens_take_little_memory_and_no_time() -> None:
    """HT-09, its cause: red when the first tokens of fresh blocks have the kernel clear a huge page
    for each layer and head, a stall of seconds that no abort can cut short."""
    spec = KVSpec(30, 3, 64, 16)
    kv = NumpyKV(spec, (1 << 30) // spec.block_bytes)
    new = np.ones((1, 3, 64), np.float32)
    process = psutil.Process()
    before = process.memory_info().rss
    for layer in range(30):
        kv.store(layer, np.array([0], np.int32), new, new)
    assert process.memory_info().rss - before < 16 << 20


def test_int8_kv_is_off_by_half_a_step_at_most() -> None:
    """Every head of every token has a scale of its own, which copies take along; what is not a
    number shows in its own vector alone."""
    kv = NumpyKV(KVSpec(1, 2, 8, 4, "int8"), 3)
    new = np.random.default_rng(1).standard_normal((2, 4, 2, 8)).astype(np.float32)
    new *= 10.0 ** np.arange(-6, 2, dtype=np.float32).reshape(1, 4, 2, 1)
    new[0, 0, 0, 3], new[1, 1, 1, 2], new[0, 2, 1] = np.nan, np.inf, 0.0
    kv.store(0, np.arange(4, 8, dtype=np.int32), new[0], new[1])
    kv.copy([BlockCopy(1, 2)])
    for block in (1, 2):
        for stored, wanted in zip(kv.gather(0, np.array([block], np.int32)), new, strict=True):
            wanted = wanted.swapaxes(0, 1)
            broken = ~np.isfinite(wanted).all(axis=-1)
            assert np.isnan(stored[broken]).all()
            step = np.abs(wanted[~broken]).max(axis=-1, keepdims=True) / 127
            assert (np.abs(stored - wanted)[~broken] <= step * 0.5001).all()


def test_bfloat16_kv_is_rounded_as_it_is_stored() -> None:
    """What is read back is the nearest bfloat16 of what was stored, in the right slots."""
    kv = NumpyKV(KVSpec(2, 2, 4, 3, "bfloat16"), 5)
    new = np.random.default_rng(1).standard_normal((2, 4, 2, 4)).astype(np.float32)
    slots = np.array([12, 13, 14, 3], np.int32)  # block 4 whole, then the start of block 1
    kv.store(1, slots, new[0], new[1])
    wanted = from_bfloat16(round_to_bfloat16(new)).transpose(0, 2, 1, 3)
    for stored, expected in zip(kv.gather(1, np.array([4, 1], np.int32)), wanted, strict=True):
        np.testing.assert_array_equal(stored[:, :4], expected)
        assert not stored[:, 4:].any()
    untouched, _ = kv.gather(0, np.array([4, 1], np.int32))
    assert not untouched.any()


def test_a_long_prompt_takes_bounded_memory() -> None:
    """A prompt of 4,096 tokens in one step: its scores would fill 512 MB if held at once."""
    length, heads = 4096, 8
    attention = Attention(0, heads, 1, 4, 0.5, Rope(np.ones(2, np.float32)))
    table = np.random.default_rng(2).standard_normal((8, 40)).astype(np.float32)
    backend = NumpyBackend()
    packed = backend.embedding(f32_tensor(table))
    head = backend.linear_weight([f32_tensor(np.eye(32))])

    def forward(ops: Ops) -> Array:
        q = ops.rope_and_store(ops.embed(packed), attention)
        return ops.logits(ops.logits_rows(ops.paged_attention(q, attention)), head)

    paged = PagedDriver(backend, forward, KVSpec(1, 1, 4, 16), num_blocks=256)
    paged.add("a", [i % 8 for i in range(length)])
    batch = paged.batch(("a", length), all_logits=False)
    step = backend.compile(forward)
    tracemalloc.start()
    step(batch)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20


def test_kv_comes_before_steps() -> None:
    """Compiling or copying without KV is a bug that is named, not an attribute error."""
    backend = NumpyBackend()
    with pytest.raises(InvariantError, match="allocate_kv"):
        backend.compile(lambda ops: None)
    with pytest.raises(InvariantError, match="allocate_kv"):
        backend.copy_blocks([])
