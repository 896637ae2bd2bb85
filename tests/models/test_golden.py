"""The default model against recorded tokens and logits of the Hugging Face implementation."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.models.checkpoint import open_checkpoint
from support_models import PagedDriver, decoder_driver

pytestmark = [pytest.mark.shared, pytest.mark.model]

CLOSE_CALL = 0.01
"""Gap of the two largest recorded logits below which either token is right."""


@pytest.fixture(scope="module")
def cases(shared: Path) -> list[dict[str, Any]]:
    """The eight recorded cases."""
    recorded = json.loads((shared / "golden" / "smollm2_135m_q4_1.json").read_text("utf-8"))
    assert len(recorded["cases"]) == 8
    return list(recorded["cases"])


@pytest.fixture(scope="module")
def paged(model_path: Path) -> PagedDriver:
    """The default model in float32, on shuffled blocks."""
    checkpoint = open_checkpoint(model_path)
    return decoder_driver(checkpoint.config, checkpoint.tensors, num_blocks=128)


@pytest.mark.parametrize("number", range(8))
def test_greedy_tokens_and_logits(
    paged: PagedDriver, cases: list[dict[str, Any]], number: int
) -> None:
    """The same greedy tokens, and the five largest logits of each step within 1e-2."""
    case = cases[number]
    prompt, generated = case["prompt_ids"], case["gen_ids"]
    paged.add("a", prompt + generated)
    logits = paged.step(("a", len(prompt)))[0][-1]
    stats = case["first_logits_stats"]
    assert logits.mean() == pytest.approx(stats["mean"], abs=1e-2)
    assert logits.std() == pytest.approx(stats["std"], abs=1e-2)
    assert logits.min() == pytest.approx(stats["min"], abs=1e-2)
    for token, top in zip(generated, case["top5_per_step_id_logit_logprob"], strict=True):
        ids = [entry[0] for entry in top]
        np.testing.assert_allclose(logits[ids], [entry[1] for entry in top], rtol=0, atol=1e-2)
        if top[0][1] - top[1][1] >= CLOSE_CALL:
            assert int(logits.argmax()) == token
        logits = paged.step(("a", 1))[0][0]
    paged.release("a")


def test_all_cases_in_one_batch(paged: PagedDriver, cases: list[dict[str, Any]]) -> None:
    """Decoded side by side, each case still gives its own five largest logits at each step."""
    longest = max(len(case["gen_ids"]) for case in cases)
    for number, case in enumerate(cases):
        paged.add(str(number), case["prompt_ids"] + case["gen_ids"])
    work = [(str(i), len(case["prompt_ids"])) for i, case in enumerate(cases)]
    for index in range(longest):
        parts = paged.step(*work)
        for (name, _), part in zip(work, parts, strict=True):
            top = cases[int(name)]["top5_per_step_id_logit_logprob"][index]
            wanted = [entry[1] for entry in top]
            np.testing.assert_allclose(part[-1][[e[0] for e in top]], wanted, rtol=0, atol=1e-2)
        work = [(str(i), 1) for i, case in enumerate(cases) if index + 1 < len(case["gen_ids"])]
    for number in range(len(cases)):
        paged.release(str(number))
