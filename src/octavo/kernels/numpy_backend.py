"""The numpy backend: the oracle that every other backend is tested against."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError
from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.dequantize import to_float32
from octavo.kernels.numpy_kv import NumpyKV, from_bfloat16, round_to_bfloat16
from octavo.kernels.numpy_ops import Matrix, NumpyStep
from octavo.kernels.ops import Forward, KVSpec, StepFunction
from octavo.kernels.sampling.numpy_sampler import NumpySampler
from octavo.kernels.weights import WeightTensor

Float32 = NDArray[np.float32]


class NumpyBackend:
    """Implements ``Backend`` in numpy, all arithmetic in float32.

    ``dtype`` is the precision of weights: ``bfloat16`` rounds each weight to bfloat16 as it is
    packed. The precision of KV is ``KVSpec.dtype``; it takes as many bits as the format has.

    Memory: whatever a file's encoding, a packed weight takes 4 bytes a value (540 MB for a model of
    135 million), and an embedding table that is tied to the head is held once.

    Reproducibility: a row's result depends on its batch-mates only as far as BLAS sums in another
    order for another number of rows, or a padded group of decodes is longer: last bits, no more.
    """

    def __init__(self, dtype: Literal["float32", "bfloat16"] = "float32") -> None:
        self._dtype = dtype
        self._kv: NumpyKV | None = None

    @property
    def name(self) -> str:
        """``numpy``."""
        return "numpy"

    def linear_weight(
        self, parts: Sequence[WeightTensor], bias: Sequence[WeightTensor] = ()
    ) -> Matrix:
        """Stack matrices along their output axis, and their biases likewise."""
        values = np.concatenate([self._decode(part) for part in parts])
        if not bias:
            return Matrix(values)
        return Matrix(values, np.concatenate([self._decode(part) for part in bias]))

    def embedding(self, table: WeightTensor) -> Matrix:
        """Decode a table ``[vocab, features]``."""
        return Matrix(self._decode(table))

    def vector(self, tensor: WeightTensor, *, offset: float = 0.0) -> Float32:
        """Decode a norm's weight and add ``offset``."""
        return self._decode(tensor) + np.float32(offset)

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Return ``spec.block_bytes``: nothing is padded."""
        return spec.block_bytes

    def allocate_kv(self, spec: KVSpec, num_blocks: int) -> None:
        """Allocate zeroed KV; whatever an earlier call allocated is dropped."""
        self._kv = NumpyKV(spec, num_blocks)

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers, in the order given."""
        self._allocated_kv().copy(copies)

    def compile(self, forward: Forward) -> StepFunction:
        """Return a function that runs ``forward`` call by call."""
        kv = self._allocated_kv()

        def step(batch: StepBatch) -> Float32:
            # Overflow gives the right limit (silu of -1e9); what is not a number travels to the
            # logits of its own row, where the runner looks for it.
            with np.errstate(over="ignore", invalid="ignore"):
                logits: Float32 = forward(NumpyStep(batch, kv))
            return logits

        return step

    def sampler(self, vocab_size: int) -> NumpySampler:
        """Return the reference."""
        return NumpySampler(vocab_size)

    def _allocated_kv(self) -> NumpyKV:
        if self._kv is None:
            raise InvariantError("allocate_kv must be called first.")
        return self._kv

    def _decode(self, tensor: WeightTensor) -> Float32:
        values = to_float32(tensor)
        if self._dtype == "bfloat16":
            return from_bfloat16(round_to_bfloat16(values))
        return values
