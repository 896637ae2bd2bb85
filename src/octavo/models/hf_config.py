"""Reads a decoder's configuration from the ``config.json`` of a Hugging Face style folder."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from octavo.models.config import Architecture, DecoderConfig
from octavo.models.config_values import MAX_LAYERS, ConfigValues, check_heads, head_dim_of
from octavo.models.hf_rope import context_length, read_gemma_ropes, read_rope
from octavo.models.tensor_layout import QKV

logger = logging.getLogger(__name__)

_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}
"""Model type of a text model -> architecture."""
_CLASSES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
}
"""Class that ``architectures`` may name -> model type."""

_QWEN_DEFAULTS: Final[Mapping[str, object]] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_DEFAULTS: Final[Mapping[str, Mapping[str, object]]] = {
    "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": {**_QWEN_DEFAULTS, "head_dim": 128},
    "gemma3_text": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}
"""What a key that is absent means: the published defaults of each model type, on which published
files rely (gemma3's name only what differs). A key that is null has no default."""

_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "compression_config": (),
    "quantization_config": (),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "use_bidirectional_attention": (False,),
}
"""Settings that change results in a way Octavo does not compute -> values that do not."""


@dataclass(frozen=True, slots=True)
class HFConfig:
    """What ``config.json`` says about a model."""

    decoder: DecoderConfig
    biased: frozenset[str]
    """Parts of a layer (``attn_q``) that have a bias."""
    multimodal: bool
    """Whether the decoder is the text part of a model with others."""
    end_token_ids: frozenset[int]


def read_hf_config(config: Mapping[str, object], where: str) -> HFConfig:
    """Return the configuration; ``where`` names the file in messages.

    Raises:
        LoadError: a setting is missing, out of range, contradictory or not supported; the message
            names its key.
    """
    outer = ConfigValues(config, where)
    model_type = _model_type(outer)
    multimodal = model_type == "gemma3"
    prefix = "text_config." if multimodal else ""
    own = _text_config(outer, config) if multimodal else config
    model_type = "gemma3_text" if multimodal else model_type
    values = ConfigValues({**_DEFAULTS[model_type], **own}, where, prefix)
    if outer.has("auto_map"):
        logger.warning("%s: ignoring auto_map: code of a model is never run", where)
    for key, harmless in _REFUSED.items():
        outer.refuse(key, *harmless)
        values.refuse(key, *harmless)
    tied = _tied(outer, values, default=model_type == "gemma3_text")
    decoder = _read_decoder(values, model_type, tied)
    ends = read_end_tokens(outer) | read_end_tokens(values)
    return HFConfig(decoder, _biased(values, model_type), multimodal, ends)


def read_end_tokens(values: ConfigValues) -> frozenset[int]:
    """Return the ids in ``eos_token_id``: one, a list, or null."""
    raw = values.raw("eos_token_id")
    ids = [] if raw is None else raw if isinstance(raw, list) else [raw]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        values.fail("eos_token_id", f"must be a token id or a list of them, not {raw!r:.100}")
    return frozenset(ids)


def _model_type(outer: ConfigValues) -> str:
    classes = outer.raw("architectures")
    named = None
    if isinstance(classes, list) and classes:
        named = _CLASSES.get(classes[0]) if isinstance(classes[0], str) else None
        if named is None:
            outer.fail("architectures", f"is {classes!r:.100}; supported are {', '.join(_CLASSES)}")
    if not outer.has("model_type") and named is not None:
        return named
    model_type = outer.text("model_type")
    supported = (*_ARCHITECTURES, "gemma3")
    if model_type not in supported:
        outer.fail("model_type", f"is {model_type!r:.100}; supported are {', '.join(supported)}")
    if named is not None and named != model_type:
        outer.fail("architectures", f"is {classes!r:.100}, which contradicts {model_type}")
    return model_type


def _text_config(outer: ConfigValues, config: Mapping[str, object]) -> Mapping[str, object]:
    outer.group("text_config").refuse("model_type", "gemma3_text")
    text_config = config.get("text_config")
    if not isinstance(text_config, dict):
        outer.fail("text_config", "is missing")
    return text_config


def _tied(outer: ConfigValues, values: ConfigValues, *, default: bool) -> bool:
    key = "tie_word_embeddings"
    answers = {group.flag(key, default) for group in (outer, values) if group.has(key)}
    if len(answers) > 1:
        values.fail(key, f"contradicts {key} outside")
    return answers.pop() if answers else default


