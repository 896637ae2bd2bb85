"""Reads a decoder's configuration from GGUF metadata."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Final, get_args

import numpy as np

from octavo.core.errors import LoadError
from octavo.models.config import Architecture, DecoderConfig, RopeConfig
from octavo.models.config_values import (
    MAX_LAYERS,
    ConfigValues,
    check_heads,
    head_dim_of,
    stretched_length,
)
from octavo.models.gguf import GGUFFile

logger = logging.getLogger(__name__)

GEMMA3_PERIOD: Final = 6
"""Every sixth layer of gemma3 sees everything; GGUF files do not say so."""
GEMMA3_27B_LAYERS: Final = 62
"""The one gemma3 whose attention scale is not ``head_dim ** -0.5``; GGUF files do not say so."""

END_TOKEN_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")

_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "embedding_scale": (0,),
    "expert_count": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}
"""Settings that change results in a way Octavo does not compute -> values that do not."""
_NO_EFFECT: Final = frozenset({"rope.scaling.finetuned", "expert_used_count"})


def read_gguf_config(file: GGUFFile) -> DecoderConfig:
    """Return the configuration of ``file``'s decoder.

    Raises:
        LoadError: a setting is missing, out of range or not supported; the message names its key.
    """
    general = ConfigValues(file.metadata, str(file.path))
    architecture = general.text("general.architecture")
    known: Sequence[Architecture] = get_args(Architecture)
    for name in known:
        if name == architecture:
            return _read_architecture(file, name)
    general.fail(
        "general.architecture", f"is {architecture!r:.100}; supported are {', '.join(known)}"
    )


def read_gguf_end_tokens(file: GGUFFile) -> frozenset[int]:
    """Return every end-of-turn id that the metadata names."""
    values = ConfigValues(file.metadata, str(file.path))
    keys = [f"tokenizer.ggml.{key}" for key in END_TOKEN_KEYS]
    return frozenset(values.integer(key, low=0, high=2**32 - 1) for key in keys if values.has(key))


def _read_architecture(file: GGUFFile, architecture: Architecture) -> DecoderConfig:
    values = _own_values(file, architecture)
    hidden = values.integer("embedding_length", high=1 << 20)
    layers = values.integer("block_count", high=MAX_LAYERS)
    heads = values.integer("attention.head_count", high=1 << 14)
    kv_heads = values.integer("attention.head_count_kv", heads, high=1 << 14)
    check_heads(values, ("attention.head_count", "attention.head_count_kv"), heads, kv_heads)
    head_keys = ("attention.key_length", "embedding_length", "attention.head_count")
    head_dim = head_dim_of(values, head_keys, hidden, heads)
    for key in ("value_length", "key_length_swa", "value_length_swa"):
        values.refuse(f"attention.{key}", head_dim)
    context = values.integer("context_length")
    rope = _read_rope(file, values, head_dim, context)
    window, sliding_layers = _read_window(values, architecture, layers, context)
    gemma = architecture == "gemma3"
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=_vocab_size(file, values),
        hidden_size=hidden,
        intermediate_size=values.integer("feed_forward_length", high=1 << 22),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=_max_position(values, rope, context),
        norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        attention_scale=_attention_scale(values, architecture, layers, hidden / heads, head_dim),
        tied_embeddings="output.weight" not in file.tensors,
        activation="gelu_tanh" if gemma else "silu",
        local_rope=RopeConfig(
            values.number("rope.freq_base_swa", 10_000.0, low=1.0), rope.rotary_dim
        )
        if gemma
        else None,
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_softcap=values.optional_number("attn_logit_softcapping"),
        logits_softcap=values.optional_number("final_logit_softcapping"),
        embedding_scale=math.sqrt(hidden) if gemma else 1.0,
    )
    if unread := sorted(values.unread() - _NO_EFFECT):
        # Names come from the file: escaped and cut, they cannot garble a terminal.
        names = ", ".join(name.encode("unicode_escape").decode()[:64] for name in unread)
        logger.warning("%s: settings that have no effect: %s", file.path, names)
    return config


def _own_values(file: GGUFFile, architecture: str) -> ConfigValues:
    """Return the architecture's settings; refuse those that would change results unseen."""
    prefix = f"{architecture}."
    own = {
        key.removeprefix(prefix): _uniform(value)
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    values = ConfigValues(own, str(file.path), prefix)
    for key, harmless in _REFUSED.items():
        values.refuse(key, *harmless)
    return values


def _uniform(value: object) -> object:
    """Return the one value of an array that gives every layer the same, else the value itself."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value


def _vocab_size(file: GGUFFile, values: ConfigValues) -> int:
    """Return the rows of the embedding table, which decide."""
    if "token_embd.weight" not in file.tensors:
        raise LoadError(f"{file.path}: the tensor token_embd.weight is missing.")
    rows = file.tensors["token_embd.weight"].shape[0]
    if values.has("vocab_size") and values.integer("vocab_size") != rows:
        values.fail("vocab_size", f"is {values.raw('vocab_size')}, but token_embd has {rows} rows")
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > rows:
        raise LoadError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} tokens, but token_embd has only "
            f"{rows} rows."
        )
    return rows


def _read_rope(file: GGUFFile, values: ConfigValues, head_dim: int, context: int) -> RopeConfig:
    rotary_dim = values.integer("rope.dimension_count", head_dim, low=2, high=head_dim)
    if rotary_dim % 2:
        values.fail("rope.dimension_count", f"must be even, not {rotary_dim}")
    values.refuse("rope.dimension_count_swa", rotary_dim)
    theta = values.number("rope.freq_base", 10_000.0, low=1.0)
    factors = _frequency_factors(file, rotary_dim)
    kind = values.text("rope.scaling.type", "linear")  # as llama.cpp has it
    factor = values.number("rope.scaling.factor", values.optional_number("rope.scale_linear") or 1)
    if kind != "yarn":
        values.refuse("rope.scaling.attn_factor", 1)
        values.refuse("rope.scaling.yarn_attn_factor", 1)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return RopeConfig(theta, rotary_dim, frequency_factors=factors)
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, "linear", factor, frequency_factors=factors)
    if kind != "yarn":
        values.fail("rope.scaling.type", f"is {kind!r:.100}; supported are none, linear and yarn")
    if not values.has("rope.scaling.factor"):
        values.fail("rope.scaling.factor", "is missing")
    fast = values.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = values.number("rope.scaling.yarn_beta_slow", 1.0)
    if not slow < fast:
        values.fail(
            "rope.scaling.yarn_beta_fast", f"({fast:g}) must be above {slow:g}, the slow one"
        )
    attention = values.number("rope.scaling.attn_factor", 1.0)
    attention *= values.number("rope.scaling.yarn_attn_factor", 1.0)
    return RopeConfig(
        theta,
        rotary_dim,
        "yarn",
        factor,
        original_max_position=values.integer("rope.scaling.original_context_length", context),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=attention * (0.1 * math.log(max(factor, 1.0)) + 1.0),
        frequency_factors=factors,
    )


def _frequency_factors(file: GGUFFile, rotary_dim: int) -> tuple[float, ...] | None:
    """Return the divisors by which llama.cpp's converter stores the llama3 scaling."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    if tensor.encoding.label != "F32" or tensor.shape != (rotary_dim // 2,):
        raise LoadError(
            f"{file.path}: the tensor rope_freqs.weight must hold {rotary_dim // 2} values of type "
            f"F32, not {tensor.shape} of type {tensor.encoding.label}."
        )
    factors = tensor.data.reshape(-1).view("<f4")
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise LoadError(
            f"{file.path}: the tensor rope_freqs.weight has values that are not above 0."
        )
    return tuple(factors.tolist())


def _max_position(values: ConfigValues, rope: RopeConfig, context: int) -> int:
    if rope.scaling == "yarn" and values.has("rope.scaling.original_context_length"):
        key = "rope.scaling.factor"
        return stretched_length(values, key, rope.original_max_position, rope.factor)
    return context


def _attention_scale(
    values: ConfigValues, architecture: str, layers: int, query_width: float, head_dim: int
) -> float:
    if values.number("attention.scale", 0.0, low=-1.0) > 0.0:
        return values.number("attention.scale")
    if architecture == "gemma3" and layers == GEMMA3_27B_LAYERS:
        return float(query_width**-0.5)
    return float(head_dim**-0.5)


def _read_window(
    values: ConfigValues, architecture: str, layers: int, context: int
) -> tuple[int | None, tuple[bool, ...]]:
    """Return the window and which layers slide, as ``DecoderConfig`` has them."""
    window = values.integer("attention.sliding_window", 0, low=0)
    if window == 0 or (architecture != "gemma3" and window >= context):
        return None, ()
    pattern = values.raw("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.dtype != np.bool_ or len(pattern) != layers:
            values.fail(
                "attention.sliding_window_pattern",
                f"must be a period, or true or false for each of the {layers} layers",
            )
        return window, tuple(pattern.tolist())
    if isinstance(pattern, bool):  # an array that gives every layer the same
        return (window, ()) if pattern else (None, ())
    if architecture == "gemma3" or pattern is not None:
        period = values.integer("attention.sliding_window_pattern", GEMMA3_PERIOD)
        return window, tuple((layer + 1) % period != 0 for layer in range(layers))
    if architecture == "llama":  # Mistral: all layers
        return window, ()
    values.fail(
        "attention.sliding_window",
        f"is {window}, but attention.sliding_window_pattern does not say which layers slide",
    )
