"""The border between models and arithmetic.

A decoder is written once, as a straight line of calls on ``Ops`` whose arguments are opaque arrays
and constants. It never looks into an array and never branches on one, so a backend may run each
call at once (numpy) or record the line once and replay it as one call per step (native). The batch
and the KV of the step belong to the backend: a call such as ``embed`` reads the batch by itself.

``Backend`` is what the runner holds: it packs weights, owns the physical KV, turns a decoder into
a step function, and chooses tokens from the logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import BlockCopy
from octavo.kernels.batch import StepBatch
from octavo.kernels.sampling.interface import Sampler
from octavo.kernels.weights import WeightTensor

Array = Any
"""An activation: opaque to models. ``[N, features]`` unless an operation says otherwise."""

Weight = Any
"""A packed weight: opaque to models, made by ``Backend.linear_weight`` and its siblings."""

Activation = Literal["silu", "gelu_tanh"]

KVDtype = Literal["float32", "bfloat16", "int8"]
"""Number format of KV. int8 has one float32 scale for each token and KV head, of keys and of values
each, as vLLM's ``int8_per_token_head``; scales are set as a token is written and never change."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary embedding of one kind of layer, scalings already applied (halves rotated, NeoX)."""

    inv_freq: NDArray[np.float32]
    """``[rotary_dim / 2]``: angle of pair i at position p is ``p * inv_freq[i]``. Pair i is made
    of features i and ``i + rotary_dim / 2`` of a head; features past ``rotary_dim`` stay."""
    magnitude: float = 1.0
    """Factor on cos and sin (yarn's attention factor)."""


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Constants of one attention layer."""

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on query-key products."""
    rope: Rope
    sliding_window: int | None = None
    """A token sees itself and the ``sliding_window - 1`` tokens before it; None: all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``; None: unchanged."""
    q_norm: Weight | None = None
    """RMS norm over each query head before the rotation; None: none."""
    k_norm: Weight | None = None
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of the physical KV cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: KVDtype = "float32"

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block over all layers, scales included, without padding."""
        head = {
            "float32": 4 * self.head_dim,
            "bfloat16": 2 * self.head_dim,
            "int8": self.head_dim + 4,
        }[self.dtype]
        return self.num_layers * self.block_size * 2 * self.num_kv_heads * head


class Ops(Protocol):
    """What a decoder may ask for, inside a step."""

    def embed(self, table: Weight, *, scale: float = 1.0) -> Array:
        """Return the rows of ``table`` for the batch's tokens, times ``scale``."""

    def rms_norm(self, x: Array, weight: Weight, eps: float) -> Array:
        """Return ``x / sqrt(mean(x^2) + eps) * weight`` over the last axis."""

    def linear(self, x: Array, weight: Weight) -> Array:
        """Return ``x @ weight.T + bias``; the bias, if any, came with the weight."""

    def add(self, x: Array, y: Array) -> Array:
        """Return ``x + y``."""

    def gated(self, gate_up: Array, activation: Activation) -> Array:
        """Return ``activation(gate) * up`` of ``gate_up = [gate | up]``."""

    def rope_and_store(self, qkv: Array, attention: Attention) -> Array:
        """Norm and rotate q and k of ``qkv = [q | k | v]``, store k and v, return q."""

    def paged_attention(self, q: Array, attention: Attention) -> Array:
        """Return causal attention of each token over its sequence's KV, through the block table."""

    def logits_rows(self, x: Array) -> Array:
        """Return ``[R, features]``: the rows of ``x`` whose logits the batch wants."""

    def logits(self, x: Array, head: Weight, *, softcap: float | None = None) -> Array:
        """Return ``[R, vocab]``: ``x @ head.T``, then ``softcap * tanh(. / softcap)`` if set."""


Forward = Callable[[Ops], Array]
"""A decoder's line of calls, ending in ``logits``; for embeddings in the norm before it."""

StepFunction = Callable[[StepBatch], NDArray[np.float32]]
"""Computes a step: stores the KV of the batch and returns logits ``[R, vocab]`` (or normed states
``[R, features]``, where the line of calls ends in them), valid until the next call."""


class Backend(Protocol):
    """Weights, memory and steps on one kind of machine."""

    @property
    def name(self) -> str:
        """The name that ``--backend`` takes, such as ``numpy``."""

    def linear_weight(
        self, parts: Sequence[WeightTensor], bias: Sequence[WeightTensor] = ()
    ) -> Weight:
        """Pack matrices stacked along their output axis (q, k and v as one), with their biases."""

    def embedding(self, table: WeightTensor) -> Weight:
        """Pack a table that ``embed`` reads and, where it is tied, ``logits`` too."""

    def vector(self, tensor: WeightTensor, *, offset: float = 0.0) -> Weight:
        """Pack a norm's weight plus ``offset`` (Gemma stores its norms less one)."""

    def kv_block_bytes(self, spec: KVSpec) -> int:
        """Return the bytes that ``allocate_kv`` takes for each block, padding included."""

    def allocate_kv(self, spec: KVSpec, num_blocks: int) -> None:
        """Allocate the physical KV of ``num_blocks`` blocks; called once, before ``compile``."""

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy the KV of whole blocks, in all layers."""

    def compile(self, forward: Forward) -> StepFunction:
        """Turn a decoder into the function that the runner calls each step."""

    def sampler(self, vocab_size: int) -> Sampler:
        """Return what chooses tokens from the logits that its step functions compute."""
