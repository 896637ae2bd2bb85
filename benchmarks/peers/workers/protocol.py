"""The worker's side of the comparison: JSON lines in and out, standard library only.

A worker is started with one argument, a JSON object of settings. It then writes ``ready`` and
answers each line with a ``result`` or an ``error``, until its input ends:

* ``{"prompts": [[ids]], "max_tokens": n, "streamed": bool}``: every prompt is completed greedily to
  exactly ``max_tokens`` tokens. Streamed, the answer tells when each token came; else the engine
  runs as it does for whoever asks for the whole alone.
* ``{"score": [ids], "num_single": n, "file": path}``: the logits of every token go to the file,
  float32 ``[tokens, vocab]``; the last ``num_single`` tokens are computed one at a time, as in
  decoding, and those before in steps of the engine's own size.

It ends with the process that started it, however that ended.
"""

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Final

PR_SET_PDEATHSIG: Final = 1


class Engine:
    """One loaded engine; subclasses generate."""

    version: str
    settings: dict[str, Any]
    """What it runs with, for the report."""

    def prepare(self, prompts: list[list[int]], max_tokens: int) -> None:
        """Make ready what the engine sizes by the batch; not timed."""

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Complete all prompts together, greedily, past any end token; return their tokens."""
        raise NotImplementedError

    def stream(self, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[int, int]]:
        """Do the same and yield each token as it comes, after the index of its prompt."""
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
    _die_with_parent()
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
                write(_timed(engine, **request))
        except Exception as error:  # the parent goes on with the other engines
            traceback.print_exc()
            write({"event": "error", "message": _sentence(error)})


def _timed(
    engine: Engine, prompts: list[list[int]], max_tokens: int, streamed: bool
) -> dict[str, Any]:
    engine.prepare(prompts, max_tokens)
    times_s: list[list[float]] | None = None
    started = time.perf_counter()
    if streamed:
        tokens: list[list[int]] = [[] for _ in prompts]
        times_s = [[] for _ in prompts]
        for index, token in engine.stream(prompts, max_tokens):
            tokens[index].append(token)
            times_s[index].append(time.perf_counter() - started)
    else:
        tokens = engine.generate(prompts, max_tokens)
    wall_s = time.perf_counter() - started
    counts = [len(own) for own in tokens]
    if counts != [max_tokens] * len(prompts):
        raise RuntimeError(f"It made {counts} tokens for {len(prompts)} prompts, not {max_tokens}.")
    return {"event": "result", "wall_s": wall_s, "tokens": tokens, "times_s": times_s}


def _scored(engine: Engine, score: list[int], num_single: int, file: str) -> dict[str, Any]:
    rows = 0
    with open(file, "wb") as sink:
        for array in engine.logits(score, num_single):
            array.tofile(sink)
            rows += len(array)
    if rows != len(score):
        raise RuntimeError(f"It gave logits of {rows} tokens, not of {len(score)}.")
    return {"event": "result"}


def _die_with_parent() -> None:
    """Let Linux kill this process when its parent dies.

    One that waits for its turn is stopped (SIGSTOP): it would never read the end of its input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
