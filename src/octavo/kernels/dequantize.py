"""Stored weights back to float32, one function per number format of ggml."""

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.weights import Encoding, WeightTensor

Bytes = NDArray[np.uint8]
Float32 = NDArray[np.float32]

CHUNK_VALUES: Final = 1 << 19
"""Values decoded at once, so that temporary arrays stay within a few megabytes."""


def to_float32(tensor: WeightTensor) -> Float32:
    """Return the tensor's values, shape ``tensor.shape``, as ggml's own dequantisation gives them.

    Non-finite scales in the file give non-finite values, not an error.
    """
    rows, length = tensor.data.shape[0], tensor.shape[-1]
    decode = _DECODERS[tensor.encoding]
    out = np.empty((rows, length), np.float32)
    stride = max(1, CHUNK_VALUES // max(1, length))
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, rows, stride):
            part = np.ascontiguousarray(tensor.data[first : first + stride])
            blocks = part.reshape(-1, tensor.encoding.block_bytes)
            out[first : first + stride] = decode(blocks).reshape(-1, length)
    return out.reshape(tensor.shape)


def _floats(blocks: Bytes, start: int, dtype: str) -> Float32:
    """Return ``[n, 1]``: the little-endian float at byte ``start`` of every block."""
    width = np.dtype(dtype).itemsize
    raw = np.ascontiguousarray(blocks[:, start : start + width])
    values: Float32 = raw.view(dtype).astype(np.float32)
    return values


def _whole(dtype: str) -> Callable[[Bytes], Float32]:
    def decode(blocks: Bytes) -> Float32:
        return _floats(blocks, 0, dtype)

    return decode


def _bf16(blocks: Bytes) -> Float32:
    bits = blocks.view("<u2").astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low nibbles of each row, then its high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _q4_0(blocks: Bytes) -> Float32:
    quants = _nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8)
    return _floats(blocks, 0, "<f2") * quants


def _q4_1(blocks: Bytes) -> Float32:
    quants = _nibbles(blocks[:, 4:]).astype(np.float32)
    return _floats(blocks, 0, "<f2") * quants + _floats(blocks, 2, "<f2")


def _five_bits(high: Bytes, low: Bytes) -> Bytes:
    """Return 32 quants a row from 4 bytes of fifth bits and 16 bytes of nibbles."""
    fifth: Bytes = np.unpackbits(high, axis=-1, bitorder="little") << np.uint8(4)
    return _nibbles(low) | fifth


def _q5_0(blocks: Bytes) -> Float32:
    quants = _five_bits(blocks[:, 2:6], blocks[:, 6:]).astype(np.float32) - np.float32(16)
    return _floats(blocks, 0, "<f2") * quants


def _q5_1(blocks: Bytes) -> Float32:
    quants = _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    return _floats(blocks, 0, "<f2") * quants + _floats(blocks, 2, "<f2")


def _q8_0(blocks: Bytes) -> Float32:
    return _floats(blocks, 0, "<f2") * blocks[:, 2:].view(np.int8).astype(np.float32)


def _k_scales(blocks: Bytes) -> tuple[Float32, Float32]:
    """Return scale and minimum ``[n, 8, 1]`` of each run of 32 values of a K-quant block.

    Bytes 0-3 and 4-7 hold the low six bits of the first four scales and minima; bytes 8-11 the low
    four bits of the last four of both, whose upper two bits sit above the first four's six.
    """
    packed = blocks[:, 4:16].reshape(-1, 3, 4)
    first, second, third = packed[:, 0], packed[:, 1], packed[:, 2]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=-1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=-1)
    scale = _floats(blocks, 0, "<f2") * scales.astype(np.float32)
    minimum = _floats(blocks, 2, "<f2") * minima.astype(np.float32)
    return scale[:, :, None], minimum[:, :, None]


def _q4_k(blocks: Bytes) -> Float32:
    scale, minimum = _k_scales(blocks)
    quants = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return scale * quants.astype(np.float32) - minimum


def _q5_k(blocks: Bytes) -> Float32:
    scale, minimum = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    run = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> run) & 1
    return scale * (low | fifth << 4).astype(np.float32) - minimum


def _q6_k(blocks: Bytes) -> Float32:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    pair = np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> pair) & 3
    quants = (low | high << 4).astype(np.float32) - np.float32(32)
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    scale = _floats(blocks, 208, "<f2") * scales
    return scale[:, :, None] * quants.reshape(-1, 16, 16)


_DECODERS: Final[Mapping[Encoding, Callable[[Bytes], Any]]] = {
    Encoding.F32: _whole("<f4"),
    Encoding.F16: _whole("<f2"),
    Encoding.BF16: _bf16,
    Encoding.Q4_0: _q4_0,
    Encoding.Q4_1: _q4_1,
    Encoding.Q5_0: _q5_0,
    Encoding.Q5_1: _q5_1,
    Encoding.Q8_0: _q8_0,
    Encoding.Q4_K: _q4_k,
    Encoding.Q5_K: _q5_k,
    Encoding.Q6_K: _q6_k,
}
