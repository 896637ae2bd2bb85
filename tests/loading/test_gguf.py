"""The GGUF reader: equal to the gguf package on good files, one sentence on bad ones."""

import os
import struct
import threading
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.core.errors import LoadError
from octavo.kernels.weights import Encoding
from octavo.models import gguf as reader
from octavo.models.checkpoint import open_checkpoint
from octavo.models.gguf import read_gguf
from support import PATIENCE_S
from support_loading import gguf_bytes, gguf_key, gguf_string, gguf_tensor, write_gguf

U64_MAX = 2**64 - 1
FUZZ = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
K_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def refused(tmp_path: Path, data: bytes) -> str:
    """Check that a file of ``data`` is refused in one sentence, which is returned."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(LoadError) as caught:
        read_gguf(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")
    return caught.value.message


# --- good files -------------------------------------------------------------------------------


@pytest.mark.parametrize("label", [encoding.label for encoding in Encoding])
def test_equals_the_gguf_package(label: str, tmp_path: Path) -> None:
    """Names, shapes, types, bytes and metadata are those that gguf.GGUFReader finds."""
    path = write_gguf(
        tmp_path / "a.gguf",
        "llama",
        encodings=label,
        config_overrides=K_SIZES | {"vocab_size": 300},
    )
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert mine.encoding.label == tensor.tensor_type.name
        assert mine.data.tobytes() == tensor.data.tobytes()
        assert mine.data.shape == (
            mine.data.size // mine.encoding.row_bytes(mine.shape[-1]),
            mine.encoding.row_bytes(mine.shape[-1]),
        )
    wanted = {key: field.contents() for key, field in theirs.fields.items() if "GGUF." not in key}
    assert ours.metadata.keys() == wanted.keys()
    for key, value in wanted.items():
        mine_value = ours.metadata[key]
        assert (list(mine_value) if isinstance(mine_value, np.ndarray) else mine_value) == value


def test_every_value_type(tmp_path: Path) -> None:
    """Scalars and arrays of all number types keep value, sign and width."""
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
    keys = [gguf_key("bool", 7, b"\1"), gguf_key("bools", 9, struct.pack("<IQ??", 7, 2, 0, 1))]
    for code, letter in codes.items():
        value = 100 if letter.isupper() or letter in "fd" else -100
        keys.append(gguf_key(f"one{code}", code, struct.pack(f"<{letter}", value)))
        array = struct.pack(f"<IQ3{letter}", code, 3, 1, 2, value)
        keys.append(gguf_key(f"many{code}", 9, array))
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_bytes(keys))
    metadata = read_gguf(path).metadata
    assert metadata["bool"] is True
    assert list(metadata["bools"]) == [False, True]  # type: ignore[arg-type]
    for code, letter in codes.items():
        value = 100 if letter.isupper() or letter in "fd" else -100
        assert metadata[f"one{code}"] == value
        assert list(metadata[f"many{code}"]) == [1, 2, value]  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [2, 3])
def test_versions_and_alignment(version: int, tmp_path: Path) -> None:
    """Versions 2 and 3 read alike, and general.alignment moves the data."""
    keys = [gguf_key("general.alignment", 4, struct.pack("<I", 128))]
    head = gguf_bytes(keys, [gguf_tensor("a", [2], 0, 0), gguf_tensor("b", [1], 0, 128)])
    data = head + b"\0" * (-len(head) % 128) + struct.pack("<2f", 1, 2) + b"\0" * 120
    path = tmp_path / "a.gguf"
    path.write_bytes(data[:4] + struct.pack("<I", version) + data[8:] + struct.pack("<f", 3))
    tensors = read_gguf(path).tensors
    assert tensors["a"].data.view("<f4").tolist() == [[1.0, 2.0]]
    assert tensors["b"].data.view("<f4").tolist() == [[3.0]]


@pytest.mark.model
def test_the_default_model(model_path: Path) -> None:
    """The default model's vocabulary and tensors are read whole."""
    file = read_gguf(model_path)
    assert len(file.tensors) == 272
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152  # type: ignore[arg-type]


# --- what no file may be ------------------------------------------------------------------------


