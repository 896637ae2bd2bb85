"""One step of a decoder, each operation carried out at once with numpy."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_attention import AttentionPlan, paged_attention, plan_attention
from octavo.kernels.numpy_kv import NumpyKV
from octavo.kernels.ops import Activation, Attention, Rope

Float32 = NDArray[np.float32]

_FEW_ROWS = 64
"""Below so many rows BLAS is up to twice as fast with the tall matrix on the left."""


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """A packed matrix ``[out_features, in_features]`` and its bias ``[out_features]``."""

    values: Float32
    bias: Float32 | None = None


class NumpyStep:
    """``Ops`` over one batch; lives for one step. Activations are float32 arrays."""

    def __init__(self, batch: StepBatch, kv: NumpyKV) -> None:
        self._batch = batch
        self._kv = kv
        self._positions = batch.positions
        self._slots = batch.slots(kv.spec.block_size)
        self._rotations: dict[Rope, tuple[Float32, Float32]] = {}
        self._plans: dict[int | None, AttentionPlan] = {}

    def embed(self, table: Matrix, *, scale: float = 1.0) -> Float32:
        """Return the table's rows for the batch's tokens, times ``scale``."""
        rows = table.values[self._batch.token_ids]
        return rows if scale == 1.0 else rows * np.float32(scale)

    def rms_norm(self, x: Float32, weight: Float32, eps: float) -> Float32:
        """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: Float32 = x / np.sqrt(mean_square + np.float32(eps)) * weight
        return normed

    def linear(self, x: Float32, weight: Matrix) -> Float32:
        """Return ``x @ weight.T + bias``."""
        out = _product(x, weight.values)
        if weight.bias is not None:
            out += weight.bias
        return out

    def add(self, x: Float32, y: Float32) -> Float32:
        """Return ``x + y``."""
        return x + y

    def gated(self, gate_up: Float32, activation: Activation) -> Float32:
        """Return ``activation(gate) * up`` of ``gate_up = [gate | up]``."""
        half = gate_up.shape[-1] // 2
        gate, up = gate_up[:, :half], gate_up[:, half:]
        activated = _silu(gate) if activation == "silu" else _gelu_tanh(gate)
        activated *= up
        return activated

    def rope_and_store(self, qkv: Float32, attention: Attention) -> Float32:
        """Norm and rotate q and k, store k and v, return q ``[N, num_heads * head_dim]``."""
        dim, heads, kv_heads = attention.head_dim, attention.num_heads, attention.num_kv_heads
        split = qkv.reshape(len(qkv), heads + 2 * kv_heads, dim)
        q, k, v = split[:, :heads], split[:, heads : heads + kv_heads], split[:, heads + kv_heads :]
        if attention.q_norm is not None:
            q = self.rms_norm(q, attention.q_norm, attention.norm_eps)
        if attention.k_norm is not None:
            k = self.rms_norm(k, attention.k_norm, attention.norm_eps)
        cos, sin = self._rotation(attention.rope)
        self._kv.store(attention.layer, self._slots, _rotate(k, cos, sin), v)
        return _rotate(q, cos, sin).reshape(len(qkv), heads * dim)

    def paged_attention(self, q: Float32, attention: Attention) -> Float32:
        """Return causal attention of each token over its sequence's KV."""
        plan = self._plans.get(attention.sliding_window)
        if plan is None:
            spec = self._kv.spec
            plan = plan_attention(
                self._batch,
                attention.sliding_window,
                spec.block_size,
                spec.num_kv_heads * spec.head_dim,
            )
            self._plans[attention.sliding_window] = plan
        return paged_attention(q, plan, self._kv, attention)

    def logits_rows(self, x: Float32) -> Float32:
        """Return the rows of ``x`` whose logits the batch wants."""
        return x[self._batch.logits_rows]

    def logits(self, x: Float32, head: Matrix, *, softcap: float | None = None) -> Float32:
        """Return ``x @ head.T``, soft-capped if ``softcap`` is set."""
        out = self.linear(x, head)
        if softcap is None:
            return out
        out /= np.float32(softcap)
        np.tanh(out, out=out)
        out *= np.float32(softcap)
        return out

    def _rotation(self, rope: Rope) -> tuple[Float32, Float32]:
        """Return cos and sin, ``[N, 1, rotary_dim / 2]``, computed once a step."""
        found = self._rotations.get(rope)
        if found is None:
            # The product is rounded to float32, as in the tables that models were trained with.
            angles = self._positions.astype(np.float32)[:, None, None] * rope.inv_freq
            magnitude = np.float32(rope.magnitude)
            found = (np.cos(angles) * magnitude, np.sin(angles) * magnitude)
            self._rotations[rope] = found
        return found


def _product(x: Float32, matrix: Float32) -> Float32:
    """Return ``x @ matrix.T``, contiguous."""
    if 1 < len(x) < _FEW_ROWS:
        return np.ascontiguousarray((matrix @ x.T).T)
    return x @ matrix.T


def _rotate(heads: Float32, cos: Float32, sin: Float32) -> Float32:
    half = cos.shape[-1]
    out = np.empty_like(heads)
    low, high = heads[..., :half], heads[..., half : 2 * half]
    out[..., :half] = low * cos - high * sin
    out[..., half : 2 * half] = high * cos + low * sin
    out[..., 2 * half :] = heads[..., 2 * half :]
    return out


def _silu(x: Float32) -> Float32:
    denominator = np.exp(-x)  # infinite below -88, where the quotient is -0 as it should be
    denominator += np.float32(1)
    return np.divide(x, denominator, out=denominator)


def _gelu_tanh(x: Float32) -> Float32:
    """GELU by its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415)."""
    gate = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x * x * x)
    np.tanh(gate, out=gate)
    gate += np.float32(1)
    gate *= np.float32(0.5) * x
    return gate
