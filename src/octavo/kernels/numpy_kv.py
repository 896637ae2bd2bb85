"""Physical KV memory of the numpy backend: one slot per token, head by head."""

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import BlockCopy
from octavo.kernels.ops import KVDtype, KVSpec

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


def quantise_int8(values: Float32) -> tuple[NDArray[np.int8], Float32]:
    """Return int8 values of the same shape, and their scale along the last axis: max / 127.

    Vectors that hold NaN or infinity get a scale of NaN; vectors of almost nothing become zeros.
    """
    largest = np.abs(values).max(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        inverse = np.where(largest > 1e-36, np.float32(127) / largest, np.float32(0))
        # Exact products, rounded once, as a fused multiplication and addition does it.
        exact = values.astype(np.float64) * inverse[..., None].astype(np.float64)
        rounded = np.rint(np.nan_to_num(exact)).astype(np.int8)
    scales = np.where(np.isfinite(largest), largest / np.float32(127), np.float32(np.nan))
    return rounded, scales.astype(np.float32)


_STORED: Final[dict[KVDtype, type[np.generic]]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "int8": np.int8,
}


class NumpyKV:
    """Keys and values of every block in every layer, in float32, bfloat16 or int8.

    Stored as ``[layers, kv_heads, blocks, block_size, head_dim]``, so that the gathered blocks of a
    sequence are one matrix per head; scales of int8 likewise, without the last axis. Memory starts
    as zeros, but a block that is used again keeps its last owner's values past the new owner's
    tokens: readers must not let them through.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        self.spec = spec
        slots = (spec.num_layers, spec.num_kv_heads, num_blocks, spec.block_size)
        stored = _STORED[spec.dtype]
        self._keys, self._values = (
            _Stored(
                lazy_zeros((*slots, spec.head_dim), stored),
                lazy_zeros(slots, np.float32) if spec.dtype == "int8" else None,
            )
            for _ in range(2)
        )

    def store(self, layer: int, slots: NDArray[np.int32], keys: Float32, values: Float32) -> None:
        """Write ``keys`` and ``values``, both ``[N, kv_heads, head_dim]``, into ``slots``."""
        self._keys.write(layer, slots, keys)
        self._values.write(layer, slots, values)

    def gather(self, layer: int, block_ids: NDArray[np.int32]) -> tuple[Float32, Float32]:
        """Return copies of keys and values, ``[kv_heads, *tables, width * block_size, head_dim]``.

        ``block_ids`` is ``[*tables, width]``: a table or several of equal width.
        """
        return self._keys.read(layer, block_ids), self._values.read(layer, block_ids)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks, one after the other in the order given."""
        for copy in copies:
            self._keys.copy(copy)
            self._values.copy(copy)


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """Keys or values as they lie in memory, and their scales where they have some."""

    data: NDArray[Any]
    scales: Float32 | None

    def write(self, layer: int, slots: NDArray[np.int32], new: Float32) -> None:
        if self.scales is not None:
            quantised, scales = quantise_int8(new)
            self._put(self.scales[layer], slots, scales)
            self._put(self.data[layer], slots, quantised)
        elif self.data.dtype == np.uint16:
            self._put(self.data[layer], slots, round_to_bfloat16(new))
        else:
            self._put(self.data[layer], slots, new)

    def read(self, layer: int, block_ids: NDArray[np.int32]) -> Float32:
        heads, _, size, dim = self.data.shape[1:]
        shape = (heads, *block_ids.shape[:-1], block_ids.shape[-1] * size)
        data = np.take(self.data[layer], block_ids, axis=1).reshape(*shape, dim)
        if self.scales is not None:
            scales: Float32 = np.take(self.scales[layer], block_ids, axis=1)
            widened: Float32 = data.astype(np.float32) * scales.reshape(*shape, 1)
            return widened
        return from_bfloat16(data) if data.dtype == np.uint16 else data

    def copy(self, copy: BlockCopy) -> None:
        self.data[:, :, copy.target] = self.data[:, :, copy.source]
        if self.scales is not None:
            self.scales[:, :, copy.target] = self.scales[:, :, copy.source]

    @staticmethod
    def _put(memory: NDArray[Any], slots: NDArray[np.int32], new: NDArray[Any]) -> None:
        """Write ``new [N, heads, ...]`` into ``memory [heads, blocks, block_size, ...]``."""
        memory.reshape(len(memory), -1, *memory.shape[3:])[:, slots] = new.swapaxes(0, 1)
