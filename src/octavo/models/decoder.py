"""The decoder of llama (and Mistral), qwen2, qwen3 and gemma3, written once against ``Ops``.

The families differ in data alone: which biases and norms are among the tensors, and what
``DecoderConfig`` says of activations, windows, rotary embeddings, scales and caps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.kernels.ops import Array, Attention, Backend, KVDtype, KVSpec, Ops, Rope, Weight
from octavo.kernels.weights import WeightTensor
from octavo.models.config import DecoderConfig
from octavo.models.layers import AttentionBlock, DecoderLayer, MLPBlock, RMSNorm
from octavo.models.rope import build_rope


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A decoder with packed weights."""

    config: DecoderConfig
    embedding: Weight
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    head: Weight

    def forward(self, ops: Ops) -> Array:
        """Make the calls of a step; return logits ``[R, vocab]`` of the rows the batch wants."""
        return ops.logits(self.hidden(ops), self.head, softcap=self.config.logits_softcap)

    def hidden(self, ops: Ops) -> Array:
        """Make the calls of a step but for the head; return those rows' states, normed."""
        x = ops.embed(self.embedding, scale=self.config.embedding_scale)
        for layer in self.layers:
            x = layer.apply(ops, x, wanted_rows=layer is self.layers[-1])
        return self.norm.apply(ops, x)

    def kv_spec(self, block_size: int, dtype: KVDtype) -> KVSpec:
        """Return the shape of the KV that this decoder stores."""
        return kv_spec(self.config, block_size, dtype)


def kv_spec(config: DecoderConfig, block_size: int, dtype: KVDtype) -> KVSpec:
    """Return the shape of the KV of a decoder that need not be built yet."""
    return KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)


def build_decoder(
    config: DecoderConfig, tensors: Mapping[str, WeightTensor], backend: Backend
) -> Decoder:
    """Pack the tensors with ``backend`` and put the decoder together.

    ``tensors`` are those of ``tensor_layout.decoder_layout(config, ...)``, names and shapes: a
    ``Checkpoint`` has checked that they are all there and that none is left over.
    """
    return _Builder(config, tensors, backend).decoder()


class _Builder:
    """Packs tensors by their canonical names, layer by layer."""

    def __init__(
        self, config: DecoderConfig, tensors: Mapping[str, WeightTensor], backend: Backend
    ) -> None:
        self._config = config
        self._tensors = tensors
        self._backend = backend
        self._rope = build_rope(config.rope)
        self._local_rope = build_rope(config.local_rope) if config.local_rope else self._rope

    def decoder(self) -> Decoder:
        config = self._config
        embedding = self._backend.embedding(self._tensors["token_embd.weight"])
        layers = tuple(
            DecoderLayer(self._attention_block(index), self._mlp_block(f"blk.{index}"))
            for index in range(config.num_layers)
        )
        head = embedding if config.tied_embeddings else self._linear("output")
        return Decoder(config, embedding, layers, self._norm("output_norm"), head)

    def _attention_block(self, index: int) -> AttentionBlock:
        prefix = f"blk.{index}"
        return AttentionBlock(
            norm=self._norm(f"{prefix}.attn_norm"),
            qkv=self._linear(f"{prefix}.attn_q", f"{prefix}.attn_k", f"{prefix}.attn_v"),
            attention=self._attention(index),
            output=self._linear(f"{prefix}.attn_output"),
            post_norm=self._norm_if_any(f"{prefix}.post_attention_norm"),
        )

    def _attention(self, index: int) -> Attention:
        config = self._config
        window, rope = self._window_and_rope(index)
        q_norm = self._norm_if_any(f"blk.{index}.attn_q_norm")
        k_norm = self._norm_if_any(f"blk.{index}.attn_k_norm")
        return Attention(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=rope,
            sliding_window=window,
            softcap=config.attention_softcap,
            q_norm=q_norm.weight if q_norm else None,
            k_norm=k_norm.weight if k_norm else None,
            norm_eps=config.norm_eps,
        )

    def _window_and_rope(self, index: int) -> tuple[int | None, Rope]:
        config = self._config
        if config.sliding_window is None:
            return None, self._rope
        if config.sliding_layers and not config.sliding_layers[index]:
            return None, self._rope
        return config.sliding_window, self._local_rope

    def _mlp_block(self, prefix: str) -> MLPBlock:
        return MLPBlock(
            norm=self._norm(f"{prefix}.ffn_norm"),
            gate_up=self._linear(f"{prefix}.ffn_gate", f"{prefix}.ffn_up"),
            activation=self._config.activation,
            down=self._linear(f"{prefix}.ffn_down"),
            post_norm=self._norm_if_any(f"{prefix}.post_ffw_norm"),
        )

    def _norm(self, name: str) -> RMSNorm:
        tensor = self._tensors[f"{name}.weight"]
        weight = self._backend.vector(tensor, offset=self._config.norm_offset)
        return RMSNorm(weight, self._config.norm_eps)

    def _norm_if_any(self, name: str) -> RMSNorm | None:
        return self._norm(name) if f"{name}.weight" in self._tensors else None

    def _linear(self, *names: str) -> Weight:
        """Pack the matrices as one, with their biases if they have any."""
        weights = [self._tensors[f"{name}.weight"] for name in names]
        if not any(f"{name}.bias" in self._tensors for name in names):
            return self._backend.linear_weight(weights)
        return self._backend.linear_weight(
            weights, [self._tensors[f"{name}.bias"] for name in names]
        )
