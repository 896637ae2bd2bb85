"""Logits of random models against the Hugging Face implementation, in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models.checkpoint import open_checkpoint
from support_loading import VOCAB_SIZE, write_gguf, write_hf_folder
from support_models import Float32, PagedDriver, alone, decoder_driver

pytestmark = pytest.mark.reference

LENGTH = 150
"""Tokens of the prompt: past every window, and past the original context of scaled models."""


def scaled(kind: str, **parameters: object) -> dict[str, object]:
    """Settings of a model whose original context of 32 tokens was stretched to 256."""
    rope = {"rope_type": kind, "factor": 8.0} | parameters
    if kind != "linear":
        rope["original_max_position_embeddings"] = 32
    return {"max_position_embeddings": 256, "rope_scaling": rope}


CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama wide heads": ("llama", {"head_dim": 24}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama no grouping": ("llama", {"num_key_value_heads": 4}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", scaled("linear")),
    "llama llama3": ("llama", scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama yarn": ("llama", scaled("yarn")),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", {"use_sliding_window": True}),
    "qwen2 yarn": ("qwen2", scaled("yarn", attention_factor=1.1)),
    "qwen3": ("qwen3", {}),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "attention_bias": True}),
    "qwen3 yarn": ("qwen3", scaled("yarn")),
    "gemma3": ("gemma3", {}),
    "gemma3 capped logits": ("gemma3", {"final_logit_softcapping": 2.0}),
    "gemma3 linear": ("gemma3", scaled("linear")),
    "gemma3 scale": ("gemma3", {"query_pre_attn_scalar": 40, "head_dim": 24}),
}


@dataclass(frozen=True)
class Pair:
    """A model folder, and the reference's logits of a prompt and of a shorter other one."""

    folder: Path
    prompt: list[int]
    other: list[int]
    wanted: Float32
    wanted_other: Float32

    def driver(self, block_size: int) -> PagedDriver:
        """Put our decoder of the folder under a driver."""
        checkpoint = open_checkpoint(self.folder)
        return decoder_driver(
            checkpoint.config, checkpoint.tensors, block_size=block_size, num_blocks=512
        )


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Both sides of a case."""
    architecture, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    write_hf_folder(folder, architecture, config_overrides=overrides, seed=len(request.param))
    rng = np.random.default_rng(7)
    prompt = rng.integers(0, VOCAB_SIZE, LENGTH).tolist()
    other = rng.integers(0, VOCAB_SIZE, 45).tolist()
    model = reference_model(folder)
    return Pair(folder, prompt, other, logits_of(model, prompt), logits_of(model, other))


def reference_model(folder: Path) -> Any:
    """Load the reference in float32, with its plainest attention."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def logits_of(model: Any, tokens: list[int]) -> Float32:
    """Return the reference's logits of all tokens."""
    import torch

    with torch.no_grad():
        logits: Float32 = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


def whole(paged: PagedDriver, pair: Pair) -> list[Float32]:
    """The prompt in one step."""
    return [alone(paged, pair.prompt)]


def chunked(*sizes: int) -> Callable[[PagedDriver, Pair], list[Float32]]:
    """The prompt in chunks of these sizes, in turn."""

    def run(paged: PagedDriver, pair: Pair) -> list[Float32]:
        paged.add("a", pair.prompt)
        parts, done = [], 0
        while done < LENGTH:
            count = min(sizes[len(parts) % len(sizes)], LENGTH - done)
            parts += paged.step(("a", count))
            done += count
        return parts

    return run


def cached(paged: PagedDriver, pair: Pair) -> list[Float32]:
    """The prompt after another sequence computed its first 64 tokens."""
    paged.add("first", pair.prompt[:64] + pair.other)
    first = paged.step(("first", 64 + len(pair.other)))[0]
    paged.share("a", pair.prompt, "first", 64 // paged.block_size)
    return [first[:64], *paged.step(("a", 50)), *paged.step(("a", LENGTH - 114))]


def ragged(paged: PagedDriver, pair: Pair) -> list[Float32]:
    """The prompt among the chunks and decodes of another sequence, which must be right too."""
    paged.add("a", pair.prompt)
    paged.add("b", pair.other)
    parts: dict[str, list[Float32]] = {"a": [], "b": []}
    for work in (
        [("b", 10), ("a", 3)],
        [("a", 1), ("b", 1)],
        [("b", 1), ("a", 100)],
        [("a", LENGTH - 105), ("b", 32)],
        [("b", 1), ("a", 1)],
    ):
        for (name, _), part in zip(work, paged.step(*work), strict=True):
            parts[name].append(part)
    np.testing.assert_allclose(np.concatenate(parts["b"]), pair.wanted_other, rtol=0, atol=1e-4)
    return parts["a"]


MODES: dict[str, tuple[int, Callable[[PagedDriver, Pair], list[Float32]]]] = {
    "whole": (16, whole),
    "chunks of 1": (16, chunked(1)),
    "chunks of 7": (64, chunked(7)),
    "chunks of 16 and 33": (1, chunked(16, 33)),
    "cached prefix": (16, cached),
    "ragged batch": (16, ragged),
    "ragged batch, small blocks": (1, ragged),
}


@pytest.mark.parametrize("mode", MODES)
def test_logits_equal_the_reference(pair: Pair, mode: str) -> None:
    """LO-04, LO-12: within 1e-4 at every position, inside and beyond the original context, however
    the prompt is cut, shared and batched."""
    block_size, run = MODES[mode]
    got = np.concatenate(run(pair.driver(block_size), pair))
    assert pair.wanted.std() > 0.1
    np.testing.assert_allclose(got, pair.wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_gguf_equals_the_reference(architecture: str, tmp_path: Path) -> None:
    """The same weights out of a GGUF file: red if q and k keep the file's row order."""
    folder = write_hf_folder(tmp_path / "folder", architecture, seed=3)
    file = write_gguf(tmp_path / "model.gguf", architecture, seed=3)
    prompt = np.random.default_rng(9).integers(0, VOCAB_SIZE, 60).tolist()
    checkpoint = open_checkpoint(file)
    got = alone(decoder_driver(checkpoint.config, checkpoint.tensors), prompt)
    wanted = logits_of(reference_model(folder), prompt)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)
