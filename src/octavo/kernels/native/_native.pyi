"""Types of the compiled extension."""

import numpy as np
from numpy.typing import NDArray

def available_isas() -> list[str]: ...
def usable_threads() -> int: ...

class Weight:
    @property
    def num_bytes(self) -> int: ...

class Vector:
    def __init__(self, values: NDArray[np.float32]) -> None: ...

class Backend:
    def __init__(self, isa: str, threads: int, pin: bool) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def pack(
        self,
        parts: list[tuple[int, NDArray[np.uint8]]],
        inputs: int,
        format: int,
        gated: bool,
        bias: NDArray[np.float32] | None,
    ) -> Weight: ...
    def allocate_kv(
        self,
        layers: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        blocks: int,
        bfloat16: bool,
    ) -> None: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def barrier_ns(self) -> float: ...
    def read_gb_per_s(self, num_bytes: int) -> float: ...
    def peak_int8_ops(self) -> float: ...
    def peak_float_ops(self) -> float: ...

class Program:
    def __init__(self, backend: Backend) -> None: ...
    def buffer(self, features: int, logits: bool) -> int: ...
    def rope(self, inv_freq: NDArray[np.float32], magnitude: float) -> int: ...
    def embed(self, out: int, table: Weight, scale: float) -> None: ...
    def rms_norm(self, x: int, out: int, weight: Vector, eps: float) -> None: ...
    def linear(
        self,
        x: int,
        out: int,
        weight: Weight,
        norm: Vector | None,
        eps: float,
        residual: int,
        gate: int,
        softcap: float,
    ) -> None: ...
    def add(self, x: int, y: int, out: int) -> None: ...
    def gated(self, x: int, out: int, gate: int) -> None: ...
    def rope_and_store(
        self,
        qkv: int,
        layer: int,
        rope: int,
        sizes: list[int],
        q_norm: Vector | None,
        k_norm: Vector | None,
        norm_eps: float,
    ) -> None: ...
    def attend(
        self, q: int, out: int, layer: int, sizes: list[int], scale: float, softcap: float
    ) -> None: ...
    def take_rows(self, x: int, out: int) -> None: ...
    def run(
        self,
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
        query_starts: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        slots: NDArray[np.int32],
        logits_rows: NDArray[np.int32],
    ) -> NDArray[np.float32]: ...
