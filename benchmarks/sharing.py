"""n = 4 samples and 4 beams: memory and throughput with shared blocks and without.

python benchmarks/sharing.py --requests 6 --prompt 200 --output 48

All ways have the same model, prompts and KV memory, and one run prints them side by side.

* ``forked``: one request; branches share every block until they write into it.
* ``n requests``: as many requests with a prefix cache, as vLLM serves ``n``; they share the whole
  blocks of the prompt. Its beams are one-token requests that the client makes for each step.
* ``no sharing``: as many requests without a prefix cache.

Blocks "unshared" are what the same sequences would hold if each had its own, so ``saved`` compares
with the PagedAttention paper's figure 15; ``peak`` is what the pool really held.
"""

import argparse
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baseline_systems import Choice, Limits, LoadedModel
from common import describe_machine

from octavo.core.config import CacheConfig, SchedulerConfig
from octavo.core.events import NullObserver
from octavo.core.ids import RequestId, SequenceId
from octavo.core.plan import ModelRunner, ModelRunnerOutput, SchedulerOutput
from octavo.core.request import CacheIdentity, Request, SequenceOutput, TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.engine.core import EngineCore
from octavo.kvcache.manager import KVCacheManager
from octavo.scheduler.beam_search import BeamSearch
from octavo.scheduler.scheduler import Scheduler

IDENTITY = CacheIdentity("benchmark", "benchmark", "float32")
Prompts = Sequence[tuple[int, ...]]


