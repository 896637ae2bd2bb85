"""Maps tensor names of a Hugging Face style folder to canonical ones."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from octavo.core.errors import LoadError
from octavo.models.tensor_layout import listing

_NAMES: Final[Mapping[str, str]] = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMS: Final[Mapping[str, str]] = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS: Final[Mapping[str, str]] = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP: Final[Mapping[str, str]] = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER: Final = re.compile(r"model\.layers\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
_OTHER: Final = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\..+")
"""Tensors of a multimodal model that are not the decoder's."""
_NO_WEIGHT: Final = re.compile(r"(.+\.)?rotary_emb\.inv_freq")
"""Tables that old folders store although the configuration implies them."""
_MULTIMODAL_PREFIXES: Final[Mapping[str, str]] = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}


def map_names(names: Iterable[str], *, gemma: bool, multimodal: bool, where: str) -> dict[str, str]:
    """Return canonical name -> name in the folder, for every tensor of the decoder.

    Raises:
        LoadError: a tensor is no known part of such a decoder, or one occurs under two names.
    """
    mapped: dict[str, str] = {}
    unknown = []
    for name in names:
        if _NO_WEIGHT.fullmatch(name) or (multimodal and _OTHER.fullmatch(name)):
            continue
        canonical = _canonical(_text_name(name) if multimodal else name, gemma=gemma)
        if canonical is None:
            unknown.append(name)
        elif canonical in mapped:
            raise LoadError(f"{where}: {mapped[canonical]} and {name} are the same tensor.")
        else:
            mapped[canonical] = name
    if unknown:
        raise LoadError(f"{where}: the architecture has no {listing(unknown, 'tensor')}.")
    return mapped


def _text_name(name: str) -> str:
    for prefix, replacement in _MULTIMODAL_PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _canonical(name: str, *, gemma: bool) -> str | None:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    part = (_GEMMA_NORMS if gemma else _NORMS).get(match[2], _NAMES.get(match[2]))
    return None if part is None else f"blk.{match[1]}.{part}.{match[3]}"
