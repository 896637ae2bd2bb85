"""Every operation of every backend against loops in float64.

Operations exist only inside a step, so a test embeds its input (the table's row i is the input of
token i), makes its calls, and reads the result through a head that is the identity. A backend that
records the line and replays it is tested no differently.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Array, Attention, Backend, KVSpec, Ops, Rope
from support_models import Float32, PagedDriver, f32_tensor

BACKENDS: dict[str, Callable[[], Backend]] = {"numpy": NumpyBackend}
TOLERANCE = {"numpy": 2e-5}
"""Largest difference allowed, as a share of the largest value expected."""

SPEC = KVSpec(num_layers=1, num_kv_heads=2, head_dim=8, block_size=4)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """A fresh backend of each kind."""
    return BACKENDS[request.param]()


def agree(backend: Backend, got: Any, wanted: Any) -> None:
    """Assert equality within the backend's tolerance."""
    wanted = np.asarray(wanted, np.float64)
    bound = TOLERANCE[backend.name] * max(1.0, float(np.abs(wanted).max(initial=0.0)))
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


def evaluate(
    backend: Backend, x: Float32, calls: Callable[[Ops, Array], Array], width: int
) -> Float32:
    """Return what ``calls`` make of ``x``, whose result has ``width`` features."""
    table = backend.embedding(f32_tensor(x))
    head = backend.linear_weight([f32_tensor(np.eye(width))])

    def forward(ops: Ops) -> Array:
        return ops.logits(ops.logits_rows(calls(ops, ops.embed(table))), head)

    backend.allocate_kv(SPEC, 1)
    return backend.compile(forward)(plain_batch(np.arange(len(x))))


def plain_batch(token_ids: Any, rows: Any = None) -> StepBatch:
    """A batch for operations that do not look at KV: one sequence, all rows wanted."""
    count = len(token_ids)
    rows = np.arange(count) if rows is None else rows
    return StepBatch(
        token_ids=np.asarray(token_ids, np.int32),
        cu_query_lens=np.array([0, count], np.int32),
        kv_lens=np.array([count], np.int32),
        block_tables=np.zeros((1, count), np.int32),
        logits_rows=np.asarray(rows, np.int32),
    )


