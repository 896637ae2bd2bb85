"""Reads rotary embedding settings of ``config.json``, in the older and newer spellings.

Older: ``rope_theta`` beside ``rope_scaling`` with a ``type`` or ``rope_type``. Newer: all of it in
``rope_parameters``, per kind of layer where a model has two kinds.
"""

import logging
from collections.abc import Mapping
from typing import Final

from octavo.models.config import RopeConfig
from octavo.models.config_values import ConfigValues, stretched_length

logger = logging.getLogger(__name__)

SUPPORTED: Final = ("default", "linear", "llama3", "yarn")
_REFUSED: Final[Mapping[str, tuple[object, ...]]] = {
    "alpha": (),
    "long_factor": (),
    "long_mscale": (),
    "mrope_interleaved": (False,),
    "mrope_section": (),
    "partial_rotary_factor": (1,),
    "short_factor": (),
    "short_mscale": (),
    "truncate": (True,),
}
"""Settings that change the embedding in a way Octavo does not compute -> values that do not."""
_SCALING_KEYS: Final = ("factor", "original_max_position_embeddings", "low_freq_factor")
_NO_EFFECT: Final = frozenset({"finetuned"})


def read_rope(
    values: ConfigValues, head_dim: int, *, theta_key: str = "rope_theta", default_theta: float
) -> RopeConfig:
    """Return the embedding of a model that has one for all layers.

    Raises:
        LoadError: a setting is missing, unknown, or contradicts another; the message names its key.
    """
    values.refuse("partial_rotary_factor", 1)
    theta = values.number(theta_key, low=1.0) if values.has(theta_key) else None
    groups = [values.group(key) for key in ("rope_parameters", "rope_scaling") if values.has(key)]
    ropes = [_read_group(values, group, head_dim, theta, default_theta) for group in groups]
    if len(ropes) == 2 and ropes[0] != ropes[1]:
        values.fail("rope_scaling", "contradicts rope_parameters; one of them must go")
    return ropes[0] if ropes else RopeConfig(theta or default_theta, head_dim)


def read_gemma_ropes(values: ConfigValues, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the embeddings of gemma3's global layers and of its sliding ones."""
    values.refuse("partial_rotary_factor", 1)
    if not values.has("rope_parameters"):
        full = read_rope(values, head_dim, default_theta=1_000_000.0)
        return full, RopeConfig(values.number("rope_local_base_freq", 10_000.0, low=1.0), head_dim)
    nested = values.group("rope_parameters")
    ropes = []
    for kind, key, default in (
        ("full_attention", "rope_theta", 1_000_000.0),
        ("sliding_attention", "rope_local_base_freq", 10_000.0),
    ):
        if not nested.has(kind):
            nested.fail(kind, "is missing")
        theta = values.number(key, low=1.0) if values.has(key) else None
        ropes.append(_read_group(values, nested.group(kind), head_dim, theta, default))
    if values.has("rope_scaling"):
        scaling = values.group("rope_scaling")
        if _read_group(values, scaling, head_dim, ropes[0].theta, 1_000_000.0) != ropes[0]:
            values.fail("rope_scaling", "contradicts rope_parameters; one of them must go")
    return ropes[0], ropes[1]


def context_length(values: ConfigValues, rope: RopeConfig) -> int:
    """Return the model's context length, scaling included.

    With yarn it is the original length times the factor, as vLLM has it: many models leave
    ``max_position_embeddings`` at the original length. Elsewhere that setting counts as it is.
    """
    if rope.scaling == "yarn" and _original_length(values) is not None:
        return stretched_length(values, "factor", rope.original_max_position, rope.factor)
    return values.integer("max_position_embeddings")


def _original_length(values: ConfigValues) -> int | None:
    """Return the original context length that the model names, None if it names none."""
    key = "original_max_position_embeddings"
    holders = [values, *(values.group(group) for group in ("rope_parameters", "rope_scaling"))]
    holders += [holder.group("full_attention") for holder in holders[1:2]]
    lengths = {holder.integer(key) for holder in holders if holder.has(key)}
    if len(lengths) > 1:
        values.fail(key, f"has contradicting values {sorted(lengths)}")
    return lengths.pop() if lengths else None


def _read_group(
    values: ConfigValues,
    group: ConfigValues,
    head_dim: int,
    outer_theta: float | None,
    default_theta: float,
) -> RopeConfig:
    """Return the embedding that one group of settings describes."""
    for key, harmless in _REFUSED.items():
        group.refuse(key, *harmless)
    theta = group.number("rope_theta", outer_theta or default_theta, low=1.0)
    if outer_theta is not None and theta != outer_theta:
        group.fail("rope_theta", f"is {theta:g}, which contradicts {outer_theta:g} outside")
    kind = _kind(group)
    if kind == "default":
        rope = RopeConfig(theta, head_dim)
    elif kind == "linear":
        rope = RopeConfig(theta, head_dim, "linear", group.number("factor"))
    else:
        length = _original_length(values) or values.integer("max_position_embeddings")
        group.raw("original_max_position_embeddings")
        rope = (_llama3 if kind == "llama3" else _yarn)(group, theta, head_dim, length)
    if unread := sorted(group.unread() - _NO_EFFECT):
        logger.warning("rope settings that have no effect: %s", ", ".join(unread))
    return rope


def _kind(group: ConfigValues) -> str:
    kinds = [group.text(key) for key in ("rope_type", "type") if group.has(key)]
    if not kinds:
        if given := [key for key in _SCALING_KEYS if group.has(key)]:
            group.fail("rope_type", f"is missing, but there is {given[0]}")
        return "default"
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        group.fail("rope_type", f"is {kinds[0]!r:.50}, which contradicts type {kinds[1]!r:.50}")
    if kinds[0] not in SUPPORTED:
        key = "rope_type" if group.has("rope_type") else "type"
        group.fail(key, f"is {kinds[0]!r:.50}; supported are {', '.join(SUPPORTED)}")
    return kinds[0]


def _llama3(group: ConfigValues, theta: float, head_dim: int, length: int) -> RopeConfig:
    low, high = group.number("low_freq_factor"), group.number("high_freq_factor")
    if not low < high:
        group.fail("high_freq_factor", f"({high:g}) must be above low_freq_factor ({low:g})")
    return RopeConfig(
        theta,
        head_dim,
        "llama3",
        group.number("factor"),
        original_max_position=length,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(group: ConfigValues, theta: float, head_dim: int, length: int) -> RopeConfig:
    fast, slow = group.number("beta_fast", 32.0), group.number("beta_slow", 1.0)
    if not slow < fast:
        group.fail("beta_fast", f"({fast:g}) must be above beta_slow ({slow:g})")
    return RopeConfig(
        theta,
        head_dim,
        "yarn",
        group.number("factor"),
        original_max_position=length,
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=group.optional_number("attention_factor"),
        mscale=group.optional_number("mscale"),
        mscale_all_dim=group.optional_number("mscale_all_dim"),
    )
