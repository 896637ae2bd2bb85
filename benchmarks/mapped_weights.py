"""Decoding from mapped weights (pages of 4 KiB) beside packed ones (huge pages where granted).

    python benchmarks/mapped_weights.py [--threads 2] [--rounds 15]

Both engines live in one process and take turns; the ratio of processor times holds on a busy
machine too, if there is one thread. ADR 0004 says what hangs on it.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from common import describe_machine

from octavo import LLM, SamplingParams
from octavo.models.source import default_cache_dir


def decode(llm: LLM, num_tokens: int) -> tuple[float, float]:
    """Generate from one short prompt; return wall and processor seconds."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    wall, used = time.perf_counter(), time.process_time()
    llm.generate([[5, 6, 7, 8]], sampling, use_tqdm=False)
    return time.perf_counter() - wall, time.process_time() - used


def turn(packed: LLM, mapped: LLM, num_tokens: int, number: int) -> list[tuple[float, float]]:
    """Return the times of both, packed first; who begins alternates."""
    order = (packed, mapped) if number % 2 else (mapped, packed)
    times = [decode(llm, num_tokens) for llm in order]
    return times if number % 2 else times[::-1]


def main() -> None:
    """Measure and print the medians of the rounds' ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="auto")
    for name, default in (("threads", 2), ("rounds", 15), ("tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    choices = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=default_cache_dir()) as folder:
        settings = {
            "quantization": choices.quantization,
            "threads": choices.threads,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 28,
            "packed_cache_dir": Path(folder),
        }
        packed = LLM(choices.model, **settings)
        mapped = LLM(choices.model, **settings)
        decode(packed, 4), decode(mapped, 4)
        pairs = [turn(packed, mapped, choices.tokens, number) for number in range(choices.rounds)]
    print(f"{describe_machine()}; {choices.threads} threads, {choices.rounds} rounds")
    for index, label in enumerate(("wall time", "processor time")):
        ratio = statistics.median(b[index] / a[index] for a, b in pairs)
        print(f"mapped over packed, {label}: {ratio:.3f}")


if __name__ == "__main__":
    main()
