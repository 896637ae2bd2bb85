"""The benchmark of the baselines runs, simulated and on a tiny model, and its figures add up."""

import json
import subprocess
import sys

import pytest

from support import REPO

BENCHMARK = REPO / "benchmarks" / "baselines.py"
SMALL = ["--requests", "6", "--concurrency", "6", "--max-model-len", "64", "--kv-tokens", "160"]
NAMES = ["static", "orca-max", "orca-pow2", "orca-oracle", "paged", "paged-flat", "paged-radix"]


@pytest.mark.parametrize(
    "how",
    [["--virtual"], ["--virtual", "--rates", "0.5,4"], ["--model", "tiny", "--dtype", "float32"]],
    ids=["simulated", "open-loop", "tiny"],
)
def test_one_command_compares_all_systems(tmp_path, how):
    """Turns red if a system is missing, ends early, or its memory does not add up."""
    report, charts = tmp_path / "report.json", tmp_path / "charts.html"
    output = subprocess.run(
        [sys.executable, BENCHMARK, *SMALL, *how, "--json", report, "--html", charts],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    runs = json.loads(report.read_text())["runs"]
    num_rates = 2 if "--rates" in how else 1
    assert [run["system"] for run in runs] == NAMES * num_rates
    assert len({run["num_output_tokens"] for run in runs}) == 1
    for run in runs:
        share = run["kv_share_of_pool"]
        used = sum(share[part] for part in ("stored", "pending", "reserved", "internal"))
        assert used == pytest.approx(share["allocated"])
        assert share["allocated"] + share["external"] <= 1 + 1e-9
        assert run["num_requests"] == 6
    assert ("SIMULATED" in output) == ("--virtual" in how)
    if "tiny" in how:
        assert output.count("same tokens in 6 of 6 requests") == len(NAMES) - 1
    page = charts.read_text()
    assert page.count("<svg") == (3 if num_rates == 2 else 2)
    assert all(name in page for name in NAMES)
