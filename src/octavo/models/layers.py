"""The parts that decoders are made of: each holds packed weights and adds calls to the line."""

from dataclasses import dataclass

from octavo.kernels.ops import Activation, Array, Attention, Ops, Weight


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """Root mean square norm (arXiv 1910.07467)."""

    weight: Weight
    eps: float

    def apply(self, ops: Ops, x: Array) -> Array:
        """Return the normed rows, ``[N, features]``."""
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBlock:
    """Causal self-attention with grouped queries and rotary positions, and its residual."""

    norm: RMSNorm
    qkv: Weight
    """q, k and v stacked: ``[(num_heads + 2 * num_kv_heads) * head_dim, hidden]``."""
    attention: Attention
    output: Weight
    post_norm: RMSNorm | None
    """Norm of the block's result before it is added (gemma3)."""

    def apply(self, ops: Ops, x: Array, *, wanted_rows: bool) -> Array:
        """Return ``x`` plus attention: ``[N, hidden]``, or the rows whose logits are wanted."""
        qkv = ops.linear(self.norm.apply(ops, x), self.qkv)
        q = ops.rope_and_store(qkv, self.attention)
        attended = ops.paged_attention(q, self.attention)
        if wanted_rows:
            x, attended = ops.logits_rows(x), ops.logits_rows(attended)
        mixed = ops.linear(attended, self.output)
        return ops.add(x, self.post_norm.apply(ops, mixed) if self.post_norm else mixed)


@dataclass(frozen=True, slots=True, eq=False)
class MLPBlock:
    """Gated feed-forward network, and its residual."""

    norm: RMSNorm
    gate_up: Weight
    """Gate and up stacked: ``[2 * intermediate, hidden]``."""
    activation: Activation
    down: Weight
    post_norm: RMSNorm | None
    """Norm of the block's result before it is added (gemma3)."""

    def apply(self, ops: Ops, x: Array) -> Array:
        """Return ``x`` plus the network's result, ``[N, hidden]``."""
        gate_up = ops.linear(self.norm.apply(ops, x), self.gate_up)
        mixed = ops.linear(ops.gated(gate_up, self.activation), self.down)
        return ops.add(x, self.post_norm.apply(ops, mixed) if self.post_norm else mixed)


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Attention, then MLP."""

    attention: AttentionBlock
    mlp: MLPBlock

    def apply(self, ops: Ops, x: Array, *, wanted_rows: bool) -> Array:
        """Return the layer's result, ``[N, hidden]``.

        With ``wanted_rows`` it is ``[R, hidden]``, of the rows whose logits the batch wants: of the
        last layer nothing else is read but its KV, so most of a prompt need not pass its products.
        """
        return self.mlp.apply(ops, self.attention.apply(ops, x, wanted_rows=wanted_rows))
