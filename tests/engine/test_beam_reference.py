"""Beam search against Hugging Face's ``generate`` on the same random model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.core.sampling import SamplingParams
from octavo.engine.llm import LLM
from support_loading import VOCAB_SIZE, write_hf_folder

pytestmark = pytest.mark.reference

ENDS = tuple(range(3, VOCAB_SIZE, 11))
"""So many stop ids that beams of a random model do end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf_folder(tmp_path_factory.mktemp("model"), "llama", seed=5)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(
        str(folder),
        dtype="float32",  # as the reference computes
        kv_cache_memory_bytes=8 << 20,
        max_model_len=128,
        debug_invariants=True,
    )


def wanted(model: Any, prompt: list[int], ends: tuple[int, ...], **asked: Any) -> list[list[int]]:
    """Return the reference's completions; what follows an end is padding."""
    import torch

    with torch.no_grad():
        rows = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            eos_token_id=list(ends),
            pad_token_id=ends[0],
            do_sample=False,
            **asked,
        ).tolist()
    outputs = [row[len(prompt) :] for row in rows]
    stops = [next((i for i, token in enumerate(ids, 1) if token in ends), None) for ids in outputs]
    return [ids[:stop] for ids, stop in zip(outputs, stops, strict=True)]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize(("width", "count"), [(4, 4), (5, 2)])
def test_equals_the_reference(
    llm: LLM, reference: Any, early_stopping: Any, length_penalty: float, width: int, count: int
) -> None:
    """Red if beams are ranked, kept, ended or stopped by another rule than users know."""
    rng = np.random.default_rng(width)
    for length in (5, 16, 33):
        prompt = rng.integers(0, VOCAB_SIZE, length).tolist()
        asked = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        sampling = SamplingParams(
            n=count,
            best_of=width,
            use_beam_search=True,
            temperature=0.0,
            max_tokens=14,
            stop_token_ids=ENDS,
            ignore_eos=True,
            **asked,
        )
        (result,) = llm.generate(prompt, sampling, use_tqdm=False)
        got = [list(output.token_ids) for output in result.outputs]
        expected = wanted(
            reference,
            prompt,
            ENDS,
            num_beams=width,
            num_return_sequences=count,
            max_new_tokens=14,
            **asked,
        )
        assert got == expected
