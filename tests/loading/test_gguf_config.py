"""GGUF metadata to decoder configuration: what counts, what is refused by its key."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest

from octavo.core.errors import LoadError
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.config import DecoderConfig, RopeConfig
from support_loading import (
    ARCHITECTURES,
    Float32,
    gguf_bytes,
    gguf_key,
    gguf_string,
    hf_config,
    write_gguf,
)


def opened(tmp_path: Path, architecture: str = "llama", **metadata: object) -> Checkpoint:
    """Open a tiny model whose architecture's keys are changed (``__`` stands for a dot)."""
    name = "llama" if architecture == "mistral" else architecture
    changes = {f"{name}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture, metadata=changes))


def read(tmp_path: Path, architecture: str = "llama", **metadata: object) -> DecoderConfig:
    """Return the configuration alone."""
    return opened(tmp_path, architecture, **metadata).config


def refused(tmp_path: Path, architecture: str = "llama", **metadata: object) -> str:
    """Check that a file is refused, and return the sentence."""
    with pytest.raises(LoadError) as caught:
        read(tmp_path, architecture, **metadata)
    assert "\n" not in caught.value.message
    return caught.value.message


BAD_SETTINGS: list[tuple[str, str, object]] = [
    ("llama", "block_count", ...),
    ("llama", "block_count", 0),
    ("llama", "block_count", 10_000),
    ("llama", "block_count", 2**32 - 1),
    ("llama", "embedding_length", "64"),
    ("llama", "embedding_length", 0),
    ("llama", "feed_forward_length", ...),
    ("llama", "feed_forward_length", [96, 96, 64]),
    ("llama", "context_length", 0),
    ("llama", "vocab_size", 287),
    ("llama", "attention__head_count", ...),
    ("llama", "attention__head_count", 0),
    ("llama", "attention__head_count_kv", 3),
    ("llama", "attention__head_count_kv", [2, 2, 1]),
    ("llama", "attention__key_length", 15),
    ("llama", "attention__value_length", 8),
    ("gemma3", "attention__key_length_swa", 8),
    ("gemma3", "rope__freq_base_swa", 1.0),
    ("gemma3", "rope__dimension_count_swa", 8),
    ("llama", "attention__layer_norm_rms_epsilon", ...),
    ("llama", "attention__layer_norm_rms_epsilon", 0.0),
    ("llama", "attention__layer_norm_rms_epsilon", math.nan),
    ("llama", "attention__layer_norm_rms_epsilon", math.inf),
    ("llama", "attention__causal", False),
    ("llama", "attention__clamp_kqv", 8.0),
    ("llama", "attention__max_alibi_bias", 8.0),
    ("llama", "expert_count", 8),
    ("llama", "logit_scale", 0.25),
    ("llama", "embedding_scale", 12.0),
    ("llama", "residual_scale", 0.25),
    ("llama", "rope__freq_base", 0.0),
    ("llama", "rope__freq_base", 1.0),
    ("llama", "rope__dimension_count", 18),
    ("llama", "rope__dimension_count", 7),
    ("llama", "rope__dimension_sections", [4, 4, 4, 0]),
    ("llama", "rope__scaling__type", "longrope"),
    ("llama", "rope__scaling__type", "foo"),
    ("llama", "rope__scaling__type", 2),
    ("llama", "rope__scaling__factor", -2.0),
    ("llama", "rope__scaling__attn_factor", 2.0),
    ("llama", "rope__scaling__yarn_ext_factor", 0.5),
    ("llama", "rope__scaling__yarn_log_multiplier", 0.1),
    ("qwen2", "attention__sliding_window", 32),
    ("qwen3", "expert_count", 8),
    ("gemma3", "attention__sliding_window_pattern", [True, False]),
    ("gemma3", "final_logit_softcapping", -30.0),
]


@pytest.mark.parametrize(("architecture", "key", "value"), BAD_SETTINGS)
def test_settings_refused_by_key(
    architecture: str, key: str, value: object, tmp_path: Path
) -> None:
    """LO-05, LO-12: what is out of range or would change results unseen fails at load with its
    key, within moments whatever the number says."""
    dotted = key.replace("__", ".")
    assert dotted in refused(tmp_path, architecture, **{key: value})


def test_yarn_needs_sane_settings(tmp_path: Path) -> None:
    """LO-12: an incomplete or absurd scaling names what it lacks."""
    yarn = {"rope__scaling__type": "yarn"}
    assert "rope.scaling.factor" in refused(tmp_path, **yarn)
    yarn |= {"rope__scaling__factor": 1e30, "rope__scaling__original_context_length": 64}
    assert "impossible context length" in refused(tmp_path, **yarn)
    yarn |= {"rope__scaling__factor": 4.0, "rope__scaling__yarn_beta_slow": 32.0}
    assert "yarn_beta_fast" in refused(tmp_path, **yarn)


@pytest.mark.parametrize("value", ["gpt2", "qwen2moe", "gemma2", "", ...])
def test_architectures_that_are_not_served(value: object, tmp_path: Path) -> None:
    """An architecture Octavo has no decoder for is refused by key, with those it has."""
    keys = [gguf_key("general.architecture", 8, gguf_string(value))] if value is not ... else []
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(keys))
    with pytest.raises(LoadError, match=r"general\.architecture") as caught:
        open_checkpoint(path)
    assert value is ... or "llama, qwen2, qwen3, gemma3" in caught.value.message


