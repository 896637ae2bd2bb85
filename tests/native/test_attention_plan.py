"""How attention is cut into work: all of it once, shared prefixes together, and no bit of a result
moved by it in the deterministic mode."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.kernels.ops import Backend
from support_attention import Shape, attention_line, tolerance
from support_models import PagedDriver
from support_native import ISAS, Float32, backend_of, make_batch, native

QUICK = settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SMALL = settings(QUICK, max_examples=40)


def backend_with(isa: str = "auto", threads: int = 2, **options: bool) -> Backend:
    made = native.NativeOptions(isa=isa, threads=threads, pin_threads=False, **options)
    return native.NativeBackend("float32", made)  # type: ignore[no-any-return]


Item = tuple[int, list[int], int, int, int, bool]
"""Sequence, rows, KV head, first and last token, and whether states are joined."""


def claims_of(
    backend: Backend, batch: StepBatch, heads: int, window: int | None = None
) -> list[list[Item]]:
    """Return what threads take at a time, in this order."""
    return backend.machine.plan_attention(  # type: ignore[attr-defined,no-any-return]
        batch.cu_query_lens, batch.kv_lens, batch.block_tables, heads, window or 0
    )


def planned(
    backend: Backend, batch: StepBatch, heads: int, window: int | None = None
) -> list[Item]:
    """Return all items of a plan."""
    return [item for claim in claims_of(backend, batch, heads, window) for item in claim]


def driver(backend: Backend, shape: Shape) -> PagedDriver:
    """Blocks lie in the same shuffled order for every backend."""
    return PagedDriver(
        backend,
        attention_line(shape)(backend),
        shape.spec,
        num_blocks=8000 // shape.block_size + 64,
    )


@given(
    st.lists(st.tuples(st.integers(1, 200), st.integers(0, 3000)), min_size=1, max_size=8),
    st.lists(st.integers(1, 3000), max_size=24),
    st.integers(1, 5),
    st.sampled_from([None, 1, 100, 700]),
    st.sampled_from([1, 5, 16, 32, 200]),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(1, 5),
)
@SMALL
def test_every_token_that_a_row_sees_is_read_once(
    chunks: list[tuple[int, int]],
    decodes: list[int],
    heads: int,
    window: int | None,
    block_size: int,
    allowed: tuple[bool, bool, bool],
    threads: int,
) -> None:
    """Whatever is cut or shared: red if a token is left out, read twice, or a result written by an
    item that saw a part of it; in the deterministic mode also if a cut lies off the grid."""
    split, share, deterministic = allowed
    shape = Shape(2, heads, block_size=block_size)
    backend = backend_with(
        threads=threads,
        split_contexts=split,
        share_prefixes=share,
        deterministic=deterministic,
    )
    lengths = [a for a, _ in chunks] + [1] * len(decodes)
    cached = [b for _, b in chunks] + [length - 1 for length in decodes]
    batch = make_batch(lengths, cached, block_size=block_size)
    for i in range(len(chunks) + 1, len(lengths)):  # decodes share blocks with the first of them
        common = min(cached[i], cached[len(chunks)]) // block_size * (i % 3) // 2
        batch.block_tables[i, :common] = batch.block_tables[len(chunks), :common]
    backend.allocate_kv(shape.spec, 1)
    items = planned(backend, batch, heads, window)
    positions = batch.positions
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    pieces: Counter[tuple[int, int]] = Counter()
    sequence_of = np.repeat(np.arange(len(lengths)), lengths)
    for sequence, rows, head, first, last, joined in items:
        assert first < last
        for row in rows:
            own = batch.block_tables[sequence_of[row]]
            read = batch.block_tables[sequence]
            blocks = slice(first // block_size, -(-last // block_size))
            if sequence != sequence_of[row]:
                np.testing.assert_array_equal(own[blocks], read[blocks])
            seen.setdefault((row, head), []).append((first, last))
            pieces[row, head] += 1
        if not joined:
            assert all(pieces[row, head] == 1 for row in rows)
        if deterministic and joined and block_size == 16:
            assert last % 512 == 0 or last == positions[rows[-1]] + 1
    for row, position in enumerate(positions):
        oldest = max(0, position - window + 1) if window else 0
        for head in range(2):
            parts = sorted(seen[row, head])
            assert parts[0][0] <= oldest
            assert parts[-1][1] > position
            for (_, end), (begin, _) in itertools.pairwise(parts):
                assert end == begin or end < begin <= oldest
    if not split and not share:
        assert set(pieces.values()) == {1}


def test_long_contexts_are_cut_and_short_ones_are_not() -> None:
    """Red if the longest context holds up the step, or if cutting is done where nothing is won."""
    backend = backend_with(threads=2)
    backend.allocate_kv(Shape(3, 3, 64).spec, 1)

    def items_of(lengths: list[int]) -> Counter[int]:
        batch = make_batch([1] * len(lengths), [n - 1 for n in lengths])
        return Counter(sequence for sequence, *_ in planned(backend, batch, 3))

    mixed = items_of([8192] + [128] * 7)
    assert mixed[0] > 3
    assert all(mixed[i] == 3 for i in range(1, 8))
    assert set(items_of([2048] * 32).values()) == {3}
    assert items_of([8192])[0] >= 4


def test_costly_items_are_taken_alone_and_small_ones_together() -> None:
    """Red if one thread takes the parts of a long context at once, while the other soon has nothing
    left to do; or if every small item is fetched by itself."""
    backend = backend_with(threads=2, split_contexts=False)
    backend.allocate_kv(Shape(3, 3, 64).spec, 1)
    lengths = [8192] + [128] * 200
    claims = claims_of(backend, make_batch([1] * 201, [n - 1 for n in lengths]), 3)
    assert [[sequence for sequence, *_ in claim] for claim in claims[:3]] == [[0], [0], [0]]
    assert max(map(len, claims)) > 3
    assert len(claims) >= 16


def shared_tree(paged: PagedDriver, rng: np.random.Generator) -> list[str]:
    """Sequences that fork from one another at whole blocks, each with an end of its own, computed
    up to their last token."""
    names: list[str] = []
    for number in range(int(rng.integers(2, 9))):
        name = str(number)
        tokens = rng.integers(0, 50, 1600).tolist()
        if names and rng.random() < 0.8:
            source = names[int(rng.integers(len(names)))]
            kept = int(rng.integers(0, len(paged.tables[source])))
            paged.share(name, tokens, source, kept)
        else:
            paged.add(name, tokens)
        done = len(paged.tables[name]) * paged.block_size
        paged.step((name, int(rng.integers(1, 700 if done < 700 else 90))))
        names.append(name)
    return names


@pytest.mark.parametrize("isa", ISAS)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 4, 16), (2, 3, 16), (3, 3, 64)]),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([None, 40, 600]),
    st.sampled_from([None, 2.0]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.integers(1, 3),
)
@QUICK
def test_shared_prefixes_change_nothing_but_the_time(
    isa: str,
    seed: int,
    sizes: tuple[int, int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: str,
    threads: int,
) -> None:
    """Random trees of forks: sharing gives numpy's results, and in the deterministic mode the very
    bits that reading apart gives."""
    shape = Shape(*sizes, block_size, window, softcap, dtype=dtype)
    results: list[Float32] = []
    for backend in (
        NumpyBackend(),
        backend_with(isa, threads),
        backend_with(isa, threads, deterministic=True),
        backend_with(isa, 1, deterministic=True, share_prefixes=False, split_contexts=False),
    ):
        paged = driver(backend, shape)
        names = shared_tree(paged, np.random.default_rng(seed))
        results.append(np.concatenate(paged.step(*[(name, 1) for name in names])))
    wanted, shared, exact, apart = results
    np.testing.assert_allclose(shared, wanted, rtol=0, atol=tolerance(isa, dtype))
    np.testing.assert_array_equal(exact, apart)
    np.testing.assert_allclose(exact, wanted, rtol=0, atol=tolerance(isa, dtype))


def test_forks_of_a_long_prompt_read_it_once() -> None:
    """Red if sharing is never chosen: eight forks of 1,024 tokens make a few items for these."""
    shape = Shape(3, 3, 64)
    backend = backend_with()
    paged = driver(backend, shape)
    paged.add("0", list(range(50)) * 30)
    paged.step(("0", 1030))
    for name in "1234567":
        paged.share(name, list(range(50)) * 30, "0", 64)
        paged.step((name, 6))
    batch = paged.batch(*[(name, 1) for name in "01234567"])
    items = planned(backend, batch, 3)
    together = [(first, last) for _, rows, _, first, last, _ in items if len(rows) == 8]
    assert sum(last - first for first, last in together) == 3 * 1024
    assert sum(last - first for _, rows, _, first, last, _ in items if len(rows) == 1) == 3 * 8 * 7


@pytest.mark.parametrize("isa", ISAS)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 5, 16), (2, 3, 10), (1, 1, 64)]),
    st.sampled_from([1, 3, 16, 17, 200]),
    st.sampled_from([None, 3, 90, 600]),
    st.sampled_from([None, 2.0]),
    st.sampled_from(["float32", "bfloat16", "int8"]),
)
@QUICK
def test_a_row_keeps_its_bits_whatever_is_computed_beside_it(
    isa: str,
    seed: int,
    sizes: tuple[int, int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: str,
) -> None:
    """Deterministic mode: a sequence computed whole on one thread, and in random chunks among
    others on three threads; red if one bit differs."""
    rng = np.random.default_rng(seed)
    shape = Shape(*sizes, block_size, window, softcap, sizes[2] // 2, dtype=dtype)
    lengths = [int(rng.choice([1, 40, 130, 700, 1300])) + int(rng.integers(9)) for _ in range(3)]
    tokens = [rng.integers(0, 50, length).tolist() for length in lengths]
    whole = driver(backend_with(isa, 1, deterministic=True), shape)
    wanted = []
    for number, ids in enumerate(tokens):
        whole.add(str(number), ids)
        wanted += whole.step((str(number), len(ids)))
    mixed = driver(backend_with(isa, 3, deterministic=True), shape)
    got: list[list[Float32]] = [[] for _ in tokens]
    for number, ids in enumerate(tokens):
        mixed.add(str(number), ids)
    left = dict(enumerate(lengths))
    while left:
        work = {
            number: min(count, int(rng.choice([1, 2, 7, 60, 400])))
            for number, count in left.items()
            if len(left) == 1 or rng.random() < 0.7
        }
        if not work:
            continue
        results = mixed.step(*[(str(number), count) for number, count in work.items()])
        for number, rows in zip(work, results, strict=True):
            got[number].append(rows)
            left[number] -= work[number]
        left = {number: count for number, count in left.items() if count}
    for right, parts in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), right)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("isa", ISAS)
def test_products_of_a_row_do_not_depend_on_the_number_of_rows(isa: str, precision: str) -> None:
    """Tiles of every height, by columns and by blocks of rows: red if a compiler joins products
    and sums otherwise in one of them; where matrix registers take many rows, in the deterministic
    mode alone. (Attention to a single token: its own value.)"""
    shape = Shape(2, 3, 16)
    takes_many_apart = backend_of(isa)._native.matrix_rows() > 0
    backend = backend_of(isa, precision, deterministic=takes_many_apart)
    line = attention_line(shape)
    backend.allocate_kv(shape.spec, 300)
    step = backend.compile(line(backend))
    batch = make_batch([1] * 260, [0] * 260)
    wanted = step(batch).copy()
    for count in [*range(1, 20), 47, 95, 96, 97, 131, 200]:
        part = make_batch([1] * count, [0] * count, num_blocks=260)
        part.token_ids[:] = batch.token_ids[:count]
        np.testing.assert_array_equal(step(part), wanted[:count])
