"""A long prompt arrives among short streams: the longest gap they see, with and without chunking.

    python benchmarks/chunked_prefill.py --long 4000 --streams 4 --budget 256

With chunking the gap is bounded by a step of the token budget; without it, by the whole prompt.
"""

import argparse
import asyncio

from common import Timeline, complete, describe_machine, median, prompt_of, quantile, running_engine

from octavo.engine.async_engine import AsyncEngine


async def measure(engine: AsyncEngine, args: argparse.Namespace, name: str) -> None:
    """Start the streams, send the long prompt in their midst, print what they saw."""
    shorts = [prompt_of(engine, 32, salt=f"{name} {index}") for index in range(args.streams)]
    streams = [
        asyncio.create_task(complete(engine, prompt, args.tokens, name=f"{name}-{index}"))
        for index, prompt in enumerate(shorts)
    ]
    await asyncio.sleep(args.delay)
    long = await complete(engine, prompt_of(engine, args.long, salt=name), 4, name=f"{name}-long")
    timelines: list[Timeline] = await asyncio.gather(*streams)
    gaps = [gap for timeline in timelines for gap in timeline.gaps_s]
    print(
        f"{name:>10}  longest gap {max(gaps):7.3f} s  p99 {quantile(gaps, 0.99):7.3f} s  "
        f"median {median(gaps):6.3f} s  long prompt's TTFT {long.ttft_s:6.2f} s"
    )


async def main() -> None:
    """Run both ways side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--long", type=int, default=4000, help="tokens of the long prompt")
    parser.add_argument("--streams", type=int, default=4, help="short streams")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each short stream")
    parser.add_argument("--budget", type=int, default=256, help="token budget of a step")
    parser.add_argument("--delay", type=float, default=1.0, help="seconds before the long prompt")
    args = parser.parse_args()
    print(f"{describe_machine()}; {args.long}-token prompt among {args.streams} streams")
    for name, chunked in (("chunked", True), ("whole", False)):
        async with running_engine(
            args.model,
            max_num_batched_tokens=args.budget,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=False,
        ) as engine:
            await complete(engine, prompt_of(engine, 32, salt="warm-up"), 4, name="warm-up")
            await measure(engine, args, name)


if __name__ == "__main__":
    asyncio.run(main())
