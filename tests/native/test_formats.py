"""Packed weight formats: what they hold, and products with them, on each instruction set."""

from dataclasses import replace

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.core.errors import LoadError
from octavo.kernels.dequantize import to_float32
from octavo.kernels.ops import Backend, Forward, Ops
from octavo.kernels.weights import Encoding, WeightTensor
from support_models import f32_tensor
from support_native import BFLOAT16_PRODUCTS, ISAS, backend_of, make_batch, run_line

pytestmark = pytest.mark.parametrize("isa", ISAS)
Float32 = NDArray[np.float32]
GROUPED = [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q5_0, Encoding.Q5_1, Encoding.Q8_0]
K_QUANTS = [Encoding.Q4_K, Encoding.Q5_K, Encoding.Q6_K]


def encoded(values: Float32, encoding: Encoding) -> WeightTensor:
    """Quantise with the gguf package."""
    data = gguf.quantize(values, gguf.GGMLQuantizationType[encoding.label])
    return WeightTensor("w", encoding, values.shape, data.view(np.uint8).reshape(len(values), -1))


def random_blocks(rows: int, columns: int, encoding: Encoding) -> WeightTensor:
    """Random K-quant blocks with scales near 0.01."""
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (rows, encoding.row_bytes(columns)), np.uint8)
    blocks = data.reshape(-1, encoding.block_bytes)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    places = [208] if encoding is Encoding.Q6_K else [0, 2]
    for place in places:
        blocks[:, place : place + 2] = scale
    return WeightTensor("w", encoding, (rows, columns), data)


def normal_rows(rows: int, columns: int) -> Float32:
    """Random values of size 1."""
    return np.random.default_rng(6).standard_normal((rows, columns)).astype(np.float32)