def normal(seed: int, *shape: int) -> Float32:
    """Random float32 values."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


ROWS = [1, 2, 5, 63, 64, 130]


@pytest.mark.parametrize("rows", ROWS)
def test_linear(backend: Backend, rows: int) -> None:
    """Stacked parts with biases, whatever the number of rows: no path may mix up rows."""
    x = normal(1, rows, 24)
    parts, biases = [normal(2, 16, 24), normal(3, 8, 24)], [normal(4, 16), normal(5, 8)]
    weight = backend.linear_weight([f32_tensor(p) for p in parts], [f32_tensor(b) for b in biases])
    got = evaluate(backend, x, lambda ops, a: ops.linear(a, weight), 24)
    wanted = x.astype(np.float64) @ np.concatenate(parts).T.astype(np.float64)
    agree(backend, got, wanted + np.concatenate(biases))


def test_embed_repeats_and_scales(backend: Backend) -> None:
    """A token that comes twice has its row twice, times the scale."""
    values = normal(6, 9, 8)
    table = backend.embedding(f32_tensor(values))
    head = backend.linear_weight([f32_tensor(np.eye(8))])
    backend.allocate_kv(SPEC, 1)
    ids = [3, 0, 3, 8, 8]
    step = backend.compile(lambda ops: ops.logits(ops.embed(table, scale=2.5), head))
    agree(backend, step(plain_batch(ids)), values[ids].astype(np.float64) * 2.5)


def test_rms_norm(backend: Backend) -> None:
    """Rows of very different size are each normed by their own mean square; eps matters."""
    x = normal(7, 6, 16) * np.array([1e-6, 1e-3, 1.0, 30.0, 1e4, 0.0], np.float32)[:, None]
    weight, offset, eps = normal(8, 16), 1.0, 1e-5
    packed = backend.vector(f32_tensor(weight), offset=offset)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * (weight + np.float64(offset))
    agree(backend, evaluate(backend, x, lambda ops, a: ops.rms_norm(a, packed, eps), 16), wanted)


def test_add(backend: Backend) -> None:
    """The residual is added, and the array it came from is still what it was."""
    x = normal(9, 3, 8)
    got = evaluate(backend, x, lambda ops, a: ops.add(ops.add(a, a), a), 8)
    agree(backend, got, 3.0 * x.astype(np.float64))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(backend: Backend, activation: Any) -> None:
    """Right for gates of any size: no overflow, no warning, no sign lost."""
    gate = np.concatenate(
        [normal(10, 40) * 5, [0, -0.0, 1e-8, 88, -88, -104, 1e4, -1e4, 3e38, -3e38]]
    )
    up = normal(11, len(gate))
    x = np.concatenate([gate, up]).astype(np.float32)[None]
    got = evaluate(backend, x, lambda ops, a: ops.gated(a, activation), len(gate))
    wanted = [activate(float(g), activation) * float(u) for g, u in zip(x[0], up, strict=False)]
    np.testing.assert_allclose(got[0], wanted, rtol=1e-5, atol=1e-5)


def activate(x: float, activation: str) -> float:
    """SiLU or GELU (tanh) of one number."""
    if activation == "silu":
        return x / (1 + math.exp(-x)) if x > -700 else 0.0
    if abs(x) > 50:
        return max(x, 0.0)
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [[], [2], [0, 3, 4]])
def test_logits(backend: Backend, softcap: float | None, rows: list[int]) -> None:
    """Only wanted rows, through an embedding table as tied head, capped; none wanted: none."""
    values = normal(12, 5, 8) * 3
    table = backend.embedding(f32_tensor(values))
    backend.allocate_kv(SPEC, 1)
    step = backend.compile(
        lambda ops: ops.logits(ops.logits_rows(ops.embed(table)), table, softcap=softcap)
    )
    got = step(plain_batch(np.arange(5), np.array(rows, np.int32)))
    wanted = values[rows].astype(np.float64) @ values.T.astype(np.float64)
    agree(backend, got, wanted if softcap is None else softcap * np.tanh(wanted / softcap))


# --- attention ---------------------------------------------------------------------------------


def rope(dim: int, magnitude: float = 1.0) -> Rope:
    """Frequencies that differ from pair to pair."""
    return Rope((0.7 ** np.arange(dim // 2)).astype(np.float32), magnitude)


def turned(head: Any, position: int, rope: Rope) -> list[float]:
    """Rotate one head at one position."""
    out = [float(value) for value in head]
    half = len(rope.inv_freq)
    for i in range(half):
        angle = float(np.float32(position) * rope.inv_freq[i])
        cos, sin = math.cos(angle) * rope.magnitude, math.sin(angle) * rope.magnitude
        low, high = float(head[i]), float(head[i + half])
        out[i], out[i + half] = low * cos - high * sin, high * cos + low * sin
    return out


def normed(head: Any, weight: Any, eps: float) -> Any:
    """RMS norm of one head; unchanged without a weight."""
    if weight is None:
        return head
    head = np.asarray(head, np.float64)
    return head / math.sqrt(float((head**2).mean()) + eps) * weight


def attend(qkv: Float32, a: Attention, q_norm: Any = None, k_norm: Any = None) -> np.ndarray:
    """Attention of every token of a sequence over those it sees, one score at a time."""
    heads, groups, dim = a.num_heads, a.num_kv_heads, a.head_dim
    split = qkv.reshape(len(qkv), heads + 2 * groups, dim)
    out = np.zeros((len(qkv), heads, dim))
    keys = [
        [turned(normed(row[heads + g], k_norm, a.norm_eps), p, a.rope) for g in range(groups)]
        for p, row in enumerate(split)
    ]
    for p, row in enumerate(split):
        first = 0 if a.sliding_window is None else max(0, p - a.sliding_window + 1)
        for h in range(heads):
            g = h // (heads // groups)
            q = np.array(turned(normed(row[h], q_norm, a.norm_eps), p, a.rope))
            scores = [a.scale * float(q @ np.array(keys[t][g])) for t in range(first, p + 1)]
            if a.softcap is not None:
                scores = [a.softcap * math.tanh(s / a.softcap) for s in scores]
            top = max(scores)
            weights = [math.exp(s - top) for s in scores]
            for weight, t in zip(weights, range(first, p + 1), strict=True):
                out[p, h] += weight / sum(weights) * split[t, heads + groups + g]
    return out.reshape(len(qkv), -1)


def attention_driver(
    backend: Backend, table: Float32, attention: Attention, block_size: int, num_blocks: int = 96
) -> PagedDriver:
    """A driver whose logits are the attention's result for tokens whose qkv is their table row."""
    packed = backend.embedding(f32_tensor(table))
    head = backend.linear_weight([f32_tensor(np.eye(attention.num_heads * attention.head_dim))])

    def forward(ops: Ops) -> Array:
        q = ops.rope_and_store(ops.embed(packed), attention)
        return ops.logits(ops.logits_rows(ops.paged_attention(q, attention)), head)

    spec = KVSpec(
        attention.layer + 1, attention.num_kv_heads, attention.head_dim, block_size, "float32"
    )
    return PagedDriver(backend, forward, spec, num_blocks=num_blocks)


