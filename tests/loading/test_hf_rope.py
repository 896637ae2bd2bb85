"""Rope settings of config.json: spellings that mean the same, and those that are refused."""

import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import LoadError
from octavo.models.config import DecoderConfig, RopeConfig
from octavo.models.hf_config import read_hf_config
from octavo.models.rope import build_rope
from support_loading import hf_config

YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "yarn": YARN,
    "llama3": LLAMA3,
}


def read(architecture: str = "llama", **overrides: object) -> DecoderConfig:
    """Read a tiny model's config.json."""
    return read_hf_config(hf_config(architecture, overrides), "config.json").decoder


def refused(architecture: str = "llama", **overrides: object) -> str:
    """Check that a config.json is refused, and return the sentence."""
    with pytest.raises(LoadError) as caught:
        read(architecture, **overrides)
    return caught.value.message


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_spellings_agree(architecture: str, kind: str) -> None:
    """LO-04: type, rope_type, both, and the newer rope_parameters give the same frequencies and
    the same context length."""
    values = SCALINGS[kind]
    spellings: list[dict[str, object]] = [
        {"rope_scaling": values | {"type": kind}},
        {"rope_scaling": values | {"rope_type": kind}},
        {"rope_scaling": values | {"rope_type": kind, "type": kind}},
        {
            "rope_parameters": values | {"rope_type": kind, "rope_theta": 10000.0},
            "rope_theta": ...,
        },
        {"rope_parameters": values | {"rope_type": kind}},
        {
            "rope_parameters": values | {"rope_type": kind, "rope_theta": 10000.0},
            "rope_scaling": values | {"type": kind},
        },
    ]
    configs = [read(architecture, **spelling) for spelling in spellings]
    assert configs[0].rope.scaling == kind
    assert all(config == configs[0] for config in configs)
    assert configs[0].rope != read(architecture).rope


@pytest.mark.parametrize("scaling", [None, ..., {}, {"rope_type": "default"}, {"type": "default"}])
def test_no_scaling(scaling: object) -> None:
    """LO-04: null, absent, empty and default mean none."""
    assert read(rope_scaling=scaling).rope == RopeConfig(10000.0, 16)


def test_context_length() -> None:
    """LO-04: yarn's context is the original times the factor, even where
    max_position_embeddings was left at the original: red if users are cut off early."""
    yarn = YARN | {"type": "yarn"}
    assert read(rope_scaling=yarn, max_position_embeddings=128).max_position == 512
    assert read(rope_scaling=yarn, max_position_embeddings=512).max_position == 512
    alone = read(rope_scaling={"type": "yarn", "factor": 4.0}, max_position_embeddings=128)
    assert (alone.max_position, alone.rope.original_max_position) == (128, 128)
    outside = read(
        rope_scaling={"type": "yarn", "factor": 4.0},
        original_max_position_embeddings=64,
        max_position_embeddings=128,
    )
    assert (outside.max_position, outside.rope.original_max_position) == (256, 64)
    llama3 = read(rope_scaling=LLAMA3 | {"type": "llama3"}, max_position_embeddings=999)
    assert (llama3.max_position, llama3.rope.original_max_position) == (999, 128)
    linear = read(rope_scaling={"type": "linear", "factor": 4.0}, max_position_embeddings=512)
    assert linear.max_position == 512


BAD_SCALINGS: list[tuple[str, object]] = [
    ("rope_type", YARN | {"rope_type": "yarn", "type": "linear"}),
    ("rope_type", YARN),
    ("rope_type", {"rope_type": "foo", "factor": 2.0}),
    ("type", {"type": "foo", "factor": 2.0}),
    ("rope_type", {"rope_type": "dynamic", "factor": 2.0}),
    ("type", {"type": "su", "factor": 2.0}),
    ("long_factor", {"type": "longrope", "factor": 2.0, "short_factor": [], "long_factor": []}),
    ("mrope_section", {"type": "mrope", "mrope_section": [2, 3, 3]}),
    ("mrope_section", {"type": "default", "mrope_section": [2, 3, 3]}),
    ("rope_type", {"rope_type": "mrope"}),
    ("rope_type", {"rope_type": "longrope", "factor": 2.0}),
    ("rope_type", {"rope_type": 7, "factor": 2.0}),
    ("rope_type", {"rope_type": "YARN", "factor": 2.0}),
    ("factor", {"rope_type": "linear"}),
    ("factor", {"rope_type": "linear", "factor": 0}),
    ("factor", {"rope_type": "linear", "factor": "2"}),
    ("factor", {"rope_type": "yarn", "original_max_position_embeddings": 128}),
    ("low_freq_factor", YARN | {"rope_type": "llama3", "high_freq_factor": 4.0}),
    ("high_freq_factor", LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}),
    ("beta_fast", YARN | {"rope_type": "yarn", "beta_fast": 1, "beta_slow": 32}),
    ("factor", YARN | {"rope_type": "yarn", "factor": 1e-9}),
    ("factor", YARN | {"rope_type": "yarn", "factor": 1e300}),
    ("truncate", YARN | {"rope_type": "yarn", "truncate": False}),
    ("partial_rotary_factor", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    (
        "original_max_position_embeddings",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": -1},
    ),
    ("rope_scaling", [2.0]),
    ("rope_scaling", "yarn"),
]