def test_rope_scalings(tmp_path: Path) -> None:
    """LO-12: none, linear (the default when only a factor is there, as in llama.cpp) and yarn."""
    none = RopeConfig(10000.0, 16)
    assert read(tmp_path).rope == none
    assert read(tmp_path, rope__scaling__type="none", rope__scaling__factor=4.0).rope == none
    assert read(tmp_path, rope__scaling__factor=1.0).rope == none
    linear = RopeConfig(10000.0, 16, "linear", 4.0)
    assert read(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0).rope == linear
    assert read(tmp_path, rope__scaling__factor=4.0).rope == linear
    assert read(tmp_path, rope__scale_linear=4.0).rope == linear
    yarn = read(
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=256,
    )
    assert (yarn.rope.scaling, yarn.rope.factor, yarn.rope.original_max_position) == (
        "yarn",
        4.0,
        256,
    )
    assert yarn.max_position == 1024
    assert yarn.rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    alone = read(tmp_path, rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert (alone.rope.original_max_position, alone.max_position) == (512, 512)


def test_yarn_attention_factors_multiply(tmp_path: Path) -> None:
    """llama.cpp multiplies its own yarn factor by those of the file."""
    config = read(
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__attn_factor=0.5,
        rope__scaling__yarn_beta_fast=16.0,
    )
    assert config.rope.attention_factor == pytest.approx(0.5 * (0.1 * math.log(4.0) + 1.0))
    assert config.rope.beta_fast == 16.0


def with_factors(values: Float32, **metadata: object) -> dict[str, object]:
    """Arguments of ``write_gguf`` for a file with the table of llama3 frequency divisors."""

    def edit(weights: dict[str, Float32]) -> None:
        weights["rope_freqs.weight"] = values

    return {"edit": edit, "metadata": metadata}


def test_frequency_factors(tmp_path: Path) -> None:
    """The llama3 scaling, which GGUF stores as a table, reaches the configuration and is no
    weight of the decoder; a table of the wrong size or with a zero is refused."""
    factors = np.array([1, 1, 2, 4, 8, 8, 8, 8], np.float32)
    path = tmp_path / "m.gguf"
    checkpoint = open_checkpoint(write_gguf(path, "llama", **with_factors(factors)))
    assert checkpoint.config.rope.frequency_factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in checkpoint.tensors
    for bad in (factors[:7], factors * 0, factors * np.float32(np.nan)):
        write_gguf(path, "llama", **with_factors(bad))
        with pytest.raises(LoadError, match="rope_freqs"):
            open_checkpoint(path)


def test_partial_rotation(tmp_path: Path) -> None:
    """rope.dimension_count below the head's size is the rotary dimension."""
    assert read(tmp_path, rope__dimension_count=8).rope.rotary_dim == 8


def test_head_sizes(tmp_path: Path) -> None:
    """Without key_length a head is hidden / heads; arrays that say one number count as it."""
    assert read(tmp_path, attention__key_length=..., attention__value_length=...).head_dim == 16
    assert read(tmp_path, attention__head_count_kv=[2, 2, 2]).num_kv_heads == 2
    overrides = {"num_attention_heads": 6, "num_key_value_heads": 2}
    path = tmp_path / "six.gguf"
    assert (
        open_checkpoint(write_gguf(path, "llama", config_overrides=overrides)).config.num_heads == 6
    )
    keys = {"llama.attention.key_length": ..., "llama.attention.value_length": ...}
    write_gguf(path, "llama", config_overrides=overrides, metadata=keys)
    with pytest.raises(LoadError, match=r"embedding_length \(64\) must be a multiple"):
        open_checkpoint(path)


def test_windows(tmp_path: Path) -> None:
    """A llama file's window (Mistral) slides on all layers, unless it is as long as the context;
    elsewhere the file must say which layers slide."""
    assert read(tmp_path, attention__sliding_window=512).sliding_window is None
    assert read(tmp_path, attention__sliding_window=0).sliding_window is None
    mistral = read(tmp_path, attention__sliding_window=32)
    assert (mistral.sliding_window, mistral.sliding_layers) == (32, ())
    qwen = read(
        tmp_path,
        "qwen2",
        attention__sliding_window=32,
        attention__sliding_window_pattern=[False, True, True],
    )
    assert qwen.sliding_layers == (False, True, True)
    everywhere = read(
        tmp_path,
        "qwen2",
        attention__sliding_window=32,
        attention__sliding_window_pattern=[True, True, True],
    )
    assert (everywhere.sliding_window, everywhere.sliding_layers) == (32, ())


def test_gemma3(tmp_path: Path) -> None:
    """Five of six layers slide with their own unscaled rope; embeddings are scaled; norms are
    stored whole."""
    config = read(
        tmp_path,
        "gemma3",
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
        final_logit_softcapping=30.0,
    )
    assert config.sliding_layers == (True,) * 5 + (False, True)
    assert config.sliding_window == 24
    assert config.rope == RopeConfig(1e6, 16, "linear", 8.0)
    assert config.local_rope == RopeConfig(1e4, 16)
    assert (config.embedding_scale, config.norm_offset) == (8.0, 0.0)
    assert (config.activation, config.logits_softcap) == ("gelu_tanh", 30.0)
    assert config.tied_embeddings
    assert read(tmp_path, "gemma3", rope__freq_base_swa=5e3).local_rope == RopeConfig(5e3, 16)
    pattern = read(tmp_path, "gemma3", attention__sliding_window_pattern=2)
    assert pattern.sliding_layers == (True, False) * 3 + (True,)


def test_attention_scale(tmp_path: Path) -> None:
    """The head's size decides, but for a file that says otherwise and for gemma3 of 62 layers
    (27B), whose query_pre_attn_scalar is hidden / heads."""
    assert read(tmp_path, attention__scale=0.0).attention_scale == 0.25
    assert read(tmp_path, attention__scale=0.5).attention_scale == 0.5
    overrides = {"num_hidden_layers": 62, "head_dim": 8, "hidden_size": 32, "intermediate_size": 8}
    path = write_gguf(
        tmp_path / "big.gguf", "gemma3", config_overrides=overrides | {"num_attention_heads": 2}
    )
    assert open_checkpoint(path).config.attention_scale == pytest.approx(16**-0.5)


def test_vocabulary(tmp_path: Path) -> None:
    """The embedding's rows are the vocabulary; more tokens than rows could never be embedded."""
    assert read(tmp_path, vocab_size=288).vocab_size == 288
    tokens = {"tokenizer.ggml.tokens": ["a"] * 289}
    write_gguf(tmp_path / "m.gguf", "llama", metadata=tokens)
    with pytest.raises(LoadError, match="289 tokens"):
        open_checkpoint(tmp_path / "m.gguf")


def test_end_tokens(tmp_path: Path) -> None:
    """eos, eot and eom all end a turn."""
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata=keys)
    assert open_checkpoint(path).end_token_ids == {258, 5, 6}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata={"tokenizer.ggml.eos_token_id": ...})
    assert open_checkpoint(path).end_token_ids == frozenset()
    write_gguf(tmp_path / "m.gguf", "llama", metadata={"tokenizer.ggml.eos_token_id": "</s>"})
    with pytest.raises(LoadError, match="eos_token_id"):
        open_checkpoint(path)


def test_unknown_settings_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A key of the architecture that nothing reads is named in a warning; known ones are not."""
    with caplog.at_level(logging.WARNING):
        for architecture in ARCHITECTURES:
            read(tmp_path, architecture)
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        read(tmp_path, attention__novelty=1)
    assert "attention.novelty" in caplog.text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sizes(architecture: str, tmp_path: Path) -> None:
    """Sizes go where they belong: red if two are swapped."""
    config, wanted = read(tmp_path, architecture), hf_config(architecture)
    assert config.hidden_size == wanted["hidden_size"]
    assert config.intermediate_size == wanted["intermediate_size"]
    assert config.num_layers == wanted["num_hidden_layers"]
    assert (config.num_heads, config.num_kv_heads) == (4, 2)
    assert config.head_dim == wanted["head_dim"]
    assert config.max_position == 512


def test_names_from_a_file_are_escaped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Red when a key of a corrupt file reaches the terminal as it is, or at any length."""
    with caplog.at_level(logging.WARNING):
        read(tmp_path, **{"made\x1b[31m_up\n": 1, "x" * 500: 1})
    assert "made\\x1b[31m_up\\n" in caplog.text
    assert "\x1b" not in caplog.text
    assert "x" * 100 not in caplog.text
