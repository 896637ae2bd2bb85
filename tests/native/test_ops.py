"""Each operation on each instruction set equals numpy's, whatever the shapes."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Activation, Array, Backend, Forward, Ops
from support_models import f32_tensor
from support_native import ISAS, Line, backend_of, make_batch, run_line

pytestmark = pytest.mark.parametrize("isa", ISAS)
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
QUICK = settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
rows = st.integers(1, 40)
features = st.integers(1, 150)
seeds = st.integers(0, 1 << 16)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Random values of size 1."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def same(isa: str, line: Line, num_rows: int, threads: int = 2) -> None:
    """Assert that the line gives the same with numpy and with ``isa``."""
    batch = make_batch([num_rows], [0])
    (wanted,) = run_line(NumpyBackend(), line, [batch])
    (got,) = run_line(backend_of(isa, threads=threads), line, [batch])
    np.testing.assert_allclose(got, wanted, **CLOSE)


@given(rows, features, seeds)
@QUICK
def test_embed(isa: str, num_rows: int, size: int, seed: int) -> None:
    """Red if a row is taken from the wrong panel or column, or is not scaled."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(seed, 50, size)))
        return lambda ops: ops.logits_rows(ops.embed(table, scale=1.5))

    same(isa, line, num_rows)


@given(rows, features, seeds)
@QUICK
def test_rms_norm(isa: str, num_rows: int, size: int, seed: int) -> None:
    """Red if values past the last whole vector are dropped or garbage is summed."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(seed, 50, size)))
        weight = backend.vector(f32_tensor(normal(seed + 1, size)), offset=0.5)

        def forward(ops: Ops) -> Array:
            x = ops.embed(table)
            normed = ops.rms_norm(x, weight, 1e-5)
            return ops.logits_rows(ops.add(normed, ops.add(normed, x)))  # two uses: not fused

        return forward

    same(isa, line, num_rows)


@given(rows, features, features, seeds, st.booleans(), st.booleans(), st.booleans())
@QUICK
def test_linear_and_its_fusions(
    isa: str, num_rows: int, inputs: int, outputs: int, seed: int, bias: bool, norm: bool, add: bool
) -> None:
    """A product with or without norm, bias and residual, for sizes that are no multiple of any
    tile: red if a tail is written past its row, or a fused part is applied twice or not at all."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(seed, 50, inputs)))
        split = outputs // 2
        matrix, offsets = normal(seed + 1, outputs, inputs), normal(seed + 2, outputs)
        parts = [f32_tensor(part) for part in (matrix[:split], matrix[split:]) if len(part)]
        weight = backend.linear_weight(parts, [f32_tensor(offsets)] if bias else [])
        other = backend.linear_weight([f32_tensor(normal(seed + 3, outputs, inputs))])
        scale = backend.vector(f32_tensor(normal(seed + 4, inputs)))

        def forward(ops: Ops) -> Array:
            x = ops.embed(table)
            y = ops.linear(ops.rms_norm(x, scale, 1e-5) if norm else x, weight)
            return ops.logits_rows(ops.add(ops.linear(x, other), y) if add else y)

        return forward

    same(isa, line, num_rows)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("fused", [True, False])