def decoded_by(isa: str, tensor: WeightTensor, precision: str) -> Float32:
    """All rows of a table, looked up."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(tensor)
        return lambda ops: ops.logits_rows(ops.embed(table))

    batch = make_batch([tensor.shape[0]], [0])
    batch.token_ids[:] = np.arange(tensor.shape[0])
    return run_line(backend_of(isa, precision), line, [batch])[0]


@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q8_0])
def test_values_of_the_file_stay_as_they_are(isa: str, encoding: Encoding) -> None:
    """These formats lose nothing: red if a nibble, a scale or a minimum is put elsewhere."""
    values = np.random.default_rng(1).standard_normal((45, 96)).astype(np.float32)
    tensor = encoded(values, encoding)
    np.testing.assert_allclose(decoded_by(isa, tensor, "file"), to_float32(tensor), atol=1e-6)


@pytest.mark.parametrize("encoding", [*GROUPED, *K_QUANTS, Encoding.F16, Encoding.BF16])
def test_other_formats_keep_their_accuracy(isa: str, encoding: Encoding) -> None:
    """Every encoding is held within half a percent of its largest value per group."""
    if encoding in K_QUANTS:
        tensor = random_blocks(19, 512, encoding)
    else:
        values = np.random.default_rng(2).standard_normal((19, 512)).astype(np.float32)
        tensor = encoded(values, encoding)
    wanted = to_float32(tensor)
    groups = np.abs(wanted).reshape(-1, 32).max(axis=1).repeat(32).reshape(wanted.shape)
    assert (np.abs(decoded_by(isa, tensor, "file") - wanted) <= 0.005 * groups + 1e-6).all()


def with_scales(tensor: WeightTensor, scale: float, every: int) -> WeightTensor:
    """The same blocks, but for the scale of every so manieth; their values stay."""
    data = tensor.data.copy()
    blocks = data.reshape(-1, tensor.encoding.block_bytes)
    blocks[::every, :2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return replace(tensor, data=data)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q8_0, Encoding.Q4_K])
def test_a_scale_of_zero_makes_zeros(isa: str, encoding: Encoding, rows: int) -> None:
    """Groups whose scale is 0 though their values are not: red if an exponent is added to the 0."""
    rng = np.random.default_rng(8)
    if encoding is Encoding.Q4_K:
        whole = random_blocks(37, 768, encoding)
    else:
        whole = encoded(rng.standard_normal((37, 768)).astype(np.float32), encoding)
    tensor = with_scales(whole, 0.0, every=3)
    np.testing.assert_allclose(decoded_by(isa, tensor, "file"), to_float32(tensor), atol=1e-2)
    x = rng.standard_normal((50, 768)).astype(np.float32)
    product(isa, x, tensor, "file", rows)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q8_0])
def test_a_matrix_of_zeros_leaves_nothing(isa: str, encoding: Encoding, rows: int) -> None:
    """All scales 0: red if what stands for them is seen in the result."""
    tensor = encoded(np.zeros((37, 64), np.float32), encoding)

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(np.ones((50, 64), np.float32)))
        weight = backend.linear_weight([tensor])
        return lambda ops: ops.logits_rows(ops.linear(ops.embed(table), weight))

    (got,) = run_line(backend_of(isa, "file"), line, [make_batch([rows], [0])])
    assert np.abs(got).max() < 1e-8


@pytest.mark.parametrize(
    ("encoding", "precision"),
    [
        (Encoding.Q4_0, "file"),
        (Encoding.Q4_1, "file"),
        (Encoding.Q8_0, "file"),
        (Encoding.F32, "int4"),
        (Encoding.F32, "int8"),
        (Encoding.F32, "bfloat16"),
    ],
)
def test_a_row_keeps_its_bits_in_any_company(isa: str, encoding: Encoding, precision: str) -> None:
    """Red if a compiler joins products and sums otherwise for few rows than for many, or these take
    another way."""
    rng = np.random.default_rng(9)
    matrix = (rng.standard_normal((75, 288)) + 0.1).astype(np.float32)
    tensor = f32_tensor(matrix) if encoding is Encoding.F32 else encoded(matrix, encoding)

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal_rows(50, 288)))
        weight = backend.linear_weight([tensor])
        return lambda ops: ops.logits_rows(ops.linear(ops.embed(table), weight))

    counts = [300, 1, 2, 9, 10, 16, 17, 33, 64, 255]
    batches = [make_batch([count], [0]) for count in counts]
    for batch in batches:
        batch.token_ids[:] = np.arange(len(batch.token_ids)) % 50
    takes_many_apart = backend_of(isa)._native.matrix_rows() > 0  # but in the deterministic mode
    backend = backend_of(isa, precision, deterministic=takes_many_apart)
    whole, *parts = run_line(backend, line, batches)
    for part in parts:
        np.testing.assert_array_equal(part, whole[: len(part)])


@pytest.mark.parametrize("scale", [np.nan, np.inf])
@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q8_0])
def test_scales_that_are_not_finite_are_refused(isa: str, encoding: Encoding, scale: float) -> None:
    """A damaged file says so as it is loaded, and which of its matrices is."""
    values = np.random.default_rng(8).standard_normal((5, 64)).astype(np.float32)
    tensor = with_scales(encoded(values, encoding), scale, every=10)
    with pytest.raises(LoadError, match=r"^w: .*damaged"):
        decoded_by(isa, tensor, "file")


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_values_that_no_scale_holds_are_refused(isa: str, precision: str, value: float) -> None:
    """Nor is a matrix quantised whose values are not finite, or beyond any float16 scale."""
    values = np.random.default_rng(8).standard_normal((5, 64)).astype(np.float32)
    values[3, 40] = value
    with pytest.raises(LoadError, match=r"^t: .*--dtype float32"):
        linear_as_held(isa, f32_tensor(values), precision)


def test_int8_in_groups_rounds_to_their_scales(isa: str) -> None:
    """Each value is held within half a step of its group's max / 127, a float16 number; the last
    group is shorter."""
    values = np.random.default_rng(3).standard_normal((40, 70)).astype(np.float32)
    padded = np.pad(values, ((0, 0), (0, 26))).reshape(40, 3, 32)
    step = (np.abs(padded).max(axis=2) / 127).repeat(32, axis=1)[:, :70]
    got = decoded_by(isa, f32_tensor(values), "int8")
    # A scale that was rounded down clips the largest value, by up to 127 * 2^-11 steps.
    assert (np.abs(got - values) <= step * (0.5 + 127 / 2048)).all()


def quantised_rows(x: Float32) -> NDArray[np.float64]:
    """Activations as the kernels see them: int8 steps per group of 32, each a power of the root of
    2; the widest four take 128 times as many and leave the choice to the others."""
    columns = x.shape[1]
    quads = np.pad(x, ((0, 0), (0, -columns % 32))).reshape(len(x), -1, 8, 4).astype(np.float64)
    widths = np.sort(np.abs(quads).max(axis=3), axis=2)
    least = np.maximum(widths[:, :, -2] / 127, widths[:, :, -1] / (127 * 128))[:, :, None, None]
    log = np.log2(least, out=np.full_like(least, -np.inf), where=least > 0)
    scale = np.exp2(np.ceil(2 * log - 1e-6) / 2)
    steps = np.divide(quads, scale, out=np.zeros_like(quads), where=scale > 0)
    return (np.rint(steps) * scale).reshape(len(x), -1)[:, :columns]


def bfloat16_rows(x: Float32) -> NDArray[np.float64]:
    """The nearest bfloat16 of each value, the even one of two."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def product(isa: str, x: Float32, tensor: WeightTensor, precision: str, rows: int) -> None:
    """Check ``rows`` rows out of ``x`` times a matrix, against exactly what is held: weights as
    packed, activations as ``quantised_rows``, as bfloat16 or as they are. Where matrix registers
    take many rows, quantised weights are bfloat16 too, cut off within a step."""

    def line(backend: Backend) -> Forward:
        plain = backend_of(isa, "float32")
        table = plain.embedding(f32_tensor(x))
        table.pack(plain._native, "float32", gated=False)  # the table stays exact
        weight = backend.linear_weight([tensor])
        return lambda ops: ops.logits_rows(ops.linear(ops.embed(table), weight))

    batch = make_batch([rows], [0], vocab=len(x))
    backend = backend_of(isa, precision)
    (got,) = run_line(backend, line, [batch])
    held_by = linear_as_held if precision == "int4" else decoded_by
    held = held_by(isa, tensor, precision).astype(np.float64)
    taken = x[batch.token_ids]
    widened = 0 < backend._native.matrix_rows() <= rows and precision != "float32"
    if widened or (precision == "bfloat16" and isa in BFLOAT16_PRODUCTS):
        seen = bfloat16_rows(taken)
    elif precision in ("float32", "bfloat16"):
        seen = taken.astype(np.float64)
    else:
        seen = quantised_rows(taken)
    wanted = seen @ held.T
    # A value half way between two steps may be rounded either way.
    allowed = np.full_like(wanted, 2e-4 * np.abs(wanted).max() + 1e-6)
    if widened and precision != "bfloat16":
        allowed += 2 * 2**-8 * np.sqrt(seen**2 @ (held**2).T)  # six deviations of rounded weights
    assert (np.abs(got - wanted) <= allowed).all()


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 13, 25, 200])
@pytest.mark.parametrize(
    ("encoding", "precision"),
    [
        (Encoding.F32, "int8"),
        (Encoding.F32, "int4"),
        (Encoding.Q8_0, "int4"),
        (Encoding.Q8_0, "file"),
        (Encoding.Q4_0, "file"),
        (Encoding.Q4_1, "file"),
        (Encoding.Q4_1, "int8"),
        (Encoding.F32, "bfloat16"),
        (Encoding.F32, "float32"),
    ],
)
def test_products(isa: str, rows: int, encoding: Encoding, precision: str) -> None:
    """Red if a sum overflows or saturates, a compensation or a minimum is wrong, or a tile of some
    height mixes up its rows; activations have outliers and a mean that is not 0, and one row is all
    of the largest value."""
    inputs, outputs = 160, 75
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((50, inputs)) + 0.7).astype(np.float32)
    x[:, 3] *= 40
    x[7] = -3.0
    matrix = (rng.standard_normal((outputs, inputs)) + 0.2).astype(np.float32)
    matrix[:, :32] = np.sign(matrix[:, :32])  # extreme values in every place of a group
    matrix[11] = -2.0
    tensor = f32_tensor(matrix) if encoding is Encoding.F32 else encoded(matrix, encoding)
    product(isa, x, tensor, precision, rows)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("precision", ["int8", "int4", "bfloat16", "float32", "file"])
