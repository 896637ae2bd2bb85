"""Models with quantised weights equal the same models on the gguf package's decoded weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from octavo.kernels.weights import Encoding, WeightTensor
from octavo.models.checkpoint import open_checkpoint
from support_loading import VOCAB_SIZE, write_gguf
from support_models import alone, decoder_driver, f32_tensor

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}


def decoded(tensor: WeightTensor) -> WeightTensor:
    """Decode a tensor with the gguf package and store it in F32."""
    if tensor.encoding is Encoding.F32:
        return tensor
    kind = gguf.GGMLQuantizationType[tensor.encoding.label]
    return f32_tensor(gguf.dequantize(tensor.data, kind).reshape(tensor.shape), tensor.name)


@pytest.mark.parametrize("label", [encoding.label for encoding in Encoding])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_logits_equal_those_of_decoded_weights(
    label: str, architecture: str, tmp_path: Path
) -> None:
    """Every encoding, in all matrices and the tied table: red if one is decoded or stacked wrong,
    or if rows are reordered after decoding by another rule than before."""
    overrides = WIDE | {"tie_word_embeddings": architecture == "qwen3"}
    file = write_gguf(
        tmp_path / "model.gguf", architecture, encodings=label, config_overrides=overrides
    )
    checkpoint = open_checkpoint(file)
    encodings = {tensor.encoding.label for tensor in checkpoint.tensors.values()}
    assert encodings == {label, "F32"}
    prompt = np.random.default_rng(1).integers(0, VOCAB_SIZE, 20).tolist()
    plain = {name: decoded(tensor) for name, tensor in checkpoint.tensors.items()}
    wanted = alone(decoder_driver(checkpoint.config, plain), prompt)
    got = alone(decoder_driver(checkpoint.config, checkpoint.tensors), prompt)
    assert np.isfinite(wanted).all()
    assert wanted.std() > 1e-3
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_encodings_may_differ_within_a_stacked_matrix(tmp_path: Path) -> None:
    """Files such as Q4_K_M store v in more bits than q and k; they are stacked all the same."""
    encodings = {"attn_q": "Q4_K", "attn_k": "Q4_0", "attn_v": "Q6_K", "ffn": "Q5_K"}
    file = write_gguf(tmp_path / "model.gguf", "llama", encodings=encodings, config_overrides=WIDE)
    checkpoint = open_checkpoint(file)
    prompt = np.random.default_rng(2).integers(0, VOCAB_SIZE, 20).tolist()
    plain = {name: decoded(tensor) for name, tensor in checkpoint.tensors.items()}
    wanted = alone(decoder_driver(checkpoint.config, plain), prompt)
    got = alone(decoder_driver(checkpoint.config, checkpoint.tensors), prompt)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
