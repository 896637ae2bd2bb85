"""The same prompt twice: what the second request found in the cache, and its TTFT.

python benchmarks/prefix_reuse.py --prompt 1500 --rounds 3
"""

import argparse
import asyncio

from common import complete, describe_machine, median, prompt_of, running_engine


async def main() -> None:
    """Send each round's prompt cold, then warm, and print the medians' ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of the prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cold, warm = [], []
    async with running_engine(args.model) as engine:
        await complete(engine, prompt_of(engine, 32, salt="warm-up"), 4, name="warm-up")
        for index in range(args.rounds):
            prompt = prompt_of(engine, args.prompt, salt=f"round {index}")
            first = await complete(engine, prompt, 16, name=f"cold-{index}")
            second = await complete(engine, prompt, 16, name=f"warm-{index}")
            if first.text != second.text:
                raise SystemExit(f"round {index}: the cached answer differs from the cold one")
            cold.append(first.ttft_s)
            warm.append(second.ttft_s)
            print(
                f"round {index}: cached {second.num_cached_tokens} of {args.prompt} tokens, "
                f"TTFT cold {first.ttft_s:.3f} s, warm {second.ttft_s:.4f} s"
            )
    print(
        f"{describe_machine()}; median TTFT cold {median(cold):.3f} s, warm {median(warm):.4f} s, "
        f"ratio {median(warm) / median(cold):.4f}"
    )


if __name__ == "__main__":
    asyncio.run(main())
