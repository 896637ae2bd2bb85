"""One workload on systems from FasterTransformer's time to now, all in this engine, side by side.

    python benchmarks/baselines.py --lengths lognormal            # the real model, closed loop
    python benchmarks/baselines.py --lengths azure --rates 0.3,0.6,1.2       # Poisson arrivals
    python benchmarks/baselines.py --virtual --requests 400 --rates 0.5,1,2  # simulated time

All systems have the same kernels, the same scheduler and the same KV memory; they differ in when a
batch takes in requests, in how KV is reserved and in what finds equal prefixes. In a closed loop
``--concurrency`` requests are always outstanding. Outputs have the drawn length (``ignore_eos``).

What is modelled of the older systems: who may join, how much is reserved, and that it must be
contiguous. What is not, in their favour: padding of prompts, computing for sequences that are done,
and that FasterTransformer answers only at the end of a batch. Static batches compute all their
prompts in one step; the others share one token budget, so Orca's long prompts are chunked here.

KV waste is the time-averaged share of allocated slots that belong to no token: the rest of the last
block, and what is reserved for tokens to come (or never to come). Slots of prompt tokens that are
computed in a later step of their prefill are listed apart (pending). Blocks that only the prefix
cache holds are free: they are given up for any request.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from baseline_plot import latency_chart, memory_chart, page, throughput_chart
from baseline_results import Recorder, Result, table
from baseline_systems import (
    SYSTEMS,
    Choice,
    Limits,
    LoadedModel,
    SimulatedRunner,
    StepCost,
    System,
    TimedRunner,
    build_core,
    fit_cost,
)
from baseline_workloads import LENGTHS, Item, make_workload
from common import describe_machine

from octavo.core.clock import Clock, ManualClock
from octavo.core.config import CacheConfig
from octavo.core.ids import RequestId
from octavo.core.request import CacheIdentity, Request
from octavo.core.sampling import SamplingParams
from octavo.engine.core import EngineCore

SIMULATED_VOCAB = 49_152


def drive(
    core: EngineCore,
    clock: Clock,
    wait: Callable[[float], None],
    items: Sequence[Item],
    concurrency: int | None,
) -> Result:
    """Send the requests and step until all are done.

    Args:
        concurrency: requests outstanding at once; None: they come at their own times.
    """
    recorder = Recorder()
    pending = list(reversed(items))
    start = clock()
    outstanding = 0
    while pending or core.has_work():
        while pending and (
            outstanding < concurrency
            if concurrency is not None
            else pending[-1].offset_s <= clock() - start
        ):
            item = pending.pop()
            arrival = clock() if concurrency is not None else start + item.offset_s
            core.add(make_request(item, arrival))
            outstanding += 1
        if not core.has_work():
            wait(max(0.0, pending[-1].offset_s - (clock() - start)))
            continue
        before = clock()
        update = core.step()
        recorder.add(update, core.occupancy(), core.stats(), clock() - before)
        outstanding -= len(update.finished)
    return recorder.result(clock() - start, core.stats())


def make_request(item: Item, arrival: float) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=item.num_output, ignore_eos=True, seed=0)
    identity = CacheIdentity("benchmark", "benchmark", "float32")
    return Request(RequestId(item.name), item.prompt, sampling, identity, arrival)


class Bench:
    """The model (or its simulation), the limits, and the workload."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.limits = Limits(
            max_model_len=args.max_model_len,
            num_blocks=args.kv_tokens // args.block_size,
            block_size=args.block_size,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            watermark=args.watermark,
        )
        self.model = None if args.virtual else LoadedModel(Choice.from_arguments(args), self.limits)
        self.vocab_size = self.model.vocab_size if self.model else SIMULATED_VOCAB
        self.steps: list[tuple[int, int, float]] = []

    def describe(self) -> str:
        """Return what the figures belong to."""
        limits, args = self.limits, self.args
        memory = f"{limits.num_slots:,} tokens of KV"
        if self.model:
            memory += f" ({limits.num_slots * self.model.token_bytes / 2**20:.0f} MiB)"
        how = self.model.what if self.model else f"SIMULATED TIME, {args.cost}"
        if args.cpu_time:
            how += ", PROCESSOR TIME"
        return (
            f"{describe_machine()}; {how}; {args.lengths} lengths, {args.requests} requests; "
            f"context {limits.max_model_len}, {memory}, at most {limits.max_num_seqs} sequences, "
            f"{limits.max_num_batched_tokens} tokens a step"
        )

    def workload(self, rate: float | None) -> list[Item]:
        """Return the requests, the same for every system."""
        return make_workload(
            self.args.lengths,
            num_requests=self.args.requests,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.vocab_size,
            seed=self.args.seed,
            rate=rate,
            num_shared=self.args.shared_prefix,
        )

    def run(self, system: System, rate: float | None) -> Result:
        """Run one system from an empty cache."""
        concurrency = self.args.concurrency if rate is None else None
        items = self.workload(rate)
        if self.model is None:
            virtual = ManualClock()
            runner = SimulatedRunner(virtual, self.args.cost)
            core = build_core(system, self.limits, self.vocab_size, runner, virtual)
            return drive(core, virtual, virtual.advance, items, concurrency)
        clock = time.process_time if self.args.cpu_time else time.monotonic
        timed = TimedRunner(self.model.runner(self.limits), clock)
        core = build_core(system, self.limits, self.vocab_size, timed, clock)
        result = drive(core, clock, time.sleep, items, concurrency)
        self.steps += timed.steps
        return result

    def warm_up(self) -> None:
        """Let the first system not pay for cold memory."""
        if self.model is not None:
            items = self.workload(None)[:2]
            core = build_core(
                SYSTEMS[-1],
                self.limits,
                self.vocab_size,
                self.model.runner(self.limits),
                time.monotonic,
            )
            drive(core, time.monotonic, time.sleep, items, 2)


