"""Packed weights kept on disk: mapped by the next start, and never believed blindly."""

import hashlib
import logging
import os
import resource
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kernels.native.options import NativeOptions, PackedCache
from octavo.kernels.weights import WeightTensor
from octavo.models.tensor_layout import QKV
from support_models import PagedDriver, decoder_driver, random_tensors, tiny_config
from support_native import ISAS, backend_of, native

Float32 = NDArray[np.float32]
CONFIG = tiny_config(architecture="qwen2")
TENSORS = random_tensors(CONFIG, biased=QKV)
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture
def cache(tmp_path: Path) -> PackedCache:
    """An empty cache that keeps even the smallest model, which is there."""
    model = tmp_path / "tiny.gguf"
    model.write_bytes(b"model")
    return PackedCache(tmp_path / "packed", model, "first", min_bytes=0)


def logits_with(
    cache: PackedCache | None,
    isa: str = ISAS[0],
    precision: str = "int8",
    tensors: dict[str, WeightTensor] | None = None,
) -> Float32:
    """Logits of a small decoder with biases whose weights were packed or mapped."""
    return driver_with(cache, isa, precision, tensors).step(("a", len(TOKENS)))[0]


def driver_with(
    cache: PackedCache | None,
    isa: str = ISAS[0],
    precision: str = "int8",
    tensors: dict[str, WeightTensor] | None = None,
) -> PagedDriver:
    options = NativeOptions(isa=isa, threads=2, pin_threads=False, packed_cache=cache)
    backend = native.NativeBackend(precision, options)
    driver = decoder_driver(CONFIG, tensors or TENSORS, backend=backend)
    driver.add("a", TOKENS)
    return driver


def kept_in(cache: PackedCache) -> list[Path]:
    return sorted(cache.folder.rglob("*.weights"))


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by one whenever a matrix is packed."""
    from octavo.kernels.native.weights import MatrixWeight

    packed: list[str] = []
    pack = MatrixWeight._pack

    def watched(self: MatrixWeight, *args: object) -> object:
        packed.append(self.parts[0].name)
        return pack(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(MatrixWeight, "_pack", watched)
    return packed


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8", "file"])
def test_mapped_weights_compute_the_same(
    isa: str, precision: str, cache: PackedCache, packing: list[str]
) -> None:
    """A second backend packs nothing and gives the same bits; red if a table, a gated matrix or a
    bias comes back otherwise."""
    wanted = logits_with(None, isa, precision)
    np.testing.assert_array_equal(logits_with(cache, isa, precision), wanted)
    packing.clear()
    np.testing.assert_array_equal(logits_with(cache, isa, precision), wanted)
    assert packing == []


def test_each_choice_has_a_file_of_its_own(cache: PackedCache) -> None:
    """Instruction sets and precisions do not replace each other's weights."""
    for isa in ISAS:
        logits_with(cache, isa, "int8")
        logits_with(cache, isa, "bfloat16")
    assert len(kept_in(cache)) == 2 * len(ISAS)


