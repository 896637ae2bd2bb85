"""A model as a whole: both formats agree, every tensor is accounted for, fingerprints."""

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import LoadError
from octavo.kernels.dequantize import to_float32
from octavo.models.checkpoint import Checkpoint, open_checkpoint
from octavo.models.fingerprint import file_version
from octavo.models.rope_order import neox_rows
from octavo.models.tensor_layout import decoder_layout
from octavo.models.tokenizer_source import FolderTokenizerSource, GGUFTokenizerSource
from support_loading import (
    ARCHITECTURES,
    Float32,
    gguf_name,
    hf_config,
    random_weights,
    write_gguf,
    write_hf_folder,
)

K_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


def values(checkpoint: Checkpoint) -> dict[str, Float32]:
    """Decode every tensor, with the offset that a decoder adds to norms."""
    decoded = {}
    for name, tensor in checkpoint.tensors.items():
        offset = checkpoint.config.norm_offset if name.endswith("norm.weight") else 0.0
        decoded[name] = to_float32(tensor) + np.float32(offset)
    return decoded


def refused(path: Path) -> str:
    """Check that a model is refused in one sentence, which is returned."""
    with pytest.raises(LoadError) as caught:
        open_checkpoint(path)
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith(".")
    return caught.value.message


# --- both formats ---------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_formats_hold_the_same_model(architecture: str, tmp_path: Path) -> None:
    """Names, order of q and k, norms and settings agree between a folder and a GGUF file: red if
    the rows of a llama file are not put back into NeoX order, or Gemma's norms count twice."""
    folder = open_checkpoint(write_hf_folder(tmp_path / "m", architecture))
    file = open_checkpoint(write_gguf(tmp_path / "m.gguf", architecture))
    ours, theirs = values(folder), values(file)
    assert ours.keys() == theirs.keys()
    for name, wanted in ours.items():
        np.testing.assert_allclose(theirs[name], wanted, rtol=1e-6, atol=1e-6, err_msg=name)
    assert replace(file.config, norm_offset=0.0, norm_eps=1e-5) == replace(
        folder.config, norm_offset=0.0, norm_eps=1e-5
    )
    assert file.end_token_ids == folder.end_token_ids == {258}


