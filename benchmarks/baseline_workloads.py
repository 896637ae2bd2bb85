"""Requests for the baselines: how long their prompts and answers are, and when they come."""

import csv
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

AZURE_TRACE: Final = (
    Path(__file__).resolve().parents[2] / "shared/traces/azure/AzureLLMInferenceTrace_conv.csv"
)
MEAN_PROMPT_SHARE: Final = 161 / 2048
"""ShareGPT's mean prompt in a context of 2048 tokens, as the PagedAttention paper states it."""
MEAN_OUTPUT_SHARE: Final = 338 / 2048
"""The same of its answers."""
SIGMA: Final = 0.9
"""Spread of the logarithm of chat lengths: the 99th percentile is about 5 times the mean."""


@dataclass(frozen=True)
class Item:
    """One request to be sent."""

    name: str
    prompt: tuple[int, ...]
    num_output: int
    offset_s: float
    """Seconds after the start at which it comes; 0 in a closed loop."""


def lognormal_lengths(rng: random.Random, max_model_len: int) -> Iterator[tuple[int, int]]:
    """Yield (prompt, output) lengths of chats, their means scaled to the context."""
    while True:
        prompt = _lognormal(rng, MEAN_PROMPT_SHARE * max_model_len)
        yield prompt, _lognormal(rng, MEAN_OUTPUT_SHARE * max_model_len)


def azure_lengths(rng: random.Random, max_model_len: int) -> Iterator[tuple[int, int]]:
    """Yield lengths of the Azure conversation trace from a random place on.

    They are scaled so that the 99th percentile of prompt and answer together is the context.
    """
    with AZURE_TRACE.open() as file:
        rows = [
            (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)
        ]
    totals = sorted(map(sum, rows))
    scale = max_model_len / totals[len(totals) * 99 // 100]
    start = rng.randrange(len(rows))
    while True:
        for prompt, output in rows[start:] + rows[:start]:
            yield round(scale * prompt), round(scale * output)


LENGTHS: Final = {"lognormal": lognormal_lengths, "azure": azure_lengths}


def make_workload(
    kind: str,
    *,
    num_requests: int,
    max_model_len: int,
    vocab_size: int,
    seed: int,
    rate: float | None = None,
    num_shared: int = 0,
) -> list[Item]:
    """Return requests of random tokens, each with at least one of prompt and output.

    Args:
        kind: a key of ``LENGTHS``.
        rate: requests a second of a Poisson process; None: all are there from the start.
        num_shared: tokens that all prompts begin with, as a system prompt.
    """
    rng = random.Random(seed)
    lengths = LENGTHS[kind](rng, max_model_len)
    arrivals = random.Random(seed + 1)  # the same prompts at every rate
    shared = tuple(rng.randrange(vocab_size) for _ in range(num_shared))
    items, now = [], 0.0
    for index in range(num_requests):
        num_prompt, num_output = next(lengths)
        num_prompt = min(max(num_prompt, 1), max_model_len - num_shared - 1)
        num_output = min(max(num_output, 1), max_model_len - num_shared - num_prompt)
        prompt = shared + tuple(rng.randrange(vocab_size) for _ in range(num_prompt))
        items.append(Item(f"r{index}", prompt, num_output, now))
        if rate is not None:
            now += arrivals.expovariate(rate)
    return items


def _lognormal(rng: random.Random, mean: float) -> int:
    return round(rng.lognormvariate(0.0, SIGMA) * mean * math.exp(-SIGMA * SIGMA / 2))