def test_products_of_random_shapes(isa: str, seed: int, precision: str) -> None:
    """Rows, inputs and outputs are multiples of nothing (inputs of 4 bits: of a group). Red if a
    panel's padding, a last group or a row's stride is wrong for some shape."""
    rng = np.random.default_rng(100 + seed)
    rows, inputs, outputs = (int(n) for n in rng.integers(1, [90, 700, 200]))
    if precision == "file":
        inputs = -(-inputs // 32) * 32
    x = rng.standard_normal((23, inputs)).astype(np.float32)
    x[5] = 0.0
    matrix = (rng.standard_normal((outputs, inputs)) * 0.1).astype(np.float32)
    encoding = [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q8_0][seed % 3]
    tensor = encoded(matrix, encoding) if precision == "file" else f32_tensor(matrix)
    product(isa, x, tensor, precision, rows)


@pytest.mark.parametrize("precision", ["int8", "int4", "file"])
def test_an_outlier_leaves_the_others_their_steps(isa: str, precision: str) -> None:
    """Turns red when the widest quad of a group loses its high parts, is another one, or sets the
    scale; the widest of all exceed even 15 bits, and then the others do lose steps."""
    rng = np.random.default_rng(11)
    x = rng.standard_normal((40, 96)).astype(np.float32)
    x[np.arange(40), np.arange(40) % 32] *= 100 * rng.choice([-1, 1], 40)
    x[np.arange(40), 95 - np.arange(40) % 32] *= 3000
    matrix = rng.standard_normal((70, 96)).astype(np.float32)
    tensor = encoded(matrix, Encoding.Q4_1) if precision == "file" else f32_tensor(matrix)
    product(isa, x, tensor, precision, rows=40)


@pytest.mark.parametrize("largest", [1, 127, 128, 16256, 16257])
def test_steps_are_no_wider_than_they_must_be(isa: str, largest: int) -> None:
    """Whole numbers up to 127 are exact in every place, and a quad of them up to 127 * 128: red if
    the choice of a step is off by one at its border."""
    x = np.eye(32, dtype=np.float32) * largest
    x += np.roll(x, 5, axis=1) / largest * min(largest, 127)
    for exponent in (-20, 0, 20):
        tensor = f32_tensor(np.eye(32, dtype=np.float32))
        product(isa, x * 2.0**exponent, tensor, "int8", rows=32)


@pytest.mark.parametrize(
    ("precision", "encoding"),
    [
        ("int8", Encoding.Q8_0),
        ("float32", Encoding.Q8_0),
        ("bfloat16", Encoding.Q8_0),
        ("file", Encoding.Q8_0),
        ("file", Encoding.Q4_0),
        ("file", Encoding.Q4_1),
    ],
)
def test_what_is_not_finite_stays_in_its_row(isa: str, precision: str, encoding: Encoding) -> None:
    """A row with NaN or infinity gives NaN or infinity, and its neighbours are finite."""
    x = np.random.default_rng(4).standard_normal((50, 64)).astype(np.float32)
    x[1, 40], x[2, 3:9] = np.inf, -np.nan
    weight = encoded(
        np.random.default_rng(5).standard_normal((33, 64)).astype(np.float32), encoding
    )

    def line(backend: Backend) -> Forward:
        plain = backend_of(isa, "float32")
        table = plain.embedding(f32_tensor(x))
        table.pack(plain._native, "float32", gated=False)
        packed = backend.linear_weight([weight])

        def forward(ops: Ops) -> object:
            return ops.logits_rows(ops.linear(ops.embed(table), packed))

        return forward

    batch = make_batch([4], [0])
    batch.token_ids[:] = [0, 1, 2, 3]
    (got,) = run_line(backend_of(isa, precision), line, [batch])
    assert np.isfinite(got[[0, 3]]).all()
    assert not np.isfinite(got[[1, 2]]).any()


def best_of_some_lines(values: Float32) -> NDArray[np.float64]:
    """Least squared error of groups of 32, each held as 16 steps from a minimum: the best of the
    lines fitted to the values as rounded with 14 to 16 steps in a group's span."""
    x = values.astype(np.float64).reshape(-1, 32)
    least, most = x.min(axis=1, keepdims=True), x.max(axis=1, keepdims=True)
    best = np.full(len(x), np.inf)
    for steps in np.arange(14, 16.01, 0.25):
        q = rounded_levels(x, (most - least) / steps, least)
        mean_q, mean_x = q.mean(axis=1, keepdims=True), x.mean(axis=1, keepdims=True)
        spread = ((q - mean_q) ** 2).sum(axis=1, keepdims=True)
        slope = ((q - mean_q) * (x - mean_x)).sum(axis=1, keepdims=True)
        scale = np.divide(slope, spread, out=np.zeros_like(slope), where=spread > 0)
        scale, start = np.float16(scale), np.float16(mean_x - scale * mean_q)
        held = scale * rounded_levels(x, scale, start) + start.astype(np.float64)
        best = np.minimum(best, ((held - x) ** 2).sum(axis=1))
    return best


def rounded_levels(
    x: NDArray[np.float64], scale: NDArray[np.floating], start: NDArray[np.floating]
) -> NDArray[np.float64]:
    levels = np.divide(x - start, scale, out=np.zeros_like(x), where=scale > 0)
    return np.clip(np.rint(levels), 0, 15)


def squared_errors(held: Float32, values: Float32) -> NDArray[np.float64]:
    difference = held.astype(np.float64) - values
    return (difference.reshape(-1, 32) ** 2).sum(axis=1)


@pytest.mark.parametrize("spread", ["normal", "heavy tails", "far from 0"])
def test_int4_errs_least(isa: str, spread: str) -> None:
    """Groups are held as well as numpy finds it possible, which is far better than by their span
    alone. Red if the search stops early, or judges by other numbers than those that are kept."""
    values = np.random.default_rng(11).standard_normal((45, 96)).astype(np.float32) / 20
    if spread == "heavy tails":
        values = values**3 * 100
    if spread == "far from 0":
        values += np.float32(0.5)
    errors = squared_errors(linear_as_held(isa, f32_tensor(values)), values)
    wanted = best_of_some_lines(values)
    # A value half way between two levels may take another line in float32 than in float64.
    np.testing.assert_allclose(errors, wanted, rtol=0.15, atol=1e-9)
    np.testing.assert_allclose(errors.sum(), wanted.sum(), rtol=0.005)
    spanned = squared_errors(to_float32(encoded(values, Encoding.Q4_1)), values)
    assert errors.sum() < 0.92 * spanned.sum()


def linear_as_held(isa: str, tensor: WeightTensor, precision: str = "int4") -> Float32:
    """All of a matrix as the kernels hold it, seen through products with unit vectors, a few at a
    time: many would meet it in bfloat16 where matrix registers are."""
    outputs, inputs = tensor.shape

    def line(backend: Backend) -> Forward:
        plain = backend_of(isa, "float32")
        table = plain.embedding(f32_tensor(np.eye(inputs, dtype=np.float32)))
        table.pack(plain._native, "float32", gated=False)
        weight = backend.linear_weight([tensor])
        return lambda ops: ops.logits_rows(ops.linear(ops.embed(table), weight))

    batches = []
    for first in range(0, inputs, 8):
        ids = np.arange(first, min(first + 8, inputs))
        batches.append(make_batch([len(ids)], [0], vocab=inputs))
        batches[-1].token_ids[:] = ids
    got = np.concatenate(run_line(backend_of(isa, precision), line, batches))
    assert got.shape == (inputs, outputs)
    return np.ascontiguousarray(got.T)


def test_int4_holds_what_needs_no_search(isa: str) -> None:
    """Values that are 16 steps from a minimum stay what they are, and so do zeros and constants
    that float16 has, in every place."""
    rng = np.random.default_rng(12)
    values = (rng.integers(0, 16, (33, 64)) * 0.125 - 1).astype(np.float32)
    values[:, :2] = [-1.0, 0.875]
    values[:, 32:34] = [-1.0, 0.875]
    values[3, :32], values[4, 32:] = 0.0, 0.375
    np.testing.assert_allclose(linear_as_held(isa, f32_tensor(values)), values, atol=2e-4)


@pytest.mark.parametrize("encoding", [Encoding.Q4_0, Encoding.Q4_1, Encoding.Q4_K])
def test_int4_leaves_files_of_4_bits_as_they_are(isa: str, encoding: Encoding) -> None:
    """Nothing is quantised twice: tables, and stacks of matrices, hold the file's own values."""
    if encoding is Encoding.Q4_K:
        tensor = random_blocks(19, 512, encoding)
    else:
        values = np.random.default_rng(13).standard_normal((19, 512)).astype(np.float32)
        tensor = encoded(values, encoding)
    wanted = to_float32(tensor)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(decoded_by(isa, tensor, "int4"), wanted, atol=2e-3 * largest)


@pytest.mark.parametrize("precision", ["file", "int4"])
def test_4_bit_parts_of_different_kinds_stay_exact(isa: str, precision: str) -> None:
    """Q4_0 stacked on Q4_1 is held with minima, and loses nothing by it."""
    values = np.random.default_rng(14).standard_normal((2, 24, 96)).astype(np.float32)
    tensors = [encoded(values[0], Encoding.Q4_0), encoded(values[1], Encoding.Q4_1)]
    x = np.random.default_rng(15).standard_normal((50, 96)).astype(np.float32)

    def line(backend: Backend) -> Forward:
        plain = backend_of(isa, "float32")
        table = plain.embedding(f32_tensor(x))
        table.pack(plain._native, "float32", gated=False)
        both = backend.linear_weight(tensors)
        return lambda ops: ops.logits_rows(ops.linear(ops.embed(table), both))

    batch = make_batch([50], [0])
    batch.token_ids[:] = np.arange(50)
    (got,) = run_line(backend_of(isa, precision), line, [batch])
    held = np.concatenate([to_float32(tensor) for tensor in tensors]).astype(np.float64)
    wanted = x.astype(np.float64) @ held.T
    np.testing.assert_allclose(got, wanted, atol=0.02 * np.abs(wanted).max())


def test_int4_gives_the_vocabulary_8_bits(isa: str) -> None:
    """Tables and heads are held within half a step of 8 bits, other matrices are not."""
    values = np.random.default_rng(16).standard_normal((40, 64)).astype(np.float32)
    steps = np.abs(values).reshape(-1, 32).max(axis=1).repeat(32).reshape(values.shape) / 127
    table = decoded_by(isa, f32_tensor(values), "int4")
    assert (np.abs(table - values) <= 0.51 * steps).all()
    assert (np.abs(linear_as_held(isa, f32_tensor(values)) - values) > steps).any()


def test_q4_k_keeps_its_accuracy(isa: str) -> None:
    """Scales and minima, products of a float16 and 6 bits, lose 11 bits' rounding and no more."""
    tensor = random_blocks(19, 512, Encoding.Q4_K)
    held, wanted = decoded_by(isa, tensor, "file"), to_float32(tensor)
    # 15 scales of up to 63 steps of 0.01, and a minimum alike, each within 2^-11 of its size
    assert np.abs(held - wanted).max() <= (15 + 1) * 63 * 0.01 * 2**-11
