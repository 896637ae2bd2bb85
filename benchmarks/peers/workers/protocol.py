"""The worker's side of the comparison: JSON lines in and out, standard library only.

A worker is started with one argument, a JSON object of settings. It then writes ``ready`` and
answers each line ``{"prompts": [[ids]], "max_tokens": n}`` with a ``result`` or an ``error``, until
its input ends. Every prompt is completed greedily to exactly ``max_tokens`` tokens.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Completions:
    """What an engine made of a batch, in the prompts' order."""

    tokens: list[list[int]]
    ttft_s: list[float] | None = None
    """Time to each first token, where the engine tells."""


class Engine:
    """One loaded engine; subclasses generate."""

    version: str
    settings: dict[str, Any]
    """What it runs with, for the report."""

    def prepare(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Make ready what the engine sizes by the batch; not timed."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Completions:
        """Complete all prompts together, greedily, past any end token."""
        raise NotImplementedError


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    """Load the engine and answer requests until the input ends."""
    write = _take_stdout()
    settings = json.loads(sys.argv[1])
    started = time.perf_counter()
    try:
        engine = load(settings)
    except Exception as error:  # any failure to load is this peer's answer, not a crash
        traceback.print_exc()
        write({"event": "error", "message": _sentence(error)})
        return
    write(
        {
            "event": "ready",
            "load_s": time.perf_counter() - started,
            "version": engine.version,
            "settings": engine.settings,
        }
    )
    for line in sys.stdin:
        request = json.loads(line)
        try:
            write(_timed(engine, request["prompts"], request["max_tokens"]))
        except Exception as error:  # the parent goes on with the other engines
            traceback.print_exc()
            write({"event": "error", "message": _sentence(error)})


def _timed(engine: Engine, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
    engine.prepare(prompts, max_tokens)
    started = time.perf_counter()
    done = engine.generate(prompts, max_tokens)
    wall_s = time.perf_counter() - started
    counts = [len(tokens) for tokens in done.tokens]
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"It made {counts} tokens for {len(prompts)} prompts, not {max_tokens}.")
    return {"event": "result", "wall_s": wall_s, "tokens": done.tokens, "ttft_s": done.ttft_s}


def _take_stdout() -> Callable[[dict[str, Any]], None]:
    """Keep standard output for the protocol: what libraries print there goes to the log."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def write(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    return write


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())[:300] or "no message"
    return f"{type(error).__name__}: {text}"
