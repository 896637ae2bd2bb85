"""Weights of the native backend, and the packed format that each is given."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import LoadError
from octavo.kernels.dequantize import to_float32
from octavo.kernels.native import _native
from octavo.kernels.native.packed_store import PackedStore, WeightSpec
from octavo.kernels.weights import Encoding, WeightTensor

Precision = Literal["float32", "bfloat16", "int8", "int4", "file"]
"""How weights are held: all in one format, or each as near to the file's own as there is.

What is quantised meets activations in 8 bits, with 15 for the widest of each group (ADR 7)."""


class Format(IntEnum):
    """Packed formats, numbered as in ``kernel_table.h``."""

    F32 = 0
    BF16 = 1
    I8_GROUP = 2
    U4_GROUP = 3
    U4_GROUP_MIN = 4


_ENCODINGS: Final = {
    Encoding.F32: 0,
    Encoding.F16: 1,
    Encoding.BF16: 2,
    Encoding.Q4_0: 3,
    Encoding.Q4_1: 4,
    Encoding.Q5_0: 5,
    Encoding.Q5_1: 6,
    Encoding.Q8_0: 7,
    Encoding.Q4_K: 8,
    Encoding.Q5_K: 9,
    Encoding.Q6_K: 10,
}
"""Numbers of ``encodings.h``."""

_NEAREST: Final = {
    Encoding.F32: Format.F32,
    Encoding.F16: Format.F32,
    Encoding.BF16: Format.BF16,
    Encoding.Q4_0: Format.U4_GROUP,
    Encoding.Q4_1: Format.U4_GROUP_MIN,
    Encoding.Q4_K: Format.U4_GROUP_MIN,
    Encoding.Q5_0: Format.I8_GROUP,
    Encoding.Q5_1: Format.I8_GROUP,
    Encoding.Q5_K: Format.I8_GROUP,
    Encoding.Q6_K: Format.I8_GROUP,
    Encoding.Q8_0: Format.I8_GROUP,
}
"""Q8_0, Q4_0 and Q4_1 keep every bit; Q4_K keeps its 4-bit values and rounds scales to float16; 5
and 6 bits become 8 with a scale per 32."""

_FORMAT_OF: Final[dict[Precision, Format]] = {
    "float32": Format.F32,
    "bfloat16": Format.BF16,
    "int8": Format.I8_GROUP,
}

_SAMPLED_ROWS: Final = 8

_WIDEST_FIRST: Final = (
    Format.F32,
    Format.BF16,
    Format.I8_GROUP,
    Format.U4_GROUP_MIN,
    Format.U4_GROUP,
)
"""Each holds what all behind it hold: Q4_0 with a minimum of -8 scales is what it was."""

_FOUR_BITS: Final = frozenset({Format.U4_GROUP, Format.U4_GROUP_MIN})


@dataclass(eq=False)
class MatrixWeight:
    """A matrix ``[outputs, inputs]`` in parts; packed when the program that uses it is built.

    Packing waits because the layout depends on use: a gate and its up projection are interleaved.
    """

    parts: Sequence[WeightTensor]
    bias: NDArray[np.float32] | None = None
    is_table: bool = False
    """Whether rows of it are looked up."""
    is_head: bool = False
    """Whether it makes logits."""
    packed: dict[bool, _native.Weight] = field(default_factory=dict)
    """By whether it is gated."""

    @property
    def outputs(self) -> int:
        """Rows of the matrix."""
        return sum(part.shape[0] for part in self.parts)

    @property
    def inputs(self) -> int:
        """Columns of the matrix."""
        return self.parts[0].shape[-1]

    @property
    def has_other_uses(self) -> bool:
        """Whether interleaving would spoil it for another use."""
        return self.is_table

    def pack(
        self,
        backend: _native.Backend,
        precision: Precision,
        gated: bool,
        store: PackedStore | None = None,
    ) -> _native.Weight:
        """Return the packed matrix; its first call reads ``store``, or else the file."""
        if gated not in self.packed:
            self.packed[gated] = self._kept(backend, precision, gated, store)
        return self.packed[gated]

    def _kept(
        self,
        backend: _native.Backend,
        precision: Precision,
        gated: bool,
        store: PackedStore | None,
    ) -> _native.Weight:
        form = choose_format(self.parts, precision, is_vocabulary=self.is_table or self.is_head)
        if store is None:
            return self._pack(backend, form, gated)
        spec = WeightSpec(sample_of(self.parts), self.outputs, self.inputs, form, gated)
        found = store.find(spec, self.bias)
        if found is not None:
            return found
        weight = self._pack(backend, form, gated)
        store.add(spec, weight)
        return weight

    def _pack(self, backend: _native.Backend, form: Format, gated: bool) -> _native.Weight:
        parts = [
            (_ENCODINGS[part.encoding], np.ascontiguousarray(part.data).view(np.uint8))
            for part in self.parts
        ]
        try:
            return backend.pack(parts, self.inputs, form, gated, self.bias)
        except ValueError as error:
            names = ", ".join(part.name for part in self.parts)
            raise LoadError(f"{names}: {error}") from error


@dataclass(frozen=True, slots=True, eq=False)
class VectorWeight:
    """A norm's weight."""

    packed: _native.Vector


def choose_format(
    parts: Sequence[WeightTensor], precision: Precision, *, is_vocabulary: bool = False
) -> Format:
    """Return the packed format of a matrix whose parts are stacked.

    In int4, 4-bit parts of the file stay as they are, and a matrix of the vocabulary (embedding
    table or head) takes 8 bits: each of its rows is a token's, with no others to average out the
    error, and its error lands in the logits themselves.
    """
    if precision in _FORMAT_OF:
        return _FORMAT_OF[precision]
    wanted = {_NEAREST[part.encoding] for part in parts}
    widest = next(form for form in _WIDEST_FIRST if form in wanted)
    if precision == "int4" and widest not in _FOUR_BITS:
        return Format.I8_GROUP if is_vocabulary else Format.U4_GROUP_MIN
    return widest


def sample_of(parts: Sequence[WeightTensor]) -> str:
    """Return names and encodings of tensors, and a digest of some of their rows as they are now.

    A model's version says whether its files have changed; this says whether they are read as they
    were, down to the order of rows.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.data[:: max(1, len(part.data) // _SAMPLED_ROWS)].tobytes())
    names = "+".join(f"{part.name}:{part.encoding.label}" for part in parts)
    return f"{names} {digest.hexdigest()}"


def stack_vectors(tensors: Sequence[WeightTensor]) -> NDArray[np.float32]:
    """Return vectors one behind the other, decoded."""
    return np.concatenate([to_float32(tensor) for tensor in tensors])


def check_matrix(parts: Sequence[WeightTensor]) -> None:
    """Raise ``LoadError`` unless all parts are matrices with as many inputs."""
    for part in parts:
        if len(part.shape) != 2 or part.shape[1] != parts[0].shape[1]:
            raise LoadError(f"{part.name} has shape {part.shape}, which cannot be stacked.")