@given(rows, st.integers(1, 80), seeds, st.booleans())
@QUICK
def test_gated(
    isa: str,
    activation: Activation,
    fused: bool,
    num_rows: int,
    half: int,
    seed: int,
    bias: bool,
) -> None:
    """The gate behind a product, interleaved with it or on its own, also for large arguments."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(seed, 50, 24) * 8))
        matrix, offsets = normal(seed + 1, 2 * half, 24), normal(seed + 2, 2 * half)
        weight = backend.linear_weight([f32_tensor(matrix)], [f32_tensor(offsets)] if bias else [])

        def forward(ops: Ops) -> Array:
            gate_up = ops.linear(ops.embed(table), weight)
            gated = ops.gated(gate_up, activation)
            if fused:
                return ops.logits_rows(gated)
            back = backend_free_sum(ops, gate_up, gated, activation)
            return ops.logits_rows(back)

        return forward

    def backend_free_sum(ops: Ops, gate_up: Array, gated: Array, activation: Activation) -> Array:
        return ops.add(gated, ops.gated(ops.add(gate_up, gate_up), activation))

    batch = make_batch([num_rows], [0])
    (wanted,) = run_line(NumpyBackend(), line, [batch])
    (got,) = run_line(backend_of(isa), line, [batch])
    scale = np.abs(wanted).max()
    np.testing.assert_allclose(got / scale, wanted / scale, rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize("half", [32, 48, 160])
def test_a_product_feeds_the_next(
    isa: str, precision: str, activation: Activation | None, half: int
) -> None:
    """A product of nothing but another's result, gated or not: red if rows that are left prepared
    for it lie elsewhere, or are taken where they were not (48 features are no whole groups)."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(1, 50, 72)))
        width = half * (1 if activation is None else 2)
        first = backend.linear_weight(
            [f32_tensor(normal(2, width, 72) / 8)], [f32_tensor(normal(3, width))]
        )
        second = backend.linear_weight([f32_tensor(normal(4, 40, half) / 8)])

        def forward(ops: Ops) -> Array:
            y = ops.linear(ops.embed(table), first)
            return ops.logits_rows(
                ops.linear(ops.gated(y, activation) if activation else y, second)
            )

        return forward

    for num_rows in (1, 3, 16, 33, 70, 300):
        batch = make_batch([num_rows], [0])
        (wanted,) = run_line(NumpyBackend(), line, [batch])
        (got,) = run_line(backend_of(isa, precision), line, [batch])
        atol = (1e-5 if precision == "float32" else 0.02) * np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_products_in_a_row(isa: str, precision: str) -> None:
    """Three of them with nothing between: red if one reads its rows where it leaves them for the
    next."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(1, 50, 64)))
        weights = [backend.linear_weight([f32_tensor(normal(s, 64, 64) / 8)]) for s in (2, 3, 4)]

        def forward(ops: Ops) -> Array:
            x = ops.embed(table)
            for weight in weights:
                x = ops.linear(x, weight)
            return ops.logits_rows(x)

        return forward

    for num_rows in (1, 40, 300):
        batch = make_batch([num_rows], [0])
        (wanted,) = run_line(NumpyBackend(), line, [batch])
        (got,) = run_line(backend_of(isa, precision), line, [batch])
        atol = (1e-5 if precision == "float32" else 0.02) * np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, rtol=0, atol=atol)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_some_rows(isa: str, softcap: float | None) -> None:
    """Only wanted rows reach the head, normed and soft-capped: red if the fused norm reads rows by
    their place in the batch instead of their place among the wanted."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(1, 50, 40)))
        weight = backend.vector(f32_tensor(normal(2, 40)))

        def forward(ops: Ops) -> Array:
            normed = ops.rms_norm(ops.embed(table), weight, 1e-5)
            return ops.logits(ops.logits_rows(normed), table, softcap=softcap)

        return forward

    batch = make_batch([5, 1, 7], [0, 0, 0])
    for wanted_rows in ([4, 5, 12], [0], []):
        batch.logits_rows.resize(len(wanted_rows), refcheck=False)
        batch.logits_rows[:] = wanted_rows
        (wanted,) = run_line(NumpyBackend(), line, [batch])
        (got,) = run_line(backend_of(isa), line, [batch])
        assert got.shape == (len(wanted_rows), 50)
        np.testing.assert_allclose(got, wanted, **CLOSE)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 97, 300])
def test_rows_shared_among_threads(isa: str, threads: int, num_rows: int) -> None:
    """No row is lost or done twice, whether threads share columns or rows, or have nothing."""

    def line(backend: Backend) -> Forward:
        table = backend.embedding(f32_tensor(normal(1, 50, 33)))
        first = backend.linear_weight([f32_tensor(normal(2, 70, 33) / 6)])
        second = backend.linear_weight([f32_tensor(normal(3, 33, 70) / 8)])

        def forward(ops: Ops) -> Array:
            x = ops.embed(table)
            for _ in range(3):
                x = ops.add(x, ops.linear(ops.linear(x, first), second))
            return ops.logits_rows(x)

        return forward

    same(isa, line, num_rows, threads)
