"""The default model on the native backend against the reference implementation's tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.kernels.ops import KVDtype
from octavo.models.checkpoint import open_checkpoint
from support_models import decoder_driver
from support_native import ISAS, backend_of

Float64 = NDArray[np.float64]

pytestmark = [pytest.mark.shared, pytest.mark.model]


@pytest.mark.parametrize(
    ("precision", "kv_dtype", "close_call"),
    [
        ("float32", "float32", 0.01),
        ("bfloat16", "bfloat16", 0.25),
        ("float32", "int8", 0.3),
        ("file", "float32", 0.04),
        ("file", "bfloat16", 0.08),  # the default; the answer "Paris" hangs on a gap of 0.082
        ("int8", "bfloat16", 0.3),
    ],
)
def test_golden_cases_decoded_side_by_side(
    precision: str, kv_dtype: KVDtype, close_call: float, shared: Path, model_path: Path
) -> None:
    """All eight cases in one batch give the recorded greedy tokens, but where the recorded gap of
    the two largest logits is below what the precision moves them."""
    recorded = json.loads((shared / "golden" / "smollm2_135m_q4_1.json").read_text("utf-8"))
    checkpoint = open_checkpoint(model_path)
    driver = decoder_driver(
        checkpoint.config,
        checkpoint.tensors,
        backend=backend_of(ISAS[0], precision),
        kv_dtype=kv_dtype,
    )
    cases = dict(enumerate(recorded["cases"]))
    for number, case in cases.items():
        driver.add(str(number), case["prompt_ids"] + case["gen_ids"])
    logits = driver.step(*[(str(n), len(case["prompt_ids"])) for n, case in cases.items()])
    latest = {n: rows[-1] for n, rows in zip(cases, logits, strict=True)}
    for step in range(max(len(case["gen_ids"]) for case in cases.values())):
        alive = [n for n in latest if step < len(cases[n]["gen_ids"])]
        for n in alive:
            top = cases[n]["top5_per_step_id_logit_logprob"][step]
            if top[0][1] - top[1][1] >= close_call:
                assert int(latest[n].argmax()) == cases[n]["gen_ids"][step]
            if precision == kv_dtype == "float32":
                ids = [entry[0] for entry in top]
                wanted = [entry[1] for entry in top]
                np.testing.assert_allclose(latest[n][ids], wanted, rtol=0, atol=1e-2)
        results = driver.step(*[(str(n), 1) for n in alive])
        latest = {n: rows[0] for n, rows in zip(alive, results, strict=True)}


@pytest.mark.parametrize(("kv_dtype", "most"), [("bfloat16", 1e-4), ("int8", 4e-3)])
def test_rounded_kv_stays_close(
    kv_dtype: KVDtype, most: float, shared: Path, model_path: Path
) -> None:
    """Mean KL divergence from float32 KV over the 347 tokens of all cases. Measured: 3.3e-5 in
    bfloat16 and 1.1e-3 in int8, whose largest gap between two tokens that change places is 0.09."""
    recorded = json.loads((shared / "golden" / "smollm2_135m_q4_1.json").read_text("utf-8"))
    checkpoint = open_checkpoint(model_path)
    backend = backend_of(ISAS[0], "float32")

    def logprobs(dtype: KVDtype) -> Float64:
        driver = decoder_driver(
            checkpoint.config, checkpoint.tensors, backend=backend, kv_dtype=dtype
        )
        for number, case in enumerate(recorded["cases"]):
            driver.add(str(number), case["prompt_ids"] + case["gen_ids"])
        work = [
            (str(number), len(case["prompt_ids"]) + len(case["gen_ids"]))
            for number, case in enumerate(recorded["cases"])
        ]
        logits = np.concatenate(driver.step(*work)).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    exact, rounded = logprobs("float32"), logprobs(kv_dtype)
    divergence = (np.exp(exact) * (exact - rounded)).sum(axis=1)
    assert divergence.mean() < most
