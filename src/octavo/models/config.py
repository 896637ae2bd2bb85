"""The shape of a decoder, whatever file format it came from."""

from dataclasses import dataclass
from typing import Literal

from octavo.kernels.ops import Activation

Architecture = Literal["llama", "qwen2", "qwen3", "gemma3"]
"""``llama`` is Mistral too."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding as configured; ``rope.py`` turns it into frequencies."""

    theta: float
    rotary_dim: int
    """Features of a head that rotate."""
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_position: int = 0
    """Context length before scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3 only, as ``high_freq_factor``."""
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    """yarn only, as ``beta_slow``, ``attention_factor`` and the two ``mscale``."""
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    frequency_factors: tuple[float, ...] | None = None
    """Divisors of each frequency, where the file stores them (GGUF ``rope_freqs.weight``)."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything about a decoder but its weights."""

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Context length the model was made for, scaling included."""
    norm_eps: float
    rope: RopeConfig
    attention_scale: float
    """Factor on query-key products, usually ``head_dim ** -0.5``."""
    tied_embeddings: bool
    """Whether the head is the embedding table."""
    activation: Activation = "silu"
    local_rope: RopeConfig | None = None
    """Rope of sliding-window layers where it differs (gemma3)."""
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()
    """Which layers slide; empty: none, if ``sliding_window`` is None, else all."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    """Added to every norm weight at load (Gemma in safetensors stores them less one)."""