def ratios(results: dict[str, Result], *, has_tokens: bool) -> str:
    """Return how the last system compares with each other one.

    Greedy tokens can differ where two are all but equally likely: sums in another order round
    otherwise, as batches of another shape do.
    """
    name, best = list(results.items())[-1]
    lines = []
    for other, result in list(results.items())[:-1]:
        line = (
            f"{name} against {other:<12} {best.throughput / result.throughput:5.2f} x throughput, "
            f"{best.normalised_mean_s / result.normalised_mean_s:5.2f} x mean normalised latency"
        )
        if has_tokens:
            same = sum(a == b for a, b in zip(result.digests, best.digests, strict=True))
            line += f", same tokens in {same} of {len(best.digests)} requests"
        lines.append(line)
    return "\n".join(lines)


def sustained(by_rate: dict[float, dict[str, Result]], limit_s: float | None) -> str:
    """Return the highest tested rate of each system at the same latency."""
    if limit_s is None:
        limit_s = 4 * min(r.normalised_mean_s for r in by_rate[min(by_rate)].values())
    lines = [
        f"highest tested rate with a mean normalised latency of at most {limit_s:.3f} s/token:"
    ]
    for name in next(iter(by_rate.values())):
        good = [rate for rate, r in by_rate.items() if r[name].normalised_mean_s <= limit_s]
        lines.append(f"  {name:<12} {f'{max(good):g}/s' if good else 'below all tested'}")
    return "\n".join(lines)


def main() -> None:
    """Run, print, and write the page and the figures if asked."""
    args = _arguments()
    bench = Bench(args)
    systems = [system for system in SYSTEMS if args.systems is None or system.name in args.systems]
    print(bench.describe(), flush=True)
    print("\n".join(f"  {system.name:<12} {system.what}" for system in systems), flush=True)
    bench.warm_up()
    by_rate: dict[float | None, dict[str, Result]] = {}
    for rate in args.rates or [None]:
        results: dict[str, Result] = {}
        for system in systems:
            results[system.name] = result = bench.run(system, rate)
            print(f"  ... {system.name}: {result.seconds:.1f} s", flush=True)
        by_rate[rate] = results
        loop = f"closed loop of {args.concurrency}" if rate is None else f"Poisson, {rate:g}/s"
        compared = ratios(results, has_tokens=not args.virtual)
        print(f"\n{loop}\n{table(results)}\n\n{compared}\n", flush=True)
    charts = [throughput_chart(results), memory_chart(results)]  # of the highest rate
    if args.rates and len(args.rates) > 1:
        print(sustained(by_rate, args.latency_limit))
        charts.append(latency_chart(by_rate))
    if bench.steps:
        cost, explained = fit_cost(bench.steps)
        print(f"step cost fitted to {len(bench.steps)} steps, R2 {explained:.3f}: {cost}")
    title = "Simulated: KV baselines" if args.virtual else "KV baselines"
    if args.html:
        args.html.write_text(page(title, bench.describe(), charts))
    if args.json:
        args.json.write_text(json.dumps(_report(bench, by_rate), indent=1))


def _report(bench: Bench, by_rate: dict[float | None, dict[str, Result]]) -> dict[str, object]:
    runs = [
        {"rate": rate, "system": name, **result.as_json()}
        for rate, results in by_rate.items()
        for name, result in results.items()
    ]
    return {
        "what": bench.describe(),
        "simulated": bench.args.virtual,
        "limits": asdict(bench.limits),
        "runs": runs,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    Choice.add_arguments(parser)
    parser.add_argument("--systems", type=_names, help="names, separated by commas (default: all)")
    parser.add_argument("--lengths", choices=list(LENGTHS), default="lognormal")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=32, help="of the closed loop")
    parser.add_argument("--rates", type=_numbers, help="requests/s of open loops, one run each")
    parser.add_argument("--latency-limit", type=float, help="s/token, for the highest rate")
    parser.add_argument("--shared-prefix", type=int, default=0, help="tokens all prompts share")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-tokens", type=int, default=4096, help="the KV memory, in tokens")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--watermark", type=float, default=CacheConfig(1).watermark)
    parser.add_argument("--virtual", action="store_true", help="simulate time, no model")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count processor time, for a machine that others use: closed loop, one thread",
    )
    parser.add_argument(
        "--cost", type=_cost, default=StepCost(), help="seconds a step,a token,a token of KV read"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--html", type=Path, help="where to write the charts")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    unknown = set(args.systems or ()) - {system.name for system in SYSTEMS}
    if unknown:
        parser.error(f"no such system: {', '.join(sorted(unknown))}")
    if args.cpu_time and (args.rates or args.threads != 1):
        parser.error("--cpu-time needs --threads 1 and a closed loop: idle time is not counted")
    return args


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    return sorted(float(part) for part in text.split(","))


def _cost(text: str) -> StepCost:
    return StepCost(*(float(part) for part in text.split(",")))


if __name__ == "__main__":
    main()