def make_attention(**changes: Any) -> Attention:
    """Four query heads on two KV heads of eight features; ``changes`` replace fields."""
    fields = {"layer": 0, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 0.4}
    return Attention(**(fields | {"rope": rope(8)} | changes))


VARIANTS: dict[str, Attention] = {
    "grouped": make_attention(),
    "one kv head": make_attention(num_kv_heads=1, layer=2),
    "all kv heads": make_attention(num_kv_heads=4),
    "partial rotary": make_attention(rope=rope(4)),
    "magnitude": make_attention(rope=rope(8, 1.3)),
    "window": make_attention(sliding_window=5),
    "window of one": make_attention(sliding_window=1),
    "wide window": make_attention(sliding_window=1000),
    "softcap": make_attention(softcap=1.5, scale=3.0),
    "softcap and window": make_attention(softcap=0.7, sliding_window=7),
}


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_of_ragged_batches(backend: Backend, variant: str, block_size: int) -> None:
    """Chunks and decodes of several sequences in one step see their own tokens and no others."""
    attention = VARIANTS[variant]
    width = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    table = normal(20, 90, width)
    driver = attention_driver(backend, table, attention, block_size)
    lengths = {"a": 5, "b": 16, "c": 37, "d": 1, "e": 20}
    tokens, first = {}, 0
    for name, length in lengths.items():
        tokens[name] = list(range(first, first + length))
        driver.add(name, tokens[name])
        first += length
    got: dict[str, list[Float32]] = {name: [] for name in lengths}
    for work in (
        [("a", 3), ("c", 16)],
        [("c", 1), ("b", 15), ("a", 1), ("d", 1)],
        [("a", 1), ("b", 1), ("c", 1), ("e", 19)],
        [("e", 1), ("c", 19)],
    ):
        for (name, _), part in zip(work, driver.step(*work), strict=True):
            got[name].append(part)
    for name in lengths:
        agree(backend, np.concatenate(got[name]), attend(table[tokens[name]], attention))


def test_head_norms(backend: Backend) -> None:
    """q and k heads are normed with their own weights before they turn; v is not."""
    q_norm, k_norm = normal(21, 8), normal(22, 8)
    attention = make_attention(
        q_norm=backend.vector(f32_tensor(q_norm)),
        k_norm=backend.vector(f32_tensor(k_norm)),
        norm_eps=1e-3,
    )
    table = normal(23, 12, 64)
    driver = attention_driver(backend, table, attention, 4)
    driver.add("a", range(12))
    (got,) = driver.step(("a", 12))
    agree(backend, got, attend(table, attention, q_norm, k_norm))