def test_no_usable_file(tmp_path: Path) -> None:
    """Missing, empty, unreadable, text and directory paths each get their own sentence."""
    with pytest.raises(LoadError, match="does not exist"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(LoadError, match="not a regular file"):
        read_gguf(tmp_path)
    assert "is empty" in refused(tmp_path, b"")
    assert "letters GGUF" in refused(tmp_path, b"# A text file renamed to .gguf\n" * 10)
    assert "letters GGUF" in refused(tmp_path, b"GG")
    for path in (Path("x" * 5000), Path("a\0b"), tmp_path / "bad.gguf" / "x"):
        with pytest.raises(LoadError, match="cannot be read"):
            open_checkpoint(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """A named pipe is refused at once: red if the reader opens it before looking."""
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    messages: list[str] = []

    def read() -> None:
        try:
            read_gguf(pipe)
        except LoadError as error:
            messages.append(error.message)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert messages == [f"{pipe} is not a regular file."]


@pytest.mark.parametrize("version", [0, 1, 4, 2**31])
def test_versions_that_do_not_exist(version: int, tmp_path: Path) -> None:
    """Only versions 2 and 3 are read, since others lay out the header otherwise."""
    assert f"version is {version}" in refused(tmp_path, gguf_bytes(version=version))


def test_big_endian(tmp_path: Path) -> None:
    """A big-endian file is named as such, not as a strange version."""
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("a", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "big-endian" in refused(tmp_path, path.read_bytes())


BAD_FILES = {
    "number of tensors": (gguf_bytes(num_tensors=2**63), "9223372036854775808 tensors"),
    "number of tensors, modest": (gguf_bytes(num_tensors=3), "3 tensors"),
    "number of keys": (gguf_bytes(num_keys=2**63), "metadata keys"),
    "number of keys, max": (gguf_bytes(num_keys=U64_MAX), "metadata keys"),
    "length of a key": (gguf_bytes([struct.pack("<Q", 2**63)], data=bytes(64)), "truncated"),
    "length of a value": (gguf_bytes([gguf_key("k", 8, struct.pack("<Q", 2**63))]), "truncated"),
    "length of an array": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 10, 2**61))]),
        "truncated",
    ),
    "length of strings": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 8, 2**61))]),
        "truncated",
    ),
    "length in strings": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQQ", 8, 1, U64_MAX))]),
        "longer than the file",
    ),
    "nested array": (gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 9, 1))]), "type 9"),
    "unknown value type": (gguf_bytes([gguf_key("k", 13, b"\0" * 8)]), "type 13"),
    "bool of 2": (gguf_bytes([gguf_key("k", 7, b"\2")]), "neither true nor false"),
    "key not UTF-8": (
        gguf_bytes([gguf_string(b"\xff\xfe") + struct.pack("<IB", 0, 1)]),
        "not UTF-8",
    ),
    "value not UTF-8": (gguf_bytes([gguf_key("k", 8, gguf_string(b"\xc3"))]), "not UTF-8"),
    "token not UTF-8": (
        gguf_bytes([gguf_key("k", 9, struct.pack("<IQ", 8, 1) + gguf_string(b"\xc3"))]),
        "not UTF-8",
    ),
    "key twice": (gguf_bytes([gguf_key("k", 0, b"\1")] * 2), "occurs twice"),
    "split": (gguf_bytes([gguf_key("split.count", 2, b"\3\0")]), "split.count"),
    "split, odd type": (gguf_bytes([gguf_key("split.count", 8, gguf_string("2"))]), "split.count"),
    "alignment 0": (gguf_bytes([gguf_key("general.alignment", 4, bytes(4))]), "power of two"),
    "alignment 24": (
        gguf_bytes([gguf_key("general.alignment", 4, struct.pack("<I", 24))]),
        "power of two",
    ),
    "alignment text": (
        gguf_bytes([gguf_key("general.alignment", 8, gguf_string("x"))]),
        "power of two",
    ),
    "alignment huge": (
        gguf_bytes(
            [gguf_key("general.alignment", 10, struct.pack("<Q", 2**63))],
            [gguf_tensor("t", [8])],
            bytes(64),
        ),
        "would end at byte",
    ),
    "no dimensions": (gguf_bytes([], [gguf_tensor("t", [])], bytes(64)), "0 dimensions"),
    "five dimensions": (gguf_bytes([], [gguf_tensor("t", [1] * 5)], bytes(64)), "5 dimensions"),
    "dimension 0": (gguf_bytes([], [gguf_tensor("t", [4, 0])], bytes(64)), "dimension of 0"),
    "first dimension 0": (gguf_bytes([], [gguf_tensor("t", [0])], bytes(64)), "dimension of 0"),
    "product wraps to 0": (
        gguf_bytes([], [gguf_tensor("t", [2**32, 2**32])], bytes(64)),
        "would end at byte",
    ),
    "product wraps to 4": (
        gguf_bytes([], [gguf_tensor("t", [2**62 + 1, 4])], bytes(64)),
        "would end at byte",
    ),
    "bytes wrap": (gguf_bytes([], [gguf_tensor("t", [2**62])], bytes(64)), "would end at byte"),
    "offset wraps": (
        gguf_bytes([], [gguf_tensor("t", [8], 0, 2**64 - 32)], bytes(64)),
        "would end at byte",
    ),
    "offset past the end": (
        gguf_bytes([], [gguf_tensor("t", [8], 0, 64)], bytes(64)),
        "would end at byte",
    ),
    "one byte short": (gguf_bytes([], [gguf_tensor("t", [16])], bytes(63)), "would end at byte"),
    "misaligned": (gguf_bytes([], [gguf_tensor("t", [4], 0, 8)], bytes(64)), "not aligned"),
    "row not of blocks": (gguf_bytes([], [gguf_tensor("t", [48], 2)], bytes(64)), "multiple"),
    "K row not of blocks": (gguf_bytes([], [gguf_tensor("t", [128], 12)], bytes(99)), "multiple"),
    "known other type": (gguf_bytes([], [gguf_tensor("t", [256], 10)], bytes(99)), "type Q2_K"),
    "removed type": (gguf_bytes([], [gguf_tensor("t", [256], 4)], bytes(99)), "type number 4"),
    "integers": (gguf_bytes([], [gguf_tensor("t", [4], 26)], bytes(99)), "type I32"),
    "unknown type": (gguf_bytes([], [gguf_tensor("t", [4], 2**31)], bytes(99)), "type number"),
    "tensor twice": (
        gguf_bytes([], [gguf_tensor("t", [8]), gguf_tensor("t", [8], 0, 32)], bytes(64)),
        "occurs twice",
    ),
    "same place": (
        gguf_bytes([], [gguf_tensor("t", [8]), gguf_tensor("u", [8])], bytes(64)),
        "overlaps",
    ),
    "overlap": (
        gguf_bytes([], [gguf_tensor("t", [16]), gguf_tensor("u", [8], 0, 32)], bytes(64)),
        "overlaps",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files(name: str, tmp_path: Path) -> None:
    """LO-05: each malformed header is refused for what is wrong with it, and nothing large is
    allocated on its word."""
    data, reason = BAD_FILES[name]
    tracemalloc.start()
    try:
        assert reason in refused(tmp_path, data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_limits_on_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LO-05: a file large enough to hold absurd counts is refused by the limits on work."""
    monkeypatch.setattr(reader, "MAX_STRINGS", 10)
    strings = struct.pack("<IQ", 8, 11) + gguf_string("") * 11
    assert "at most 10" in refused(tmp_path, gguf_bytes([gguf_key("k", 9, strings)]))
    six = struct.pack("<IQ", 8, 6) + gguf_string("") * 6
    assert "at most 10" in refused(
        tmp_path, gguf_bytes([gguf_key("k", 9, six), gguf_key("l", 9, six)])
    )
    monkeypatch.setattr(reader, "MAX_STRING_BYTES", 10)
    assert "at most 10" in refused(tmp_path, gguf_bytes([gguf_key("k", 8, gguf_string("x" * 11))]))
    monkeypatch.setattr(reader, "MAX_ENTRIES", 2)
    keys = [gguf_key(name, 0, b"\1") for name in "abc"]
    assert "3 metadata keys" in refused(tmp_path, gguf_bytes(keys))


@dataclass(frozen=True)
class SmallModel:
    """A good file: its bytes, where its header ends and where its last tensor does."""

    data: bytes
    header_end: int
    data_end: int


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """A file with metadata of every common kind and quantised tensors."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    overrides = {"num_hidden_layers": 1, "vocab_size": 270}
    write_gguf(path, "qwen3", encodings="Q4_0", config_overrides=overrides)
    tensors = gguf.GGUFReader(path).tensors
    return SmallModel(
        path.read_bytes(),
        min(int(tensor.data_offset) for tensor in tensors),
        max(int(tensor.data_offset + tensor.n_bytes) for tensor in tensors),
    )


def test_truncated_anywhere(small_model: SmallModel, tmp_path: Path) -> None:
    """LO-05: a file cut at any of many points (each 97 bytes of header, each 4 KB, the last
    byte) is refused, never read short."""
    end = small_model.data_end
    for cut in [*range(1, small_model.header_end, 97), *range(4096, end, 4096), end - 1]:
        refused(tmp_path, small_model.data[:cut])


@settings(FUZZ, max_examples=300)
@given(data=st.data())
def test_mutated_headers(small_model: SmallModel, tmp_path: Path, data: st.DataObject) -> None:
    """LO-05: whatever bytes of the header change, the reader either returns tensors that lie
    inside the file or raises LoadError, and so does opening the model; any other exception is a
    crash on a user's screen."""
    mutated = bytearray(small_model.data)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(4, small_model.header_end - 8))
        patch = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, U64_MAX]).map(
                    lambda value: struct.pack("<Q", value)
                ),
            )
        )
        mutated[position : position + len(patch)] = patch
    path = tmp_path / "mutated.gguf"
    path.write_bytes(mutated)
    try:
        file = read_gguf(path)
    except LoadError:
        return
    for tensor in file.tensors.values():
        rows = int(np.prod(tensor.shape[:-1], dtype=object))
        assert tensor.data.shape == (rows, tensor.encoding.row_bytes(tensor.shape[-1]))
    with suppress(LoadError):
        open_checkpoint(path)


@settings(FUZZ, max_examples=200)
@given(tail=st.binary(max_size=200), version=st.sampled_from([2, 3]))
def test_random_bytes_after_the_magic(tail: bytes, version: int, tmp_path: Path) -> None:
    """LO-05: arbitrary bytes in place of a header never crash the reader."""
    path = tmp_path / "random.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", version) + tail)
    with suppress(LoadError):
        read_gguf(path)
