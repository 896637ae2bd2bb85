"""From nothing to the first token: whole processes, packing the weights (cold) or mapping them.

    python benchmarks/startup.py [--model smollm2] [--rounds 5] [--quantization auto]

Three ways in: ``LLM(...)`` in a script, ``octavo generate``, and ``octavo serve`` until /health
answers and until the first token of a streamed completion. Each round runs every way cold (with an
empty folder for packed weights) and warm, interleaved; the model file itself is in the page cache.
For ``LLM`` a second table says how long each part takes inside the process.
"""

import argparse
import http.client
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from common import describe_machine

from octavo.models.source import default_cache_dir, packed_cache_dir, resolve_model

PROMPT = "The capital of France is"
CHILD = """
import time
began = time.perf_counter()
import json, os, sys
arguments = json.loads(sys.argv[1])
phases = {"interpreter": time.time() - arguments["started"]}
before = time.perf_counter()
import numpy
phases["import numpy"] = time.perf_counter() - before
before = time.perf_counter()
from octavo import LLM, SamplingParams
from octavo.engine import factory
phases["import octavo"] = time.perf_counter() - before

def timed(name, label):
    inner = getattr(factory, name)
    def outer(*args, **kwargs):
        before = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            phases[label] = phases.get(label, 0.0) + time.perf_counter() - before
    setattr(factory, name, outer)

for name, label in arguments["parts"].items():
    timed(name, label)
before = time.perf_counter()
llm = LLM(arguments["model"], **arguments["settings"])
phases["the rest of LLM()"] = (
    time.perf_counter() - before - sum(phases[label] for label in arguments["parts"].values())
)
before = time.perf_counter()
sampling = SamplingParams(temperature=0.0, max_tokens=1)
llm.generate(arguments["prompt"], sampling, use_tqdm=False)
phases["first token"] = time.perf_counter() - before
print(json.dumps(phases), flush=True)
os._exit(0)
"""
PARTS = {
    "open_checkpoint": "open the model file",
    "load_tokenizer": "tokenizer",
    "choose_backend": "backend (and mapping)",
    "build_decoder": "decoder",
    "_runner": "weights, KV, program",
}


def environment(cache: Path) -> dict[str, str]:
    """Return what a process starts with: it keeps compiled modules, as an installation does."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OCTAVO_CACHE": str(cache)}


Way = Callable[[argparse.Namespace, Path], dict[str, float]]


def offline(choices: argparse.Namespace, cache: Path) -> dict[str, float]:
    """Start a script that makes an ``LLM`` and one token."""
    started = time.time()
    settings = {"quantization": choices.quantization}
    arguments = {
        "started": started,
        "parts": PARTS,
        "model": choices.model,
        "settings": settings,
        "prompt": PROMPT,
    }
    run = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(arguments)],
        env=environment(cache),
        capture_output=True,
        text=True,
        check=True,
    )
    total = time.time() - started
    phases: dict[str, float] = json.loads(run.stdout)
    return {"LLM(), first token": total, **{f"  {key}": value for key, value in phases.items()}}


def generate(choices: argparse.Namespace, cache: Path) -> dict[str, float]:
    """Run ``octavo generate`` for one token."""
    started = time.time()
    subprocess.run(
        [*octavo("generate", choices, cache), PROMPT, "--max-tokens", "1"],
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return {"octavo generate, to its exit": time.time() - started}


def serve(choices: argparse.Namespace, cache: Path) -> dict[str, float]:
    """Run ``octavo serve`` until it is healthy and has streamed a token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.time()
    server = subprocess.Popen(
        [*octavo("serve", choices, cache), "--port", str(port)],
        env=environment(cache),
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for_health(port, server)
        healthy = time.time() - started
        connection = http.client.HTTPConnection("127.0.0.1", port)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1, "stream": True}
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        connection.getresponse().read(6)
        return {
            "octavo serve, /health": healthy,
            "octavo serve, first token": time.time() - started,
        }
    finally:
        server.terminate()
        server.wait()


def octavo(command: str, choices: argparse.Namespace, cache: Path) -> list[str]:
    """Return the beginning of a command line."""
    line = [sys.executable, "-c", "from octavo.cli.main import main; main()", command]
    line += ["--quantization", choices.quantization]
    model = str(choices.path)
    return [*line, "--model", model] if command == "generate" else [*line, model, *SERVED]


SERVED = ("--served-model-name", "m")


def wait_for_health(port: int, server: subprocess.Popen[bytes]) -> None:
    """Ask until it is there, often: the wait must not be what is measured."""
    while server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(0.005)
        finally:
            connection.close()
    raise SystemExit("the server ended before it was healthy")


def measure(choices: argparse.Namespace, cache: Path) -> dict[str, dict[str, list[float]]]:
    """Run all ways cold and warm, round by round."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    ways: tuple[Way, ...] = (offline, generate, serve)
    for way in ways:
        way(choices, cache)  # compiles Python modules, where that was not done yet
    for _ in range(choices.rounds):
        for way in ways:
            for state in ("cold", "warm"):
                if state == "cold":
                    shutil.rmtree(packed_cache_dir(cache), ignore_errors=True)
                for label, seconds in way(choices, cache).items():
                    found[label][state].append(seconds)
    return found


def main() -> None:
    """Measure and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    choices = parser.parse_args()
    choices.path = resolve_model(choices.model, cache_dir=default_cache_dir()).path.resolve()
    choices.model = str(choices.path)
    with tempfile.TemporaryDirectory(dir=default_cache_dir()) as folder:
        found = measure(choices, Path(folder))
    print(f"{describe_machine()}; load {os.getloadavg()[0]:.1f}; medians of {choices.rounds}\n")
    print(f"{'seconds':<34}{'cold':>8}{'warm':>8}")
    for label, states in found.items():
        cold, warm = (statistics.median(states[state]) for state in ("cold", "warm"))
        print(f"{label:<34}{cold:8.3f}{warm:8.3f}")


if __name__ == "__main__":
    main()
