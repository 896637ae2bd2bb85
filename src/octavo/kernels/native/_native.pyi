"""Types of the compiled extension."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def available_isas() -> list[str]: ...
def usable_cpus() -> list[int]: ...
def usable_threads(cgroups: str = ..., memberships: str = ...) -> int: ...
def packed_layout() -> str: ...

class MappedFile:
    def __init__(self, descriptor: int) -> None: ...

class Weight:
    @property
    def num_bytes(self) -> int: ...
    @property
    def panels(self) -> NDArray[np.uint8]: ...

class Vector:
    def __init__(self, values: NDArray[np.float32]) -> None: ...

class SamplingState:
    def __init__(
        self,
        *,
        vocab: int,
        factor: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition: float,
        frequency: float,
        presence: float,
        counts_tokens: bool,
        min_tokens: int,
        num_top: int,
        seed: int,
        ending_ids: Sequence[int],
        banned_ids: Sequence[int],
        biased_ids: Sequence[int],
        biases: Sequence[float],
        outside_vocab: bool,
        prompt: Sequence[int],
    ) -> None: ...
    def note_output(self, token_ids: Sequence[int]) -> None: ...

Score = tuple[int, float, float, int, int, list[tuple[int, float]]]
"""Token, largest logit, its logit, mass of the row, rank, likeliest tokens and their logits."""

class Sampler:
    def sample(
        self,
        logits: NDArray[np.float32],
        rows: Sequence[int],
        states: Sequence[SamplingState],
        draws: Sequence[int],
        masks: Sequence[tuple[int, NDArray[np.uint8]]],
    ) -> tuple[list[int], list[tuple[int, int]], list[tuple[int, Score]]]: ...
    def score(
        self, logits: NDArray[np.float32], token_ids: Sequence[int], num_top: int
    ) -> tuple[int, list[Score]]: ...

class Backend:
    def __init__(self, isa: str, threads: int, cpus: list[int], pin_caller: bool) -> None: ...
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
    def map(
        self,
        file: MappedFile,
        offset: int,
        outputs: int,
        inputs: int,
        format: int,
        gated: bool,
        bias: NDArray[np.float32] | None,
    ) -> Weight: ...
    def checksums(self, file: MappedFile, num_bytes: int) -> list[int]: ...
    def allocate_kv(
        self,
        layers: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        blocks: int,
        type: int,
    ) -> None: ...
    def populate_kv(self, lead: int) -> None: ...
    def kv_block_bytes(
        self, layers: int, kv_heads: int, dim: int, block_size: int, type: int
    ) -> int: ...
    def set_attention(self, split: bool, share: bool, deterministic: bool) -> None: ...
    def plan_attention(
        self,
        query_starts: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        heads: int,
        window: int,
    ) -> list[list[tuple[int, list[int], int, int, int, bool]]]: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def sampler(self, vocab: int) -> Sampler: ...
    def attention_costs(self, type: int, heads: int, dim: int, measured: bool) -> list[float]: ...
    def barrier_ns(self) -> float: ...
    def read_gb_per_s(self, num_bytes: int) -> float: ...
    def matrix_rows(self) -> int: ...
    def byte_product(self) -> str: ...
    def peak_byte_ops(self) -> float: ...
    def bfloat_product(self) -> str: ...
    def peak_bfloat_ops(self) -> float: ...
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
        feeds_next: bool,
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
        query_starts: NDArray[np.int32],
        kv_lens: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        logits_rows: NDArray[np.int32],
    ) -> NDArray[np.float32]: ...
