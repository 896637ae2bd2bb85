"""Hundreds of requests over HTTP against the real server and arithmetic: nothing is left behind."""

import asyncio
import contextlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support import PATIENCE_S
from support_loading import write_hf_folder

NUM_REQUESTS = 600
CONCURRENCY = 16
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a tiny random model, in a process of its own, checking every invariant."""
    folder = write_hf_folder(tmp_path_factory.mktemp("soak") / "tiny", "llama")
    command = [str(Path(sys.executable).with_name("octavo")), "serve", str(folder), "--port", "0"]
    options = ["--max-num-seqs", "12", "--max-model-len", "128", "--debug-invariants"]
    pool = ["--kv-cache-memory-bytes", "1M", "--max-num-batched-tokens", "48"]
    log = folder.parent / "server.log"  # a pipe nobody reads would block the server in the end
    with (
        log.open("w") as output,
        subprocess.Popen([*command, *options, *pool], stdout=output, stderr=output) as server,
    ):
        try:
            yield address_in(log, server)
        finally:
            server.terminate()
            assert server.wait(PATIENCE_S) == 0


def address_in(log: Path, server: "subprocess.Popen[bytes]") -> str:
    """Wait until the server has said where it listens."""
    while server.poll() is None:
        if found := re.search(r"(http://127\.0\.0\.1:\d+) ", log.read_text()):
            return found.group(1)
        time.sleep(0.05)
    raise AssertionError(f"the server ended: {log.read_text()}")


def gauges(text: str) -> dict[str, float]:
    """Return every sample by name and distinguishing label value."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found["/".join([sample.name, *rest.values()])] = sample.value
    return found


async def client(
    http: httpx.AsyncClient, number: int, rng: random.Random, durations: list[float]
) -> str:
    """Send one request; a third of them leave at a random moment of the time that answers take
    here. Return how it ended."""
    blocks = rng.randint(1, 4)
    length = blocks * BLOCK_SIZE + rng.choice([0, 0, -1, 1, 5])
    shared = [rng.randrange(3)] * min(length, 2 * BLOCK_SIZE)
    prompt = shared + [rng.randrange(256) for _ in range(length - len(shared))]
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": rng.randint(1, 24),
        "temperature": rng.choice([0, 1]),
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 2]),
    }
    leaves = number % 3 == 0 and durations
    patience = rng.uniform(0.0, statistics.median(durations)) if leaves else None
    begin = time.monotonic()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience):
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            durations.append(time.monotonic() - begin)
            return "done"
    return "left"


async def test_nothing_is_left_behind(url: str) -> None:
    """KV-02, KV-03, KV-17, ME-03: turns red when a block, a lock, a request or a gauge leaks
    after 600 requests at concurrency 16 of which a third was cancelled at random moments."""
    rng = random.Random(20261130)
    gate = asyncio.Semaphore(CONCURRENCY)
    # Connections are given up long before the server closes them, which could cross with a request.
    limits = httpx.Limits(keepalive_expiry=1.0)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as http:
        durations: list[float] = []

        async def run(number: int) -> str:
            async with gate:
                return await client(http, number, rng, durations)

        ends = await asyncio.gather(*(run(number) for number in range(NUM_REQUESTS)))
        assert ends.count("done") >= NUM_REQUESTS * 2 // 3
        assert ends.count("left") > NUM_REQUESTS // 10
        found = await quiet(http)
        again = await http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "still there?", "max_tokens": 3}
        )
        assert again.status_code == 200
    blocks = {state: found[f"octavo:kv_cache_blocks/{state}"] for state in ("free", "cached")}
    assert sum(blocks.values()) == found_total(found)
    assert found["octavo:kv_cache_usage_perc"] == 0
    assert found["octavo:kv_cache_evictions_total"] > 0
    assert found["octavo:request_success_total/abort"] > 0
    ended = sum(v for k, v in found.items() if k.startswith("octavo:request_success_total/"))
    assert ended == found["octavo:e2e_request_latency_seconds_count"]


def found_total(found: dict[str, float]) -> float:
    """Return the size of the pool, from the labels of the configuration's gauge."""
    (name,) = [key for key in found if key.startswith("octavo:cache_config_info/")]
    return max(float(part) for part in name.split("/") if part.isdigit())


async def quiet(http: httpx.AsyncClient) -> dict[str, float]:
    """Wait until the server has noticed every client that left; return its gauges."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = gauges((await http.get("/metrics")).text)
        states = ("num_requests_running", "num_requests_waiting", "kv_cache_blocks/used")
        if all(found[f"octavo:{state}"] == 0 for state in states):
            return found
        assert time.monotonic() < deadline, f"work is left: {found}"
        await asyncio.sleep(0.05)
