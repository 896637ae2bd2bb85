"""The benchmark of number formats: its arithmetic, and that it runs on a tiny model."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support import REPO
from support_loading import write_hf_folder

BENCHMARKS = REPO / "benchmarks"


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the arithmetic."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("quality_metrics")


def logits_of(*probabilities: list[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32) + np.float32(3.0)


def test_divergence_and_perplexity_by_hand(metrics: ModuleType) -> None:
    """Turns red if KL goes the wrong way round, or perplexity is not that of the next tokens."""
    reference = logits_of([0.5, 0.25, 0.25], [0.8, 0.1, 0.1])
    logits = logits_of([0.25, 0.5, 0.25], [0.8, 0.1, 0.1])
    scores = metrics.compare_logits(reference, logits, np.array([0, 2]))
    by_hand = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert scores.divergence == pytest.approx([by_hand, 0.0], abs=1e-6)
    assert scores.agrees.tolist() == [False, True]
    quality = metrics.Quality.of(scores)
    assert quality.mean_kl == pytest.approx(by_hand / 2, abs=1e-6)
    assert quality.perplexity == pytest.approx((0.25 * 0.1) ** -0.5, rel=1e-6)
    assert quality.perplexity_ratio == pytest.approx(2**0.5, rel=1e-6)
    assert quality.top1_agreement == 0.5


def test_tokens_that_one_side_rules_out(metrics: ModuleType) -> None:
    """Turns red if a token without probability in the reference counts, or one only there not."""
    certain, spread = logits_of([1.0, 0.0]), logits_of([0.5, 0.5])
    next_tokens = np.array([0])
    assert metrics.compare_logits(certain, spread, next_tokens).divergence == pytest.approx(
        [math.log(2)]
    )
    assert metrics.compare_logits(spread, certain, next_tokens).divergence == [math.inf]


def test_many_rows_are_the_same_as_each(metrics: ModuleType) -> None:
    """Turns red if cutting into blocks loses or mixes rows, or the shift of logits matters."""
    rng = np.random.default_rng(0)
    count = metrics.BLOCK + 3
    reference, logits = rng.normal(size=(2, count, 50)).astype(np.float32)
    tokens = rng.integers(0, 50, count)
    scores = metrics.compare_logits(reference, logits, tokens)
    alone = [
        metrics.compare_logits(reference[i : i + 1], logits[i : i + 1] + 7, tokens[i : i + 1])
        for i in range(count)
    ]
    joined = metrics.TokenScores.joined(alone)
    assert scores.divergence == pytest.approx(joined.divergence, rel=1e-4)
    assert scores.loss == pytest.approx(joined.loss, rel=1e-4)
    assert (scores.divergence > 0).all()
    with pytest.raises(ValueError, match="do not go with"):
        metrics.compare_logits(reference, logits[:, 1:], tokens)


def test_it_runs_on_a_tiny_model(tmp_path: Path) -> None:
    """Turns red if a variant's logits are not those of its settings, or a broken one ends all."""
    model = write_hf_folder(tmp_path / "tiny", "llama")
    (tmp_path / "mt-bench").mkdir()
    (tmp_path / "miniswe").mkdir()
    turns = ["What is a library, and who keeps it?", "Say it again, but in a few short words."]
    question = json.dumps({"turns": turns})
    (tmp_path / "mt-bench" / "question.jsonl").write_text(question + "\n")
    prompt = json.dumps({"input": "def main() -> int:\n    return 0  # nothing to do here at all"})
    (tmp_path / "miniswe" / "a.jsonl").write_text(prompt + "\n")
    figures = tmp_path / "figures.json"
    variants = [
        "same:backend=numpy,dtype=float32,block_size=3,max_num_batched_tokens=5,max_num_seqs=2",
        "auto:backend=numpy,dtype=bfloat16",
        "broken:colour=red",
    ]
    command = [sys.executable, BENCHMARKS / "quality.py", "--model", model, "--peers"]
    command += ["--reference", "float32:backend=numpy,dtype=float32", "--cache", tmp_path / "cache"]
    command += [item for variant in variants for item in ("--octavo", variant)]
    command += ["--traces", tmp_path, "--tokens", "80", "--context", "48", "--single", "16"]
    done = subprocess.run([*command, "--json", figures], capture_output=True, text=True, check=True)
    report = json.loads(figures.read_text())
    assert report["sizes"] == {"mt-bench": 48, "miniswe": 32}
    assert list(report["absent"]) == ["broken"]
    same, auto = report["results"]
    for part in ("together", "tails", "tails_single"):
        assert same[part]["mean_kl"] < 1e-9 < auto[part]["mean_kl"] < 1e-2
        assert same[part]["top1_agreement"] == 1.0
    assert auto["together"]["num_tokens"] == 78
    assert auto["tails"]["num_tokens"] == auto["tails_single"]["num_tokens"] == 32
    assert "* auto: perplexity" in done.stdout
    assert "broken stayed out" in done.stdout
