"""Rotary frequencies against the Hugging Face implementation."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.models.config import RopeConfig
from octavo.models.rope import build_rope

PLAIN = RopeConfig(10_000.0, 64)
LLAMA3 = RopeConfig(
    500_000.0,
    64,
    "llama3",
    8.0,
    original_max_position=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = RopeConfig(1_000_000.0, 128, "yarn", 4.0, original_max_position=32768)

CASES: dict[str, tuple[RopeConfig, dict[str, object]]] = {
    "linear": (replace(PLAIN, scaling="linear", factor=4.0), {"factor": 4.0}),
    "linear partial": (
        RopeConfig(10_000.0, 32, "linear", 2.5),
        {"factor": 2.5, "partial_rotary_factor": 0.5},
    ),
    "llama3": (
        LLAMA3,
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    ),
    "llama3 other bounds": (
        replace(LLAMA3, factor=32.0, low_freq_factor=2.0, high_freq_factor=16.0),
        {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 16.0},
    ),
    "yarn": (YARN, {"factor": 4.0}),
    "yarn betas": (
        replace(YARN, factor=16.0, beta_fast=64.0, beta_slow=2.0),
        {"factor": 16.0, "beta_fast": 64.0, "beta_slow": 2.0},
    ),
    "yarn attention factor": (
        replace(YARN, attention_factor=1.25),
        {"factor": 4.0, "attention_factor": 1.25},
    ),
    "yarn mscale": (
        replace(YARN, factor=40.0, mscale=0.707, mscale_all_dim=1.2),
        {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2},
    ),
    "yarn tiny context": (
        replace(YARN, rotary_dim=12, theta=10_000.0, original_max_position=32),
        {"factor": 4.0},
    ),
}


@pytest.mark.reference
@pytest.mark.parametrize("case", CASES)
def test_tables_equal_the_reference(case: str) -> None:
    """LO-04, LO-12: cos and sin of each scaling, inside and far beyond the original context."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config, parameters = CASES[case]
    share = float(parameters.get("partial_rotary_factor", 1.0))  # type: ignore[arg-type]
    rope_parameters = {"rope_type": config.scaling, "rope_theta": config.theta} | parameters
    if config.original_max_position:
        rope_parameters["original_max_position_embeddings"] = config.original_max_position
    reference = LlamaConfig(
        head_dim=int(config.rotary_dim / share),
        max_position_embeddings=int(max(config.original_max_position, 4096) * config.factor),
        rope_parameters=rope_parameters,
    )
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[config.scaling](reference, "cpu")
    rope = build_rope(config)
    assert rope.magnitude == pytest.approx(magnitude, rel=1e-6)
    np.testing.assert_allclose(rope.inv_freq, inv_freq.numpy(), rtol=3e-6)
    original = config.original_max_position or 4096
    positions = np.array([0, 1, original - 1, original + 5, int(original * config.factor) - 1])
    angles = positions[:, None].astype(np.float64)
    for turn in (np.cos, np.sin):
        ours = turn(angles * rope.inv_freq) * rope.magnitude
        theirs = turn(angles * inv_freq.numpy().astype(np.float64)) * magnitude
        # A float32 frequency is only known to a part in 10^7, which a position multiplies.
        np.testing.assert_allclose(ours, theirs, atol=1e-5 + 3e-7 * positions.max())


def test_plain_frequencies() -> None:
    """Without scaling: the definition of RoFormer (arXiv 2104.09864), for any rotary size."""
    for theta, dim in ((10_000.0, 64), (100_000.0, 12), (1e6, 2)):
        rope = build_rope(RopeConfig(theta, dim))
        wanted = [theta ** (-2 * i / dim) for i in range(dim // 2)]
        np.testing.assert_allclose(rope.inv_freq, wanted, rtol=1e-6)
        assert rope.inv_freq.dtype == np.float32
        assert rope.magnitude == 1.0


def test_frequency_factors_of_a_file_equal_the_scaling_they_came_from() -> None:
    """A GGUF stores llama3 scaling as divisors: both give the same frequencies."""
    scaled = build_rope(LLAMA3).inv_freq
    divisors = build_rope(replace(LLAMA3, scaling="none")).inv_freq / scaled
    from_file = RopeConfig(500_000.0, 64, frequency_factors=tuple(divisors.tolist()))
    np.testing.assert_allclose(build_rope(from_file).inv_freq, scaled, rtol=1e-6)


def test_frequency_factors_add_to_a_scaling() -> None:
    """Divisors apply to frequencies that are scaled already, none of the two is dropped."""
    config = RopeConfig(10_000.0, 4, "linear", 2.0, frequency_factors=(1.0, 5.0))
    np.testing.assert_allclose(build_rope(config).inv_freq, [0.5, 0.01 / 10], rtol=1e-6)