@pytest.mark.parametrize(("key", "scaling"), BAD_SCALINGS)
@pytest.mark.parametrize("group", ["rope_scaling", "rope_parameters"])
def test_scalings_refused_by_key(key: str, scaling: object, group: str) -> None:
    """LO-04, LO-12: an unknown, incomplete or contradictory scaling is an error that names the
    key; it is never taken for none."""
    wanted = group if key == "rope_scaling" else key
    assert wanted in refused(**{group: scaling})


def test_the_two_places_contradict() -> None:
    """LO-04: rope_parameters, rope_scaling and rope_theta must agree where they meet."""
    yarn = YARN | {"rope_type": "yarn"}
    linear = {"rope_type": "linear", "factor": 2.0}
    assert "rope_scaling" in refused(rope_parameters=yarn, rope_scaling=linear)
    assert "rope_theta" in refused(rope_parameters=yarn | {"rope_theta": 5e5})
    other = YARN | {"type": "yarn", "original_max_position_embeddings": 64}
    message = refused(rope_parameters=yarn, rope_scaling=other)
    assert "original_max_position_embeddings" in message


def test_gemma3_per_kind_of_layer() -> None:
    """LO-04: gemma3's newer nested parameters equal its older flat ones, and the sliding layers
    are never scaled by the global scaling."""
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read("gemma3", rope_scaling=linear)
    nested = {
        "full_attention": linear | {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = read("gemma3", rope_parameters=nested, rope_theta=..., rope_local_base_freq=...)
    assert new == old
    assert old.local_rope == RopeConfig(1e4, 16)
    both = read("gemma3", rope_parameters=nested, rope_scaling=linear)
    assert both == old
    other = linear | {"factor": 2.0}
    assert "rope_scaling" in refused("gemma3", rope_parameters=nested, rope_scaling=other)
    assert "full_attention" in refused("gemma3", rope_parameters=linear)
    del nested["sliding_attention"]
    assert "sliding_attention" in refused("gemma3", rope_parameters=nested)
    bad = {"full_attention": {"rope_type": "foo"}, "sliding_attention": {}}
    assert "rope_parameters.full_attention.rope_type" in refused("gemma3", rope_parameters=bad)


@pytest.mark.reference
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", **LLAMA3},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
        {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2},
        {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
        {"rope_type": "yarn", "factor": 2.0},
    ],
)
def test_frequencies_equal_the_reference(architecture: str, scaling: dict[str, Any] | None) -> None:
    """LO-04, LO-12: the frequencies and the factor on cos and sin are those of Hugging Face for
    the same config.json (whose gemma3 ignores the older key ``type``, hence ``rope_type`` here)."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = deepcopy(hf_config(architecture, {"rope_scaling": scaling, "head_dim": 64}))
    ours = read_hf_config(raw, "config.json").decoder
    model_type = raw.pop("model_type")
    config = AutoConfig.for_model(model_type, **raw)
    layer_type = "full_attention" if architecture == "gemma3" else None
    parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
    rope = build_rope(ours.rope)
    if parameters["rope_type"] == "default":
        assert ours.rope == RopeConfig(parameters["rope_theta"], 64)
        return
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, layer_type=layer_type)
    np.testing.assert_allclose(rope.inv_freq, wanted.numpy(), rtol=2e-6)
    assert math.isclose(rope.magnitude, factor, rel_tol=1e-9)