@dataclass
class Meter:
    """Executes plans and notes what the pool holds meanwhile."""

    runner: ModelRunner
    cache: KVCacheManager
    used: list[int] = field(default_factory=list)
    unshared: list[int] = field(default_factory=list)
    num_copies: int = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Pass on."""
        if plan.scheduled:
            self.used.append(self.cache.usage().num_used)
            tables = self.cache.tables.values()
            self.unshared.append(sum(len(table.block_ids) for table in tables))
            self.num_copies += len(plan.copies)
        return self.runner.execute(plan)


class Way:
    """One way to get the completions, on an engine of its own."""

    def __init__(self, model: LoadedModel, limits: Limits, *, caching: bool) -> None:
        cache = CacheConfig(
            limits.num_blocks, limits.block_size, enable_prefix_caching=caching, watermark=0.0
        )
        self.meter = Meter(model.runner(limits), KVCacheManager(cache))
        config = SchedulerConfig(
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            vocab_size=model.vocab_size,
        )
        scheduler = Scheduler(config, self.meter.cache)
        self.core = EngineCore(scheduler, self.meter, time.perf_counter, NullObserver())
        self._names = itertools.count()

    def add(self, prompt: Sequence[int], **asked: object) -> str:
        """Send a request; return its name."""
        name = RequestId(str(next(self._names)))
        sampling = SamplingParams(**{"ignore_eos": True, **asked})  # type: ignore[arg-type]
        self.core.add(Request(name, tuple(prompt), sampling, IDENTITY, time.perf_counter()))
        return name

    def run(self) -> list[SequenceOutput]:
        """Step until nothing is left; return all outputs."""
        outputs: list[SequenceOutput] = []
        while self.core.has_work():
            outputs += self.core.step().outputs
        return outputs


def sample_forked(way: Way, prompts: Prompts, width: int, length: int) -> int:
    """One request for each prompt."""
    for prompt in prompts:
        way.add(prompt, n=width, seed=0, max_tokens=length)
    return sum(len(output.new_token_ids) for output in way.run())


def sample_apart(way: Way, prompts: Prompts, width: int, length: int) -> int:
    """One request for each completion."""
    for prompt in prompts:
        for index in range(width):
            way.add(prompt, seed=index, max_tokens=length)
    return sum(len(output.new_token_ids) for output in way.run())


def search_forked(way: Way, prompts: Prompts, width: int, length: int) -> int:
    """One request for each prompt."""
    for prompt in prompts:
        way.add(prompt, n=width, use_beam_search=True, temperature=0.0, seed=0, max_tokens=length)
    return sum(len(output.new_token_ids) for output in way.run())


def search_apart(way: Way, prompts: Prompts, width: int, length: int) -> int:
    """One request for each beam and token; the client keeps the beams."""
    sampling = SamplingParams(n=width, use_beam_search=True, temperature=0.0)
    searches = [BeamSearch(SequenceId(0), sampling, length, frozenset()) for _ in prompts]
    beams = [{SequenceId(0): list(prompt)} for prompt in prompts]
    while any(beams):
        owners: dict[str, tuple[int, SequenceId]] = {}
        for index, tokens in enumerate(beams):
            for name, ids in tokens.items():
                request = way.add(
                    ids, temperature=0.0, seed=0, max_tokens=1, logprobs=searches[0].num_candidates
                )
                owners[request] = index, name
        scores: list[dict[SequenceId, TokenLogprobs]] = [{} for _ in prompts]
        for output in way.run():
            index, name = owners[output.request_id]
            scores[index][name] = output.new_logprobs[0]
        for index, tokens in enumerate(beams):
            if tokens:
                placed = dict(enumerate(searches[index].advance(scores[index])))
                chosen = {SequenceId(number): beam for number, beam in placed.items()}
                beams[index] = {
                    name: [*tokens[beam.parent], beam.tokens[-1].token_id]
                    for name, beam in chosen.items()
                }
                searches[index].place(chosen)
    return sum(len(hypothesis.tokens) for search in searches for hypothesis in search.best())


Run = Callable[[Way, Prompts, int, int], int]
WAYS: dict[str, dict[str, tuple[Run, bool]]] = {
    "samples": {
        "forked": (sample_forked, True),
        "n requests": (sample_apart, True),
        "no sharing": (sample_apart, False),
    },
    "beams": {
        "forked": (search_forked, True),
        "n requests": (search_apart, True),
        "no sharing": (search_apart, False),
    },
}


def main() -> None:
    """Run every way and print a table for samples and one for beams."""
    args = _arguments()
    limits = Limits(
        max_model_len=args.prompt + args.output,
        num_blocks=args.kv_tokens // args.block_size,
        block_size=args.block_size,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=512,
        watermark=0.0,
    )
    model = LoadedModel(Choice.from_arguments(args), limits)
    rng = random.Random(0)
    prompts = [
        tuple(rng.randrange(model.vocab_size) for _ in range(args.prompt))
        for _ in range(args.requests)
    ]
    print(
        f"{describe_machine()}; {model.what}; {args.requests} prompts of "
        f"{args.prompt} tokens, {args.width} completions of {args.output}; {limits.num_blocks} "
        f"blocks of {limits.block_size}, at most {limits.max_num_seqs} sequences"
    )
    warm_up = Way(model, limits, caching=True)
    sample_forked(warm_up, prompts[:1], args.width, 4)
    for kind, ways in WAYS.items():
        print(
            f"{kind:10} {'tokens/s':>9} {'ratio':>6} {'peak':>6} {'mean':>6} "
            f"{'unshared':>9} {'saved':>6} {'copies':>7} {'preempted':>10}"
        )
        fastest = 0.0
        for name, (run, caching) in ways.items():
            if (kind, name) == ("beams", "no sharing") and not args.all:
                continue
            way = Way(model, limits, caching=caching)
            started = time.perf_counter()
            num_tokens = run(way, prompts, args.width, args.output)
            speed = num_tokens / (time.perf_counter() - started)
            fastest = fastest or speed
            meter = way.meter
            used, unshared = sum(meter.used), sum(meter.unshared)
            print(
                f"{name:10} {speed:9.1f} {fastest / speed:6.2f} {max(meter.used):6} "
                f"{used / len(meter.used):6.0f} {unshared / len(meter.used):9.0f} "
                f"{1 - used / unshared:6.1%} {meter.num_copies:7} "
                f"{way.core.stats().preemptions_total:10}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Choice.add_arguments(parser)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=48, help="tokens of each completion")
    parser.add_argument("--width", type=int, default=4, help="n, or beams")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="KV memory, in tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--all", action="store_true", help="also beams without a prefix cache")
    return parser.parse_args()


if __name__ == "__main__":
    main()
