"""The worker's side of the comparison: JSON lines in and out, standard library only.

A worker is started with one argument, a JSON object of settings. It then writes ``ready`` and
answers each line with a ``result`` or an ``error``, until its input ends:

* ``{"prompts": [[ids]], "max_tokens": n}``: every prompt is completed greedily to exactly
  ``max_tokens`` tokens.
* ``{"score": [ids], "num_single": n, "file": path}``: the logits of every token go to the file,
  float32 ``[tokens, vocab]``; the last ``num_single`` tokens are computed one at a time, as in
  decoding, and those before in steps of the engine's own size.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
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

    def logits(self, tokens: list[int], num_single: int) -> Iterator[Any]:
        """Yield arrays ``[rows, vocab]``, float32, that together hold the logits of each token."""
        raise NotImplementedError("This engine gives no logits of the whole vocabulary.")


def steps(num_tokens: int, budget: int, num_single: int) -> Iterator[tuple[int, int]]:
    """Yield where each step begins and ends: ``budget`` tokens a step, then single ones."""
    together = num_tokens - num_single
    for start in range(0, together, budget):
        yield start, min(start + budget, together)
    for start in range(together, num_tokens):
        yield start, start + 1


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
            if "score" in request:
                write(_scored(engine, **request))
            else:
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


def _scored(engine: Engine, score: list[int], num_single: int, file: str) -> dict[str, Any]:
    rows = 0
    with open(file, "wb") as sink:
        for array in engine.logits(score, num_single):
            array.tofile(sink)
            rows += len(array)
    if rows != len(score):
        raise RuntimeError(f"It gave logits of {rows} tokens, not of {len(score)}.")
    return {"event": "result"}


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
