"""Decoding of stored weights, with the gguf package's own dequantisation as the oracle."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from octavo.kernels import dequantize
from octavo.kernels.dequantize import to_float32
from octavo.kernels.weights import Encoding, WeightTensor
from support_loading import encode, random_k_blocks


def stored(label: str, rows: int, columns: int, seed: int = 0) -> WeightTensor:
    """Return a random matrix in an encoding."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    data = encode(values, label, rng).view(np.uint8).reshape(rows, -1)
    return WeightTensor("w", Encoding[label], (rows, columns), data)


def oracle(tensor: WeightTensor) -> np.ndarray:
    """Decode with the gguf package."""
    kind = GGMLQuantizationType[tensor.encoding.label]
    data = tensor.data.view(np.float32) if tensor.encoding is Encoding.F32 else tensor.data
    return gguf.quants.dequantize(data, kind).reshape(tensor.shape)


@pytest.mark.parametrize("label", [encoding.label for encoding in Encoding])
def test_equals_the_oracle(label: str) -> None:
    """Every encoding decodes as gguf's does: red if a nibble, bit or scale is misplaced."""
    tensor = stored(label, 5, 512)
    np.testing.assert_allclose(to_float32(tensor), oracle(tensor), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "label", [encoding.label for encoding in Encoding if encoding.block_len > 1]
)
def test_equals_the_oracle_on_any_bytes(label: str) -> None:
    """Random bytes reach scale and bit patterns that a quantiser seldom makes (extreme scales)."""
    encoding = Encoding[label]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, (64, encoding.row_bytes(512)), dtype=np.uint8)
    tensor = WeightTensor("w", encoding, (64, 512), data)
    with np.errstate(all="ignore"):  # some scales are infinite or NaN
        np.testing.assert_allclose(to_float32(tensor), oracle(tensor), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", ["F16", "Q4_1", "Q6_K"])
def test_chunks_do_not_show(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding in chunks of rows equals decoding at once: red if a chunk's edge is off."""
    tensor = stored(label, 7, 256)
    whole = to_float32(tensor)
    monkeypatch.setattr(dequantize, "CHUNK_VALUES", 600)
    assert np.array_equal(to_float32(tensor), whole)


def test_vectors_and_reordered_rows() -> None:
    """A vector keeps its shape, and rows taken in another order decode in that order."""
    vector = WeightTensor("v", Encoding.F32, (3,), np.array([[1, 2, 3]], "<f4").view(np.uint8))
    assert to_float32(vector).tolist() == [1.0, 2.0, 3.0]
    tensor = stored("Q5_1", 4, 64)
    rows = np.array([2, 0, 3])
    assert np.array_equal(to_float32(tensor.take_rows(rows)), to_float32(tensor)[rows])


def test_decoding_never_writes_the_file() -> None:
    """The result is a new array: red if float32 weights are handed out as views of the map."""
    tensor = stored("F32", 2, 32)
    before = tensor.data.copy()
    to_float32(tensor)[:] = 0
    assert np.array_equal(tensor.data, before)


def test_random_k_blocks_are_of_weight_size() -> None:
    """The tests' own K-quantised weights are neither zero nor huge, so that models stay sane."""
    rng = np.random.default_rng(2)
    for label in ("Q4_K", "Q5_K", "Q6_K"):
        tensor = WeightTensor("w", Encoding[label], (64, 256), random_k_blocks(label, 64, 256, rng))
        assert 0.005 < to_float32(tensor).std() < 0.2
