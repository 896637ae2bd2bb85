"""What tests of paged attention share: a layer over random tokens, and tolerances."""

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from octavo.kernels.ops import Array, Attention, Backend, Forward, KVSpec, Ops, Rope
from support_models import f32_tensor
from support_native import BFLOAT16_PRODUCTS, Line

# float32 sums differ in order; one stored value that rounds the other way moves the rest.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 2e-2}


def tolerance(isa: str, dtype: str) -> float:
    """Largest error of a result of magnitudes up to 8. Where products take bfloat16, queries and
    weights are rounded too, each by up to 2^-9 of itself."""
    paired = dtype == "bfloat16" and isa in BFLOAT16_PRODUCTS
    return 6e-2 if paired else TOLERANCE[dtype]


@dataclass(frozen=True)
class Shape:
    """Attention layers, all alike, and the cache under them."""

    kv_heads: int = 2
    group: int = 3
    dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    rotary: int = 16
    qk_norm: bool = False
    dtype: str = "float32"
    layers: int = 1

    @property
    def spec(self) -> KVSpec:
        return KVSpec(
            self.layers,
            self.kv_heads,
            self.dim,
            self.block_size,
            self.dtype,  # type: ignore[arg-type]
        )


def attention_line(shape: Shape, seed: int = 0) -> Line:
    """Embed; in each layer project to q, k and v, rotate, store, attend; add what layers give."""
    heads = shape.kv_heads * shape.group
    width = (heads + 2 * shape.kv_heads) * shape.dim
    rng = np.random.default_rng(seed)
    table = rng.standard_normal((50, 20)).astype(np.float32)
    matrices = [
        (rng.standard_normal((width, 20)) * 0.4).astype(np.float32) for _ in range(shape.layers)
    ]
    norms = [rng.standard_normal(shape.dim).astype(np.float32) for _ in range(2)]
    exponents = np.arange(shape.rotary // 2, dtype=np.float32) / max(1, shape.rotary // 2)
    rope = Rope((1.0 / np.float32(100.0) ** exponents).astype(np.float32), 1.1)

    def line(backend: Backend) -> Forward:
        embedding = backend.embedding(f32_tensor(table))
        weights = [backend.linear_weight([f32_tensor(matrix)]) for matrix in matrices]
        q_norm, k_norm = (backend.vector(f32_tensor(norm)) for norm in norms)
        attention = Attention(
            layer=0,
            num_heads=heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.dim,
            scale=shape.dim**-0.5,
            rope=rope,
            sliding_window=shape.window,
            softcap=shape.softcap,
            q_norm=q_norm if shape.qk_norm else None,
            k_norm=k_norm if shape.qk_norm else None,
        )

        def forward(ops: Ops) -> Array:
            x = ops.embed(embedding)
            results: list[Array] = []
            for index, qkv in enumerate(weights):
                layer = replace(attention, layer=index)
                q = ops.rope_and_store(ops.linear(x, qkv), layer)
                results.append(ops.paged_attention(q, layer))
            return ops.logits_rows(reduce(ops.add, results))

        return forward

    return line