@pytest.mark.parametrize(
    "harm", ["first byte", "middle", "last weight", "table", "tail", "cut", "cut to nothing"]
)
def test_a_damaged_file_is_packed_anew(
    harm: str, cache: PackedCache, packing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped bit anywhere, or a file cut short: one warning, the right logits, a good file."""
    wanted = logits_with(cache)
    (path,) = kept_in(cache)
    path.write_bytes(harmed(path.read_bytes(), harm))
    packing.clear()
    with caplog.at_level(logging.WARNING):
        np.testing.assert_array_equal(logits_with(cache), wanted)
    assert packing != []
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"Not using {path}"
    ]
    packing.clear()
    logits_with(cache)
    assert packing == []


def harmed(data: bytes, harm: str) -> bytes:
    """The file with one bit flipped at a named place, or without its end."""
    table = data.index(b'{"identity"')
    if harm.startswith("cut"):
        return data[: table // 2] if harm == "cut" else b""
    place = {"first byte": 0, "middle": table // 2, "last weight": table - 70, "table": table + 20}
    at = place.get(harm, len(data) - 5)
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def test_a_table_of_another_build_is_packed_anew(
    cache: PackedCache, packing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Turns red if a whole file with fields that this build does not know ends the start."""
    wanted = logits_with(cache)
    (path,) = kept_in(cache)
    data = path.read_bytes()
    tail = struct.Struct("<Q16s8s")
    table = data[data.index(b'{"identity"') : -tail.size].replace(b"{", b'{"new": 1, ', 1)
    digest = hashlib.blake2b(table, digest_size=16).digest()
    kept = data[: data.index(b'{"identity"')]
    path.write_bytes(kept + table + tail.pack(len(table), digest, data[-8:]))
    packing.clear()
    np.testing.assert_array_equal(logits_with(cache), wanted)
    assert packing != []
    assert caplog.records == []


def test_another_version_of_the_model_replaces_the_first(
    cache: PackedCache, packing: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is packed without a word, and takes the place of what was kept."""
    logits_with(cache)
    packing.clear()
    other = random_tensors(CONFIG, seed=9, biased=QKV)
    with caplog.at_level(logging.WARNING):
        found = logits_with(replace(cache, version="second"), tensors=other)
    np.testing.assert_array_equal(found, logits_with(None, tensors=other))
    assert packing != []
    assert caplog.records == []
    assert len(kept_in(cache)) == 1


def test_tensors_that_are_read_in_another_way_are_packed_anew(cache: PackedCache) -> None:
    """Rows in another order than those kept are noticed though the file's version is the same."""
    logits_with(cache)
    name = "blk.1.attn_q.weight"
    rows = np.arange(TENSORS[name].shape[0])[::-1]
    changed = {**TENSORS, name: TENSORS[name].take_rows(rows)}
    found = logits_with(cache, tensors=changed)
    np.testing.assert_array_equal(found, logits_with(None, tensors=changed))


def test_a_small_model_is_not_kept(cache: PackedCache) -> None:
    """Packing it takes less time than looking for a file."""
    logits_with(PackedCache(cache.folder, cache.model, cache.version))
    assert not cache.folder.exists()


def test_a_full_disk_costs_a_warning(cache: PackedCache, caplog: pytest.LogCaptureFixture) -> None:
    """The logits are right, nothing is left half written, and one warning says why."""
    wanted = logits_with(None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with caplog.at_level(logging.WARNING):
            found = logits_with(cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    np.testing.assert_array_equal(found, wanted)
    assert len(caplog.records) == 1
    assert "Could not keep" in caplog.text
    assert [path.name for path in cache.folder.rglob("*") if path.is_file()] == ["model.txt"]


def test_a_folder_that_cannot_be_made_costs_a_warning(
    cache: PackedCache, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a read-only disk: one warning, and the engine starts."""
    cache.folder.write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        found = logits_with(cache)
    np.testing.assert_array_equal(found, logits_with(None))
    assert len(caplog.records) == 1


def test_starts_at_the_same_time(cache: PackedCache, packing: list[str]) -> None:
    """Starts side by side all compute right, also one whose file is replaced while it is mapped."""
    wanted = logits_with(cache)
    mapped = driver_with(cache)
    kept_in(cache)[0].unlink()  # the others pack anew, and replace it by one another's
    found: list[Float32] = []
    threads = [threading.Thread(target=lambda: found.append(logits_with(cache))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for logits in [*found, mapped.step(("a", len(TOKENS)))[0]]:
        np.testing.assert_array_equal(logits, wanted)
    packing.clear()
    np.testing.assert_array_equal(logits_with(cache), wanted)
    assert packing == []
    assert len(found) == 4


def test_what_is_of_no_use_goes(cache: PackedCache) -> None:
    """Keeping a model's weights removes those of models that are gone, and old remains of writes
    that were killed, but not what another process is writing."""
    logits_with(cache)
    (kept,) = kept_in(cache)
    old, fresh = kept.parent / ".tmp-old", kept.parent / ".tmp-fresh"
    for path in (old, fresh):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    cache.model.unlink()
    gone = cache.model.with_name("other.gguf")
    gone.write_bytes(b"x")
    logits_with(replace(cache, model=gone))
    assert not kept.exists()
    cache.model.write_bytes(b"model")
    logits_with(cache)
    fresh.write_bytes(b"x")
    old.write_bytes(b"x")
    os.utime(old, (time.time() - 7200, time.time() - 7200))
    logits_with(replace(cache, version="second"))
    assert not old.exists()
    assert fresh.exists()
    assert len(kept_in(cache)) == 2


def test_the_extension_checks_where_a_weight_lies(tmp_path: Path) -> None:
    """A table that points outside of its file never reaches the kernels."""
    extension = native._native
    path = tmp_path / "file"
    path.write_bytes(bytes(8192))
    backend = backend_of(ISAS[0])._native
    with path.open("rb") as file:
        mapped = extension.MappedFile(file.fileno())
    for offset in (-64, 3, 8192, 1 << 62):
        with pytest.raises(ValueError, match="no weight"):
            backend.map(mapped, offset, 16, 32, 0, False, None)
    with pytest.raises(ValueError, match="more bytes"):
        backend.checksums(mapped, 8193)
    assert len(backend.checksums(mapped, 8192)) == 1
