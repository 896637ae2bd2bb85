"""Rotary frequencies of a configuration, scalings applied."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.ops import Rope
from octavo.models.config import RopeConfig

Float32 = NDArray[np.float32]


def build_rope(config: RopeConfig) -> Rope:
    """Return the frequencies, computed in float32 as in the tables models are trained with."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    inv_freq: Any = np.float32(1) / np.power(np.float32(config.theta), exponents)
    magnitude = 1.0
    if config.scaling == "linear":
        inv_freq = inv_freq / np.float32(config.factor)
    elif config.scaling == "llama3":
        inv_freq = _llama3(inv_freq, config)
    elif config.scaling == "yarn":
        inv_freq = _yarn(inv_freq, config)
        magnitude = _yarn_magnitude(config)
    if config.frequency_factors is not None:
        inv_freq = inv_freq / np.array(config.frequency_factors, np.float32)
    return Rope(inv_freq.astype(np.float32), magnitude)


def _llama3(inv_freq: Float32, config: RopeConfig) -> Any:
    """Divide low frequencies by ``factor``, keep high ones, blend between (Llama 3.1)."""
    turns = config.original_max_position * inv_freq / np.float32(2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    kept = np.clip((turns - config.low_freq_factor) / span, 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / config.factor)


def _yarn(inv_freq: Float32, config: RopeConfig) -> Any:
    """Divide by ``factor`` what turns less than ``beta_slow`` times in the original context, keep
    what turns more than ``beta_fast`` times, blend between (YaRN, arXiv 2309.00071)."""
    low = max(math.floor(_yarn_pair(config.beta_fast, config)), 0)
    high = min(math.ceil(_yarn_pair(config.beta_slow, config)), config.rotary_dim - 1)
    width = high - low if high != low else 0.001
    pairs = np.arange(len(inv_freq), dtype=np.float32)
    divided = np.clip((pairs - low) / np.float32(width), 0.0, 1.0)
    return inv_freq / np.float32(config.factor) * divided + inv_freq * (1 - divided)


def _yarn_pair(turns: float, config: RopeConfig) -> float:
    """Return the (fractional) index of the pair that turns so often in the original context."""
    scale = config.rotary_dim / (2 * math.log(config.theta))
    return scale * math.log(config.original_max_position / (turns * 2 * math.pi))


def _yarn_magnitude(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return _mscale(config.factor, config.mscale) / _mscale(config.factor, config.mscale_all_dim)
    return _mscale(config.factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
