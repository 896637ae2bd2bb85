"""Whole decoders on each instruction set equal the numpy backend's."""

from pathlib import Path

import numpy as np
import pytest

from octavo.kernels.numpy_backend import NumpyBackend
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import DecoderConfig, RopeConfig
from support_models import PagedDriver, decoder_driver, random_tensors, tiny_config
from support_native import ISAS, Float32, backend_of

pytestmark = pytest.mark.parametrize("isa", ISAS)

CONFIGS: dict[str, DecoderConfig] = {
    "llama": tiny_config(),
    "tied": tiny_config(tied_embeddings=True, head_dim=16, rope=RopeConfig(1e4, 16)),
    "qwen2": tiny_config(architecture="qwen2"),
    "qwen3": tiny_config(architecture="qwen3", num_kv_heads=1),
    "gemma3": tiny_config(
        architecture="gemma3",
        num_layers=3,
        sliding_window=9,
        sliding_layers=(True, False, True),
        local_rope=RopeConfig(50.0, 12),
        attention_softcap=2.0,
        logits_softcap=3.0,
        activation="gelu_tanh",
        embedding_scale=5.5,
        norm_offset=1.0,
        tied_embeddings=True,
    ),
}


def tokens(seed: int, count: int, vocab: int = 61) -> list[int]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def served(driver: PagedDriver) -> Float32:
    """Logits of a small service: prompts in chunks beside decodes, on shuffled blocks."""
    for name, length in {"a": 40, "b": 9, "c": 130}.items():
        driver.add(name, tokens(length, length))
    steps = [driver.step(("a", 30), ("b", 5), ("c", 100))]
    steps += [driver.step(("a", 1), ("c", 17), ("b", 1)) for _ in range(1)]
    steps += [driver.step(("b", 1), ("a", 1), ("c", 1)) for _ in range(3)]
    return np.concatenate([logits for step in steps for logits in step])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("block_size", [5, 16])
def test_float32_equals_numpy(isa: str, name: str, block_size: int) -> None:
    """Every architecture in float32 within 1e-4 of the largest logit."""
    config = CONFIGS[name]
    biased = ("attn_q", "attn_k", "attn_v") if name == "qwen2" else ()
    tensors = random_tensors(config, biased=biased)
    wanted = served(decoder_driver(config, tensors, block_size=block_size, backend=NumpyBackend()))
    got = served(decoder_driver(config, tensors, block_size=block_size, backend=backend_of(isa)))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("precision", "bound"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_lower_precisions_stay_near(isa: str, name: str, precision: str, bound: float) -> None:
    """The relative error of all logits together stays within what the number format costs."""
    config = CONFIGS[name]
    tensors = random_tensors(config)
    wanted = served(decoder_driver(config, tensors, backend=NumpyBackend()))
    got = served(decoder_driver(config, tensors, backend=backend_of(isa, precision)))
    assert np.linalg.norm(got - wanted) <= bound * np.linalg.norm(wanted)


@pytest.mark.parametrize("threads", [1, 3])
def test_steps_repeat_bit_by_bit(isa: str, threads: int) -> None:
    """The same batches give the same bits, run after run: red if threads race."""
    config = CONFIGS["llama"]
    tensors = random_tensors(config)
    runs = [
        served(decoder_driver(config, tensors, backend=backend_of(isa, "int8", threads)))
        for _ in range(3)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_who_computes_a_column_does_not_matter(isa: str, precision: str, threads: int) -> None:
    """Decodes whose columns threads take from one another, and a prompt in blocks of rows, where
    who is done first helps others: bit for bit what one thread computes. More threads than CPUs,
    so that some are always late."""
    config = tiny_config(hidden_size=160, intermediate_size=352, max_position=1024)
    tensors = random_tensors(config)
    one, many = (
        decoder_driver(
            config, tensors, backend=backend_of(isa, precision, count, deterministic=True)
        )
        for count in (1, threads)
    )
    names = [f"decode {i}" for i in range(12)]
    for driver in (one, many):
        driver.add("prompt", tokens(0, 700))
        for i, name in enumerate(names):
            driver.add(name, tokens(i + 1, 24))
    steps = [[(name, 20) for name in names], [("prompt", 700)], *[[(n, 1) for n in names]] * 3]
    for step in steps:
        wanted, got = one.step(*step), many.step(*step)
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(wanted))


def prompt_and_decodes(driver: PagedDriver) -> Float32:
    """Logits of a prompt of the default model and of four tokens decoded after it."""
    driver.add("a", tokens(1, 60, 1000))
    parts = [driver.step(("a", 56)), *[driver.step(("a", 1)) for _ in range(4)]]
    return np.concatenate([logits for (logits,) in parts])


@pytest.fixture(scope="module")
def default_logits(model_path: Path) -> Float32:
    """What numpy makes of the default model."""
    checkpoint = open_checkpoint(model_path)
    driver = decoder_driver(checkpoint.config, checkpoint.tensors, num_blocks=8)
    return prompt_and_decodes(driver)


@pytest.mark.model
@pytest.mark.parametrize(
    ("precision", "bound"),
    [("float32", 1e-5), ("bfloat16", 0.01), ("int8", 0.05), ("file", 0.05)],
)
def test_default_model(
    isa: str, precision: str, bound: float, model_path: Path, default_logits: Float32
) -> None:
    """SmolLM2 in each precision: relative error of the logits, nearly the same greedy tokens."""
    checkpoint = open_checkpoint(model_path)
    backend = backend_of(isa, precision)
    driver = decoder_driver(checkpoint.config, checkpoint.tensors, num_blocks=8, backend=backend)
    got = prompt_and_decodes(driver)
    assert np.linalg.norm(got - default_logits) <= bound * np.linalg.norm(default_logits)
    assert (got.argmax(axis=1) == default_logits.argmax(axis=1)).mean() >= 0.8