def test_biases_are_reordered_too(tmp_path: Path) -> None:
    """The biases of q and k of a llama GGUF go with their rows."""
    overrides = {"attention_bias": True, "mlp_bias": True}
    folder = write_hf_folder(tmp_path / "m", "llama", config_overrides=overrides)
    file = write_gguf(tmp_path / "m.gguf", "llama", config_overrides=overrides)
    ours, theirs = values(open_checkpoint(folder)), values(open_checkpoint(file))
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("label", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_quantised_rows_keep_their_bytes(label: str, tmp_path: Path) -> None:
    """Reordering moves whole rows of blocks and decodes none."""
    path = write_gguf(tmp_path / "m.gguf", "llama", encodings=label, config_overrides=K_SIZES)
    checkpoint = open_checkpoint(path)
    tensor = checkpoint.tensors["blk.1.attn_q.weight"]
    assert tensor.encoding.label == label
    interleaved = tensor.take_rows(np.argsort(neox_rows(4, 64, 64)))
    assert interleaved.data.tobytes() in path.read_bytes()
    assert tensor.data.tobytes() not in path.read_bytes()


def test_neox_rows() -> None:
    """Pairs (0, 1), (2, 3) become (0, 2), (1, 3) of each head; what does not rotate stays."""
    assert neox_rows(1, 4, 4).tolist() == [0, 2, 1, 3]
    assert neox_rows(2, 6, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_folders(dtype: str, tmp_path: Path) -> None:
    """LO-12: bf16, fp16 and fp32 weights are the same model, rounded."""
    full = values(open_checkpoint(write_hf_folder(tmp_path / "full", "qwen2")))
    half = values(open_checkpoint(write_hf_folder(tmp_path / "half", "qwen2", dtype=dtype)))
    for name, wanted in full.items():
        np.testing.assert_allclose(half[name], wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("style", ["old", "new"])
def test_multimodal_gemma3(style: str, tmp_path: Path) -> None:
    """The text part of a multimodal folder is the same model as the text model alone, under the
    older and the newer tensor names; its vision part is left alone."""
    plain = write_hf_folder(tmp_path / "plain", "gemma3")

    def rename(weights: dict[str, Float32]) -> None:
        own = dict(weights)
        weights.clear()
        for name, tensor in own.items():
            prefix = "language_model." + name
            new = name.replace("model.", "model.language_model.", 1)
            weights[prefix if style == "old" else new] = tensor
        vision = "vision_tower.x.weight" if style == "old" else "model.vision_tower.x.weight"
        weights[vision] = np.ones((2, 2), np.float32)

    folder = write_hf_folder(tmp_path / "m", "gemma3", edit=rename)
    text = hf_config("gemma3")
    del text["architectures"]
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).fingerprint == open_checkpoint(plain).fingerprint


# --- every tensor is accounted for ----------------------------------------------------------------


def test_tied_without_a_head(tmp_path: Path) -> None:
    """LO-01: a tied model without lm_head has no output tensor, and its configuration says that
    the embedding is the head (tests/models compares its logits with the reference)."""
    overrides = {"tie_word_embeddings": True}
    for path in (
        write_hf_folder(tmp_path / "m", "llama", config_overrides=overrides),
        write_gguf(tmp_path / "m.gguf", "llama", config_overrides=overrides),
    ):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config.tied_embeddings
        assert checkpoint.tensors.keys() == decoder_layout(checkpoint.config, ()).shapes.keys()


@pytest.mark.parametrize("tie", [False, ...])
def test_untied_without_a_head(tie: object, tmp_path: Path) -> None:
    """LO-01: an untied model without lm_head is an error, not a head of random values."""

    def drop(weights: dict[str, Float32]) -> None:
        weights.pop("lm_head.weight", None)

    folder = write_hf_folder(tmp_path / "m", "llama", edit=drop)
    config = hf_config("llama", {"tie_word_embeddings": tie})
    (folder / "config.json").write_text(json.dumps(config))
    assert "missing 1 tensor (output.weight)" in refused(folder)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("equal", [True, False])
def test_tied_with_a_head(
    equal: bool, architecture: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """LO-02: the configuration wins over a head that is stored as well; if it differs from the
    embedding that is said in a warning."""

    def add(weights: dict[str, Float32]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + (0 if equal else 1)

    overrides = {"tie_word_embeddings": True}
    plain = write_hf_folder(tmp_path / "plain", architecture, config_overrides=overrides)
    folder = write_hf_folder(tmp_path / "m", architecture, config_overrides=overrides, edit=add)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_checkpoint(folder)
    assert "output.weight" not in checkpoint.tensors
    assert checkpoint.fingerprint == open_checkpoint(plain).fingerprint
    assert ("lm_head.weight" in caplog.text) is not equal


def test_a_gguf_head_unties(tmp_path: Path) -> None:
    """LO-02: a GGUF file has no tie setting: a stored head is used."""
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", "llama"))
    assert not checkpoint.config.tied_embeddings
    assert "output.weight" in checkpoint.tensors


LOST = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.2.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
]


@pytest.mark.parametrize("name", LOST)
def test_lost_tensors(name: str, tmp_path: Path) -> None:
    """LO-01: a tensor that is missing is named, in both formats: nothing stays at random."""
    folder = write_hf_folder(tmp_path / "m", "llama", edit=lambda weights: drop_name(weights, name))
    canonical = gguf_name("llama", name)
    assert canonical in refused(folder)
    path = write_gguf(
        tmp_path / "m.gguf", "llama", edit=lambda weights: drop_name(weights, canonical)
    )
    assert canonical in refused(path)


def drop_name(weights: dict[str, Float32], name: str) -> None:
    """Remove one tensor."""
    del weights[name]


@pytest.mark.parametrize("layers", [2, 4])
def test_wrong_number_of_layers(layers: int, tmp_path: Path) -> None:
    """LO-12: a configuration of more or fewer layers than the weights have is an error that names
    the tensors, in both formats."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    config = hf_config("llama", {"num_hidden_layers": layers})
    (folder / "config.json").write_text(json.dumps(config))
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata={"llama.block_count": layers})
    for message in (refused(folder), refused(path)):
        assert "9 tensors" in message
        assert f"blk.{min(layers, 3)}." in message


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "head_dim"])
def test_wrong_shapes(key: str, tmp_path: Path) -> None:
    """LO-12: a size that the weights contradict is an error that names a tensor and both shapes."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    config = hf_config("llama")
    (folder / "config.json").write_text(json.dumps(config | {key: config[key] * 2}))
    message = refused(folder)
    assert "must have the shape" in message
    assert str(config[key] * (8 if key == "head_dim" else 2)) in message  # 4 heads, doubled


def test_missing_biases(tmp_path: Path) -> None:
    """qwen2 without its biases, a bias on some layers only, and biases that no setting names."""

    def biases(weights: dict[str, Float32], kept: int) -> None:
        for name in [name for name in weights if name.endswith(".bias")][kept:]:
            del weights[name]

    folder = write_hf_folder(tmp_path / "a", "qwen2", edit=lambda weights: biases(weights, 0))
    assert "9 tensors (blk.0.attn_k.bias" in refused(folder)
    overrides = {"attention_bias": True}
    path = write_gguf(
        tmp_path / "b.gguf",
        "llama",
        config_overrides=overrides,
        edit=lambda weights: biases(weights, 4),
    )
    assert "8 tensors (blk.1.attn_k.bias" in refused(path)
    folder = write_hf_folder(tmp_path / "c", "llama", config_overrides=overrides)
    (folder / "config.json").write_text(json.dumps(hf_config("llama")))
    assert "does not explain 12 tensors" in refused(folder)


# --- the rest of a checkpoint ---------------------------------------------------------------------


def test_names_and_tokenizer_sources(tmp_path: Path) -> None:
    """The name is the file's stem or the folder's, and the tokenizer's source comes along."""
    folder = open_checkpoint(write_hf_folder(tmp_path / "my-model", "llama"))
    assert (folder.name, folder.path) == ("my-model", tmp_path / "my-model")
    assert folder.tokenizer_source == FolderTokenizerSource(tmp_path / "my-model")
    file = open_checkpoint(write_gguf(tmp_path / "my.model.Q4.gguf", "llama"))
    assert file.name == "my.model.Q4"
    assert isinstance(file.tokenizer_source, GGUFTokenizerSource)
    assert "tokenizer.ggml.tokens" in file.tokenizer_source.metadata
    assert all(key.startswith("tokenizer.") for key in file.tokenizer_source.metadata)


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [
        ({"eos_token_id": [7, 258]}, {7, 258}),
        ({"eos_token_id": 7}, {7, 258}),
        ({"eos_token_id": None}, {258}),
        ({}, {258}),
    ],
)
def test_generation_config_adds_end_tokens(
    generation: dict[str, Any], wanted: set[int], tmp_path: Path
) -> None:
    """LO-12: ids of generation_config.json end a turn too, whatever their spelling."""
    folder = write_hf_folder(tmp_path / "m", "llama")
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_checkpoint(folder).end_token_ids == wanted
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "generation_config.json: eos_token_id" in refused(folder)


def test_fingerprints_tell_models_apart(tmp_path: Path) -> None:
    """Other weights, another setting that changes KV, or another encoding: another fingerprint;
    the same model in other files: the same."""
    plain = open_checkpoint(write_hf_folder(tmp_path / "a", "llama")).fingerprint
    assert open_checkpoint(write_hf_folder(tmp_path / "b", "llama", shards=3)).fingerprint == plain
    others = [
        write_hf_folder(tmp_path / "seed", "llama", seed=1),
        write_hf_folder(tmp_path / "half", "llama", dtype="bfloat16"),
        write_hf_folder(tmp_path / "eps", "llama", config_overrides={"rms_norm_eps": 1e-6}),
        write_hf_folder(tmp_path / "rope", "llama", config_overrides={"rope_theta": 5e5}),
        write_hf_folder(tmp_path / "one", "llama", edit=nudge),
        write_gguf(tmp_path / "m.gguf", "llama"),
        write_gguf(tmp_path / "q.gguf", "llama", encodings="Q8_0"),
    ]
    prints = {open_checkpoint(path).fingerprint for path in others}
    assert len(prints | {plain}) == len(others) + 1


def nudge(weights: dict[str, Float32]) -> None:
    """Change one value of one small tensor."""
    weights["model.layers.1.self_attn.v_proj.weight"][3, 5] += 0.001


def test_fingerprints_of_large_tensors(tmp_path: Path) -> None:
    """Of a tensor too large to hash whole, a change of all its values is seen."""
    overrides = {"vocab_size": 1024}

    def scale(weights: dict[str, Float32]) -> None:
        weights["model.embed_tokens.weight"] *= np.float32(1.001)

    plain = write_hf_folder(tmp_path / "a", "llama", config_overrides=overrides)
    other = write_hf_folder(tmp_path / "b", "llama", config_overrides=overrides, edit=scale)
    assert open_checkpoint(plain).fingerprint != open_checkpoint(other).fingerprint


def test_reading_is_repeatable(tmp_path: Path) -> None:
    """Opening the same file twice gives the same fingerprint and the same tensors."""
    path = write_gguf(tmp_path / "m.gguf", "llama", encodings="Q5_0")
    first, second = open_checkpoint(path), open_checkpoint(path)
    assert first.fingerprint == second.fingerprint
    wanted = random_weights("llama", hf_config("llama"), 0)[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    for checkpoint in (first, second):
        decoded = to_float32(checkpoint.tensors["blk.0.attn_q.weight"])
        np.testing.assert_allclose(decoded, wanted, atol=0.05)


@pytest.mark.model
def test_the_default_model(model_path: Path) -> None:
    """SmolLM2's settings, all its tensors, and its end of turn."""
    checkpoint = open_checkpoint(model_path)
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.vocab_size, config.hidden_size, config.head_dim) == (49152, 576, 64)
    assert (config.max_position, config.rope.theta) == (8192, 100_000.0)
    assert config.tied_embeddings
    assert len(checkpoint.tensors) == 272
    assert checkpoint.end_token_ids == {2}
    assert np.isfinite(to_float32(checkpoint.tensors["blk.0.attn_k.weight"])).all()


def test_a_models_version_tells_changed_files_apart(tmp_path: Path) -> None:
    """Size and time of every weight file count, in a folder too; other files of it do not."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("a.safetensors", "b.safetensors", "config.json"):
        (folder / name).write_bytes(b"one")
    first = file_version(folder)
    (folder / "config.json").write_bytes(b"three")
    assert file_version(folder) == first
    status = (folder / "b.safetensors").stat()
    os.utime(folder / "b.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = file_version(folder)
    assert second != first
    (folder / "b.safetensors").write_bytes(b"four")
    os.utime(folder / "b.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert file_version(folder) not in (first, second)
    assert file_version(folder / "a.safetensors").startswith("a.safetensors:3:")
