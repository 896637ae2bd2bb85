"""Weights as a file stores them, before a backend packs them for itself."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray


class Encoding(Enum):
    """Number formats of stored weights; the values are GGUF's names.

    ``block_len`` values share ``block_bytes`` bytes, laid out as ggml defines them.
    """

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q4_0 = ("Q4_0", 32, 18)
    Q4_1 = ("Q4_1", 32, 20)
    Q5_0 = ("Q5_0", 32, 22)
    Q5_1 = ("Q5_1", 32, 24)
    Q8_0 = ("Q8_0", 32, 34)
    Q4_K = ("Q4_K", 256, 144)
    Q5_K = ("Q5_K", 256, 176)
    Q6_K = ("Q6_K", 256, 210)

    def __init__(self, label: str, block_len: int, block_bytes: int) -> None:
        self.label = label
        self.block_len = block_len
        self.block_bytes = block_bytes

    @property
    def is_quantised(self) -> bool:
        """Whether values share scales."""
        return self.block_len > 1

    def row_bytes(self, length: int) -> int:
        """Bytes of ``length`` values in a row; ``length`` must be a multiple of ``block_len``."""
        return length // self.block_len * self.block_bytes


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a model file, still in the file's encoding (often memory-mapped)."""

    name: str
    encoding: Encoding
    shape: tuple[int, ...]
    """Row-major: a matrix is ``(out_features, in_features)``."""
    data: NDArray[np.uint8]
    """Shape ``(rows, encoding.row_bytes(shape[-1]))``, with ``rows`` the product of the rest."""

    def take_rows(self, rows: NDArray[np.intp]) -> "WeightTensor":
        """Return the matrix with its rows in another order (or fewer of them), not decoded."""
        return WeightTensor(self.name, self.encoding, (len(rows), *self.shape[1:]), self.data[rows])