def _biased(values: ConfigValues, model_type: str) -> frozenset[str]:
    """Return the parts with a bias; refuse one where the architecture has none."""
    attention = values.flag("attention_bias", False)
    mlp = values.flag("mlp_bias", False)
    if attention and model_type == "mistral":
        values.refuse("attention_bias", False)
    if mlp and model_type != "llama":
        values.refuse("mlp_bias", False)
    parts = set(QKV) if model_type == "qwen2" else set()
    if attention and model_type != "qwen2":
        parts |= {*QKV, "attn_output"}
    if mlp:
        parts |= {"ffn_gate", "ffn_up", "ffn_down"}
    return frozenset(parts)


def _read_decoder(values: ConfigValues, model_type: str, tied: bool) -> DecoderConfig:
    gemma = model_type == "gemma3_text"
    hidden = values.integer("hidden_size", high=1 << 20)
    layers = values.integer("num_hidden_layers", high=MAX_LAYERS)
    heads = values.integer("num_attention_heads", high=1 << 14)
    kv_heads = values.integer("num_key_value_heads", heads, high=1 << 14)
    check_heads(values, ("num_attention_heads", "num_key_value_heads"), heads, kv_heads)
    keys = ("head_dim", "hidden_size", "num_attention_heads")
    head_dim = head_dim_of(values, keys, hidden, heads)
    _check_activation(values, gemma)
    if gemma:
        rope, local_rope = read_gemma_ropes(values, head_dim)
        scale = values.number("query_pre_attn_scalar") ** -0.5
    else:
        rope, local_rope = read_rope(values, head_dim, default_theta=10_000.0), None
        scale = head_dim**-0.5
    max_position = context_length(values, rope)
    window, sliding_layers = _read_window(values, model_type, layers, max_position)
    return DecoderConfig(
        architecture=_ARCHITECTURES[model_type],
        vocab_size=values.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=values.integer("intermediate_size", high=1 << 22),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=values.number("rms_norm_eps"),
        rope=rope,
        attention_scale=scale,
        tied_embeddings=tied,
        activation="gelu_tanh" if gemma else "silu",
        local_rope=local_rope,
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_softcap=values.optional_number("attn_logit_softcapping") if gemma else None,
        logits_softcap=values.optional_number("final_logit_softcapping") if gemma else None,
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
        norm_offset=1.0 if gemma else 0.0,
    )


def _check_activation(values: ConfigValues, gemma: bool) -> None:
    if gemma:
        values.refuse("hidden_activation", "gelu_pytorch_tanh")
    else:
        values.refuse("hidden_act", "silu", "swish")


def _read_window(
    values: ConfigValues, model_type: str, layers: int, context: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window and which layers slide, as ``DecoderConfig`` has them."""
    if model_type == "llama":
        values.refuse("sliding_window")
        return None, ()
    window = values.integer("sliding_window") if values.has("sliding_window") else None
    if model_type in ("qwen2", "qwen3") and not values.flag("use_sliding_window", False):
        window = None
    sliding = _sliding_layers(values, model_type, layers, window)
    if not any(sliding):
        return None, ()
    if window is None:
        values.fail("sliding_window", "is missing, but layer_types has sliding layers")
    if model_type != "gemma3_text" and window >= context:
        return None, ()
    return window, () if all(sliding) else sliding


def _sliding_layers(
    values: ConfigValues, model_type: str, layers: int, window: int | None
) -> tuple[bool, ...]:
    """Return for each layer whether it slides."""
    kinds = values.raw("layer_types")
    if kinds is not None and model_type != "mistral":
        known = {"full_attention": False, "sliding_attention": True}
        if (
            not isinstance(kinds, list)
            or len(kinds) != layers
            or not all(isinstance(kind, str) and kind in known for kind in kinds)
        ):
            values.fail(
                "layer_types",
                f"must name full_attention or sliding_attention for each of {layers} layers",
            )
        return tuple(known[kind] for kind in kinds)
    if model_type == "gemma3_text":
        period = values.integer("sliding_window_pattern")
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    if window is None:
        return (False,) * layers
    first = 0 if model_type == "mistral" else values.integer("max_window_layers", low=0)
    return tuple(layer >= first for layer in range(layers))
