"""Physical KV memory of the numpy backend: one slot per token, head by head."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import BlockCopy
from octavo.kernels.ops import KVSpec

Float32 = NDArray[np.float32]


def round_to_bfloat16(values: Float32) -> NDArray[np.uint16]:
    """Return the upper 16 bits of each float, rounded to nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
    not_a_number = np.isnan(values)
    if not_a_number.any():  # rounding could carry a NaN's mantissa into the sign
        rounded = np.where(not_a_number, np.uint32(0x7FC0), rounded)
    return rounded.astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> Float32:
    """Return the floats whose upper halves are ``bits``."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def lazy_zeros(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Return zeros whose memory is taken page by page, as it is first written.

    ``np.zeros`` asks the kernel for huge pages. A block is spread over all layers and heads, so its
    first token would have hundreds of them cleared, which takes up to seconds.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux
        with contextlib.suppress(OSError):  # a kernel that has no huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)


class NumpyKV:
    """Keys and values of every block in every layer, in float32 or bfloat16.

    Stored as ``[layers, kv_heads, blocks, block_size, head_dim]``, so that the gathered blocks of a
    sequence are one matrix per head. Memory starts as zeros, but a block that is used again keeps
    its last owner's values past the new owner's tokens: readers must not let them through.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        shape = (
            spec.num_layers,
            spec.num_kv_heads,
            num_blocks,
            spec.block_size,
            spec.head_dim,
        )
        self.spec = spec
        dtype = np.float32 if spec.dtype == "float32" else np.uint16
        self._keys = lazy_zeros(shape, dtype)
        self._values = lazy_zeros(shape, dtype)

    def store(self, layer: int, slots: NDArray[np.int32], keys: Float32, values: Float32) -> None:
        """Write ``keys`` and ``values``, both ``[N, kv_heads, head_dim]``, into ``slots``."""
        if self.spec.dtype == "bfloat16":
            self._write(self._keys[layer], slots, round_to_bfloat16(keys))
            self._write(self._values[layer], slots, round_to_bfloat16(values))
        else:
            self._write(self._keys[layer], slots, keys)
            self._write(self._values[layer], slots, values)

    def gather(self, layer: int, block_ids: NDArray[np.int32]) -> tuple[Float32, Float32]:
        """Return copies of keys and values, ``[kv_heads, *tables, width * block_size, head_dim]``.

        ``block_ids`` is ``[*tables, width]``: a table or several of equal width.
        """
        heads, _, size, dim = self._keys.shape[1:]
        shape = (heads, *block_ids.shape[:-1], block_ids.shape[-1] * size, dim)
        keys = np.take(self._keys[layer], block_ids, axis=1).reshape(shape)
        values = np.take(self._values[layer], block_ids, axis=1).reshape(shape)
        if self.spec.dtype == "bfloat16":
            return from_bfloat16(keys), from_bfloat16(values)
        return keys, values

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, one after the other in the order given."""
        for copy in copies:
            self._keys[:, :, copy.target] = self._keys[:, :, copy.source]
            self._values[:, :, copy.target] = self._values[:, :, copy.source]

    @staticmethod
    def _write(memory: NDArray[Any], slots: NDArray[np.int32], new: NDArray[Any]) -> None:
        heads, _, _, dim = memory.shape
        memory.reshape(heads, -1, dim)[:, slots] = new.transpose(1, 0, 2)
