"""The decoder of llama (and Mistral), qwen2, qwen3 and gemma3, written once against ``Ops``.

The families differ in data: which biases and norms their layers have (``_TRAITS``) and what
``DecoderConfig`` says of activations, windows, rotary embeddings, scales and caps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from octavo.core.errors import LoadError
from octavo.kernels.ops import Array, Attention, Backend, KVSpec, Ops, Rope, Weight
from octavo.kernels.weights import WeightTensor
from octavo.models.config import Architecture, DecoderConfig
from octavo.models.decoder_weights import WeightShelf
from octavo.models.layers import AttentionBlock, DecoderLayer, MLPBlock, RMSNorm
from octavo.models.rope import build_rope


@dataclass(frozen=True, slots=True)
class _Traits:
    """What layers of an architecture must have. Other biases are optional everywhere."""

    qkv_bias: bool = False
    qk_norm: bool = False
    """Norms over each query and key head."""
    post_norms: bool = False
    """Norms of the blocks' results before they are added."""


_TRAITS: Mapping[Architecture, _Traits] = {
    "llama": _Traits(),
    "qwen2": _Traits(qkv_bias=True),
    "qwen3": _Traits(qk_norm=True),
    "gemma3": _Traits(qk_norm=True, post_norms=True),
}


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
        x = ops.embed(self.embedding, scale=self.config.embedding_scale)
        for layer in self.layers:
            x = layer.apply(ops, x)
        x = self.norm.apply(ops, ops.logits_rows(x))
        return ops.logits(x, self.head, softcap=self.config.logits_softcap)

    def kv_spec(self, block_size: int, dtype: Literal["float32", "bfloat16"]) -> KVSpec:
        """Return the shape of the KV that this decoder stores."""
        return kv_spec(self.config, block_size, dtype)


def kv_spec(
    config: DecoderConfig, block_size: int, dtype: Literal["float32", "bfloat16"]
) -> KVSpec:
    """Return the shape of a decoder's KV, known before its weights are read."""
    return KVSpec(config.num_layers, config.num_kv_heads, config.head_dim, block_size, dtype)


def build_decoder(
    config: DecoderConfig, tensors: Mapping[str, WeightTensor], backend: Backend
) -> Decoder:
    """Pack the tensors with ``backend`` and put the decoder together.

    Raises ``LoadError`` if a tensor is missing, of a wrong shape, or of no use.
    """
    _check_heads(config)
    builder = _Builder(config, WeightShelf(tensors), backend)
    decoder = builder.decoder()
    builder.shelf.check_all_taken()
    return decoder


def _check_heads(config: DecoderConfig) -> None:
    if config.num_heads % config.num_kv_heads != 0:
        raise LoadError(
            f"The number of attention heads ({config.num_heads}) must be a multiple of the number "
            f"of KV heads ({config.num_kv_heads})."
        )
    if len(config.sliding_layers) not in (0, config.num_layers):
        raise LoadError(
            f"The model has {config.num_layers} layers, but says of {len(config.sliding_layers)} "
            f"whether they slide."
        )


class _Builder:
    """Takes tensors off the shelf and packs them, layer by layer."""

    def __init__(self, config: DecoderConfig, shelf: WeightShelf, backend: Backend) -> None:
        self.shelf = shelf
        self._config = config
        self._backend = backend
        self._traits = _TRAITS[config.architecture]
        self._rope = build_rope(config.rope)
        self._local_rope = build_rope(config.local_rope) if config.local_rope else self._rope

    def decoder(self) -> Decoder:
        config = self._config
        embedding = self._backend.embedding(
            self.shelf.take("token_embd.weight", config.vocab_size, config.hidden_size)
        )
        layers = tuple(self._layer(index) for index in range(config.num_layers))
        head = embedding
        if not config.tied_embeddings:
            head = self._linear("output", config.hidden_size, [("", config.vocab_size)])
        norm = self._norm("output_norm", config.hidden_size)
        return Decoder(config, embedding, layers, norm, head)

    def _layer(self, index: int) -> DecoderLayer:
        return DecoderLayer(self._attention_block(index), self._mlp_block(index))

    def _attention_block(self, index: int) -> AttentionBlock:
        config, prefix = self._config, f"blk.{index}"
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return AttentionBlock(
            norm=self._norm(f"{prefix}.attn_norm", config.hidden_size),
            qkv=self._linear(
                f"{prefix}.attn",
                config.hidden_size,
                [("_q", q_rows), ("_k", kv_rows), ("_v", kv_rows)],
                bias=self._traits.qkv_bias,
            ),
            attention=self._attention(index),
            output=self._linear(f"{prefix}.attn_output", q_rows, [("", config.hidden_size)]),
            post_norm=self._post_norm(f"{prefix}.post_attention_norm"),
        )

    def _attention(self, index: int) -> Attention:
        config, window, rope = self._config, *self._window_and_rope(index)
        q_norm = k_norm = None
        if self._traits.qk_norm:
            q_norm = self._norm(f"blk.{index}.attn_q_norm", config.head_dim).weight
            k_norm = self._norm(f"blk.{index}.attn_k_norm", config.head_dim).weight
        return Attention(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            rope=rope,
            sliding_window=window,
            softcap=config.attention_softcap,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_eps=config.norm_eps,
        )

    def _window_and_rope(self, index: int) -> tuple[int | None, Rope]:
        config = self._config
        if config.sliding_window is None:
            return None, self._rope
        if config.sliding_layers and not config.sliding_layers[index]:
            return None, self._rope
        return config.sliding_window, self._local_rope

    def _mlp_block(self, index: int) -> MLPBlock:
        config, prefix = self._config, f"blk.{index}"
        wide = config.intermediate_size
        return MLPBlock(
            norm=self._norm(f"{prefix}.ffn_norm", config.hidden_size),
            gate_up=self._linear(
                f"{prefix}.ffn", config.hidden_size, [("_gate", wide), ("_up", wide)]
            ),
            activation=config.activation,
            down=self._linear(f"{prefix}.ffn_down", wide, [("", config.hidden_size)]),
            post_norm=self._post_norm(f"{prefix}.post_ffw_norm"),
        )

    def _post_norm(self, name: str) -> RMSNorm | None:
        return self._norm(name, self._config.hidden_size) if self._traits.post_norms else None

    def _norm(self, name: str, size: int) -> RMSNorm:
        tensor = self.shelf.take(f"{name}.weight", size)
        weight = self._backend.vector(tensor, offset=self._config.norm_offset)
        return RMSNorm(weight, self._config.norm_eps)

    def _linear(
        self, stem: str, inputs: int, parts: list[tuple[str, int]], *, bias: bool = False
    ) -> Weight:
        """Pack the parts ``(suffix, outputs)`` of one matrix, with biases if needed or present."""
        names = [(f"{stem}{suffix}", outputs) for suffix, outputs in parts]
        weights = [self.shelf.take(f"{name}.weight", outputs, inputs) for name, outputs in names]
        if not bias and not any(f"{name}.bias" in self.shelf for name, _ in names):
            return self._backend.linear_weight(weights)
        biases = [self.shelf.take(f"{name}.bias", outputs) for name, outputs in names]
        return self._backend.linear_weight(weights, biases)
