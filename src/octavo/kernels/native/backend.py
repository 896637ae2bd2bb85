"""The native backend: a decoder's step as one call into C++."""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvariantError, SettingError
from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.native import _native
from octavo.kernels.native.fusion import fuse
from octavo.kernels.native.graph import Recorder
from octavo.kernels.native.options import NativeOptions
from octavo.kernels.native.packed_store import PackedStore
from octavo.kernels.native.program import build_program
from octavo.kernels.native.sampler import NativeSampler
from octavo.kernels.native.weights import (
    MatrixWeight,
    Precision,
    VectorWeight,
    check_matrix,
    stack_vectors,
)
from octavo.kernels.ops import Forward, KVDtype, KVSpec, StepFunction
from octavo.kernels.weights import WeightTensor

KV_TYPES: Final[dict[KVDtype, int]] = {"float32": 0, "bfloat16": 1, "int8": 2}
"""Numbers of ``kernel_table.h``."""
MAX_THREADS: Final = 4096
"""More than machines have CPUs."""

POPULATED_AHEAD: Final = 512 << 20
"""Bytes of KV beyond the last block used whose memory is made resident while no step runs. The
system finds and zeroes memory when it is first touched, which a step would wait for."""


class NativeBackend:
    """Implements ``Backend`` in C++ for the instruction set of this CPU.

    ``precision`` is how weights are held. Activations between operations are float32; quantised
    weights meet them as int8 in a step (a power of the root of 2) per 32 values, the widest four of
    these as 15 bits, and products are summed as integers, exactly. Arithmetic that is not quantised
    accumulates in float32.

    Reproducibility: a row's result depends on its batch-mates in one way. Attention to a long
    context is cut along the tokens where that ends the step sooner, so in another batch it may be
    cut elsewhere, which moves last bits. With ``deterministic`` the states of every 512 tokens are
    joined in order wherever the cuts are, and nothing is left that could differ.
    """

    def __init__(self, precision: Precision = "file", options: NativeOptions | None = None) -> None:
        options = options or NativeOptions()
        isas = _native.available_isas()
        isa = isas[0] if options.isa == "auto" else options.isa
        if isa not in isas:
            raise SettingError(
                f"This CPU or build has no kernels for {isa!r}; it has: {', '.join(isas)}.",
                name="OCTAVO_ISA",
            )
        threads, cpus = _placement(options)
        try:
            self._native = _native.Backend(isa, threads, cpus, pin_caller=bool(options.cpus))
        except RuntimeError as error:
            raise SettingError(
                f"The system does not start {threads} threads ({error}).", name="--threads"
            ) from error
        self._native.set_attention(
            options.split_contexts, options.share_prefixes, options.deterministic
        )
        self._precision: Precision = precision
        self._num_blocks = 0
        self._weights: list[MatrixWeight] = []
        cache = options.packed_cache
        self._store = PackedStore(cache, self._native, precision) if cache else None

    @property
    def name(self) -> str:
        """``native``."""
        return "native"

    @property
    def isa(self) -> str:
        """Name of the instruction set whose kernels run."""
        return self._native.isa

    @property
    def threads(self) -> int:
        """Threads that share a step."""
        return self._native.threads

    @property
    def packed_bytes(self) -> int:
        """Bytes of all weights packed so far."""
        return sum(packed.num_bytes for w in self._weights for packed in w.packed.values())

    @property
    def machine(self) -> _native.Backend:
        """The extension's measurements of this machine's ceilings, on the pool of the steps."""
        return self._native

    def linear_weight(
        self, parts: Sequence[WeightTensor], bias: Sequence[WeightTensor] = ()
    ) -> MatrixWeight:
        """Keep matrices stacked along their output axis, to be packed by ``compile``."""
        check_matrix(parts)
        return self._keep(MatrixWeight(parts, stack_vectors(bias) if bias else None))

    def embedding(self, table: WeightTensor) -> MatrixWeight:
        """Keep a table ``[vocab, features]``, to be packed by ``compile``."""
        check_matrix([table])
        return self._keep(MatrixWeight([table], is_table=True))

    def vector(self, tensor: WeightTensor, *, offset: float = 0.0) -> VectorWeight:
        """Decode a norm's weight and add ``offset``."""
        values = stack_vectors([tensor]) + np.float32(offset)
        return VectorWeight(_native.Vector(np.ascontiguousarray(values, np.float32)))

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Return the bytes of a block.

        Keys take whole vectors of slots: a block size that is no multiple of the vector (16 floats
        at most) costs the padding. What is stored for a head takes whole cache lines.
        """
        return self._native.kv_block_bytes(
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            KV_TYPES[spec.dtype],
        )

    def allocate_kv(self, spec: KVSpec, num_blocks: int) -> None:
        """Allocate zeroed KV; whatever an earlier call allocated is dropped."""
        self._native.allocate_kv(
            spec.num_layers,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            num_blocks,
            KV_TYPES[spec.dtype],
        )
        self._num_blocks = num_blocks

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in all layers, in the order given."""
        for copy in copies:
            self._native.copy_block(copy.source, copy.target)

    def compile(self, forward: Forward) -> StepFunction:
        """Record ``forward`` once, pack its weights (or map them, where they were kept), and return
        a function that replays it."""
        if self._num_blocks == 0:
            raise InvariantError("allocate_kv must be called first.")
        recorder = Recorder()
        forward(recorder)
        nodes = fuse(recorder.nodes)
        program = build_program(self._native, nodes, self._precision, self._store)
        if self._store is not None:
            self._store.save()
        self._native.populate_kv(POPULATED_AHEAD)

        def step(batch: StepBatch) -> NDArray[np.float32]:
            try:
                return program.run(
                    batch.token_ids,
                    batch.cu_query_lens,
                    batch.kv_lens,
                    batch.block_tables,
                    batch.logits_rows,
                )
            except ValueError as error:
                raise InvariantError(str(error)) from error

        return step

    def sampler(self, vocab_size: int) -> NativeSampler:
        """Return a sampler that shares the threads of the steps."""
        return NativeSampler(self._native, vocab_size)

    def _keep(self, weight: MatrixWeight) -> MatrixWeight:
        self._weights.append(weight)
        return weight


def _placement(options: NativeOptions) -> tuple[int, list[int]]:
    """Return how many threads there are, and their CPUs (none: they float)."""
    if not (isinstance(options.threads, int) and 0 <= options.threads <= MAX_THREADS):
        raise SettingError(
            f"--threads must be a whole number between 0 and {MAX_THREADS}, not {options.threads}.",
            name="--threads",
        )
    usable, allowed = _native.usable_cpus(), _native.usable_threads()
    if not options.cpus:
        return options.threads or allowed, usable if options.pin_threads else []
    if not usable:
        raise SettingError(
            "This system does not let a program choose its CPUs; leave --cpu-affinity out.",
            name="--cpu-affinity",
        )
    if lost := sorted(set(options.cpus) - set(usable)):
        raise SettingError(
            f"--cpu-affinity names CPU {', '.join(map(str, lost))}, but this process may use "
            f"{', '.join(map(str, usable))}.",
            name="--cpu-affinity",
        )
    if len(set(options.cpus)) < len(options.cpus):
        raise SettingError(
            f"--cpu-affinity names a CPU twice: {', '.join(map(str, options.cpus))}.",
            name="--cpu-affinity",
        )
    if options.threads > len(options.cpus):
        raise SettingError(
            f"--threads {options.threads} needs as many CPUs, but --cpu-affinity names "
            f"{len(options.cpus)}.",
            name="--threads",
        )
    return options.threads or min(allowed, len(options.cpus)), list(options.cpus)