def test_many_decodes_of_unlike_lengths(backend: Backend) -> None:
    """However decodes are grouped, each row is its own sequence's: lengths 1 to 61, shuffled."""
    attention = make_attention(sliding_window=40)
    lengths = np.random.default_rng(24).permutation(np.arange(1, 62, 3))
    table = normal(25, int(lengths.sum()), 64)
    driver = attention_driver(backend, table, attention, 4, num_blocks=400)
    ends = np.cumsum(lengths)
    for i, (end, length) in enumerate(zip(ends, lengths, strict=True)):
        driver.add(str(i), range(end - length, end))
        if length > 1:
            driver.step((str(i), int(length) - 1))
    got = driver.step(*((str(i), 1) for i in range(len(lengths))))
    for part, end, length in zip(got, ends, lengths, strict=True):
        agree(backend, part[0], attend(table[end - length : end], attention)[-1])


def test_huge_scores(backend: Backend) -> None:
    """Scores far past the range of exp give a finite softmax: the largest takes all."""
    attention = make_attention(scale=1e4, rope=Rope(np.zeros(4, np.float32)))
    table = normal(26, 9, 64) * 10
    driver = attention_driver(backend, table, attention, 4)
    driver.add("a", range(9))
    agree(backend, driver.step(("a", 9))[0], attend(table, attention))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("last_chunk", [1, 3])
def test_stale_kv_does_not_leak(backend: Backend, poison: float, last_chunk: int) -> None:
    """A sequence that ends in NaN leaves it in its blocks; their next owner must not see it."""
    attention = make_attention()
    table = normal(27, 40, 64)
    table[:16] = poison
    driver = attention_driver(backend, table, attention, 16, num_blocks=1)
    driver.add("poisoned", range(16))
    driver.step(("poisoned", 16))
    driver.release("poisoned")
    driver.add("next", range(20, 26))
    first = driver.step(("next", 6 - last_chunk))[0]
    second = driver.step(("next", last_chunk))[0]
    agree(backend, np.concatenate([first, second]), attend(table[20:26], attention))


def test_nan_stays_with_its_sequence(backend: Backend) -> None:
    """NaN in one sequence of a batch reaches none of the others."""
    attention = make_attention()
    table = normal(28, 40, 64)
    table[:2] = math.nan
    driver = attention_driver(backend, table, attention, 4)
    driver.add("bad", range(6))
    driver.add("good", range(20, 34))
    driver.add("decode", range(34, 40))
    driver.step(("bad", 4), ("decode", 5), ("good", 13))
    bad, good, decode = driver.step(("bad", 1), ("good", 1), ("decode", 1))
    assert np.isnan(bad).any()
    agree(backend, good[0], attend(table[20:34], attention)[-1])
    agree(backend, decode[0], attend(table[34:40], attention)[-1])


def test_copied_blocks_hold_the_same_kv(backend: Backend) -> None:
    """Copies happen in order and in all layers; later writes do not reach the source."""
    attention = make_attention(layer=1)
    table = normal(29, 30, 64)
    driver = attention_driver(backend, table, attention, 4)
    driver.add("a", range(7))
    driver.step(("a", 6))
    spare, other = driver.take_blocks(2)
    backend.copy_blocks([BlockCopy(driver.tables["a"][1], other), BlockCopy(other, spare)])
    driver.share("b", [*range(6), 20, 21], "a", 1)
    driver.adopt("b", spare, num_tokens=6)
    branch, rest = driver.step(("b", 2), ("a", 1))
    agree(backend, branch, attend(table[[*range(6), 20, 21]], attention)[-2:])
    agree(backend, rest, attend(table[:7], attention)[-1:])
