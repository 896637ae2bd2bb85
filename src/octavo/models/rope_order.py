"""Puts q and k rows of interleaved-rope files into NeoX order (halves rotate)."""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.weights import WeightTensor
from octavo.models.config import DecoderConfig

Rows = NDArray[np.intp]


def neox_rows(num_heads: int, head_dim: int, rotary_dim: int) -> Rows:
    """Return which row of an interleaved matrix each row of the NeoX one is.

    Interleaved, pair i is made of features 2i and 2i + 1 of a head; in NeoX order of features i
    and i + rotary_dim / 2. Features past ``rotary_dim`` keep their place.
    """
    head = np.arange(head_dim, dtype=np.intp)
    head[:rotary_dim] = head[:rotary_dim].reshape(-1, 2).T.reshape(-1)
    starts = np.arange(num_heads, dtype=np.intp)[:, None] * head_dim
    return (starts + head).reshape(-1)


class NeoxTensors(Mapping[str, WeightTensor]):
    """The tensors of an interleaved file, with q and k reordered when they are taken.

    Reordering copies (in the stored encoding), so it waits until a backend packs the tensor.
    """

    def __init__(self, tensors: Mapping[str, WeightTensor], config: DecoderConfig) -> None:
        self._tensors = tensors
        head_dim, rotary_dim = config.head_dim, config.rope.rotary_dim
        self._rows = {
            "attn_q": neox_rows(config.num_heads, head_dim, rotary_dim),
            "attn_k": neox_rows(config.num_kv_heads, head_dim, rotary_dim),
        }

    def __getitem__(self, name: str) -> WeightTensor:
        tensor = self._tensors[name]
        part, _, kind = name.partition(".")[2].partition(".")[2].rpartition(".")
        rows = self._rows.get(part)
        if rows is None:
            return tensor
        if kind == "bias":
            return _take_values(tensor, rows)
        return tensor.take_rows(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _take_values(tensor: WeightTensor, rows: Rows) -> WeightTensor:
    """Reorder a vector whose encoding stores each value by itself."""
    values = tensor.data.reshape(len(rows), tensor.encoding.block_bytes)[rows]
    return WeightTensor(tensor.name, tensor.encoding, tensor.shape, values.reshape(1, -1))
