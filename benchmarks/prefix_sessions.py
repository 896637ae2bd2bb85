"""Agent sessions of real text: what a prefix cache finds, saves, and costs where it finds nothing.

    python benchmarks/prefix_sessions.py                    # the model, miniswe sessions
    python benchmarks/prefix_sessions.py --steps 3 --sessions 4 --rounds 1 --pairs 6    # shorter

Sessions run side by side; each sends its next step when the last is answered, so its prompt is
there as it was in the trace (what this model answered is not in it). Every round runs the radix
tree, the flat hash cache (as in vLLM) and no cache, each from empty; figures are of all rounds.

Then unique prompts, at 0 % hits: pairs of the same batch with the radix tree and without a cache,
in alternating order. Two figures, both medians over the pairs: the ratio of the wall times, and,
less noisy, the difference of the time outside the model as a share of the whole.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from baseline_results import Recorder, Result, table
from baseline_systems import SYSTEMS, Choice, Limits, LoadedModel, System, TimedRunner, build_core
from baseline_workloads import Item
from baselines import drive, make_request
from common import describe_machine

from octavo.core.config import CacheConfig
from octavo.engine.core import EngineCore
from octavo.models.checkpoint import open_checkpoint
from octavo.models.source import default_cache_dir, resolve_model
from octavo.models.tokenizer import load_tokenizer

SESSIONS = Path(__file__).resolve().parents[2] / "shared/traces/miniswe"
COMPARED = [system for system in SYSTEMS if system.name in ("paged", "paged-flat", "paged-radix")]
UNCACHED, _, RADIX = COMPARED
Session = list[Item]


def read_sessions(folder: Path, model: str, args: argparse.Namespace) -> list[Session]:
    """Return the first steps of each session as the model's tokens, cut to its context."""
    paths = sorted(folder.glob("*.jsonl"))[: args.sessions]
    if not paths:
        raise SystemExit(f"{folder} holds no sessions: name the folder with --trace.")
    checkpoint = open_checkpoint(resolve_model(model, cache_dir=default_cache_dir()).path)
    tokenizer = load_tokenizer(
        checkpoint.tokenizer_source, model_vocab_size=checkpoint.config.vocab_size
    )
    sessions = []
    for number, path in enumerate(paths):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows.sort(key=lambda row: float(row["timestamp"]))
        prompts = [tokenizer.encode(row["input"]) for row in rows[: args.steps]]
        room = args.max_model_len - args.output
        sessions.append(
            [
                Item(f"s{number}.{step}", tuple(prompt[:room]), args.output, 0.0)
                for step, prompt in enumerate(prompts)
            ]
        )
    return sessions


def run_sessions(core: EngineCore, sessions: Sequence[Session]) -> tuple[Recorder, float]:
    """Run all sessions side by side, the steps of each one after the other."""
    recorder = Recorder()
    left = {f"s{number}": list(reversed(items)) for number, items in enumerate(sessions)}
    start = time.monotonic()
    for items in left.values():
        core.add(make_request(items.pop(), time.monotonic()))
    while core.has_work():
        before = time.monotonic()
        update = core.step()
        recorder.add(update, core.occupancy(), core.stats(), time.monotonic() - before)
        for stats in update.finished:
            items = left[stats.request_id.partition(".")[0]]
            if items:
                core.add(make_request(items.pop(), time.monotonic()))
    return recorder, time.monotonic() - start


class Bench:
    """The model and what it runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.limits = Limits(
            max_model_len=args.max_model_len,
            num_blocks=args.kv_tokens // args.block_size,
            block_size=args.block_size,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            watermark=CacheConfig(1).watermark,
        )
        self.model = LoadedModel(Choice.from_arguments(args), self.limits)

    def core(self, system: System) -> tuple[EngineCore, TimedRunner]:
        """Return an engine with an empty cache."""
        runner = TimedRunner(self.model.runner(self.limits), time.monotonic)
        core = build_core(system, self.limits, self.model.vocab_size, runner, time.monotonic)
        return core, runner

    def sessions(self, sessions: Sequence[Session], rounds: int) -> None:
        """Print what each cache makes of the sessions."""
        found: dict[str, list[Result]] = {system.name: [] for system in COMPARED}
        for number in range(rounds):
            for system in COMPARED[number % 3 :] + COMPARED[: number % 3]:
                core, _ = self.core(system)
                recorder, seconds = run_sessions(core, sessions)
                found[system.name].append(recorder.result(seconds, core.stats()))
                print(f"  ... round {number}, {system.name}: {seconds:.1f} s", flush=True)
        pooled = {name: pool(results) for name, results in found.items()}
        print(f"\n{table(pooled)}\n")
        _report(pooled)

    def cost(self, pairs: int, prompt: int, output: int) -> None:
        """Print what the radix tree costs where nothing is ever found in it."""
        rng = random.Random(7)
        cores = {system.name: self.core(system) for system in (UNCACHED, RADIX)}
        ratios, shares, micros = [], [], []
        for number in range(pairs + 1):
            whole: dict[str, float] = {}
            outside: dict[str, float] = {}
            names = [UNCACHED.name, RADIX.name]
            for name in names if number % 2 else reversed(names):
                tokens = [
                    tuple(rng.randrange(self.model.vocab_size) for _ in range(prompt))
                    for _ in range(16)
                ]
                items = [Item(f"{number}.{i}", ids, output, 0.0) for i, ids in enumerate(tokens)]
                core, runner = cores[name]
                runner.steps.clear()
                result = drive(core, time.monotonic, time.sleep, items, concurrency=16)
                whole[name] = result.seconds
                outside[name] = result.seconds - sum(step[2] for step in runner.steps)
            if number:  # the first warms up
                ratios.append(whole[RADIX.name] / whole[UNCACHED.name])
                more = outside[RADIX.name] - outside[UNCACHED.name]
                shares.append(more / whole[UNCACHED.name])
                micros.append(1e6 * more / (16 * (prompt + output)))
        hits = cores[RADIX.name][0].stats().prefix_hits_total
        evictions = cores[RADIX.name][0].stats().evictions_total
        print(
            f"0 % hits ({hits} tokens hit, {evictions} blocks evicted): {pairs} pairs of 16 "
            f"unique prompts of {prompt} tokens, {output} tokens each\n"
            f"  wall time with the radix tree / without a cache: median {_median(ratios):.4f}\n"
            f"  time outside the model, more with it: median {_median(shares):.2%} of the whole, "
            f"{_median(micros):.2f} us a token"
        )


def pool(results: Sequence[Result]) -> Result:
    """Return all rounds as one: their requests together, the first's averages."""
    first = results[0]
    return Result(
        seconds=sum(result.seconds for result in results),
        num_requests=sum(result.num_requests for result in results),
        num_output_tokens=sum(result.num_output_tokens for result in results),
        normalised_s=[value for result in results for value in result.normalised_s],
        ttft_s=[value for result in results for value in result.ttft_s],
        tpot_s=[value for result in results for value in result.tpot_s],
        memory=first.memory,
        peak_allocated_slots=max(result.peak_allocated_slots for result in results),
        waste_ratio=first.waste_ratio,
        mean_running=first.mean_running,
        hit_ratio=_median([result.hit_ratio for result in results]),
        num_preemptions=sum(result.num_preemptions for result in results),
        digests=first.digests,
    )


def _report(pooled: dict[str, Result]) -> None:
    radix = pooled[RADIX.name]
    for name, other in pooled.items():
        if other is not radix:
            ttft = _median(list(radix.ttft_s)) / _median(list(other.ttft_s))
            same = sum(a == b for a, b in zip(other.digests, radix.digests, strict=True))
            print(
                f"{RADIX.name} against {name:<11} {other.seconds / radix.seconds:5.2f} x "
                f"requests/s, {ttft:5.2f} x median TTFT, hits {radix.hit_ratio:.1%} against "
                f"{other.hit_ratio:.1%}, same tokens in {same} of {len(radix.digests)} requests"
            )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else float("nan")


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    Choice.add_arguments(parser)
    parser.add_argument("--trace", type=Path, default=SESSIONS, help="folder of sessions")
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="first steps of each session")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20, help="of the run at 0 %% hits")
    parser.add_argument("--max-model-len", type=int, default=6144)
    parser.add_argument("--kv-tokens", type=int, default=32768, help="the KV memory, in tokens")
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    sessions = read_sessions(args.trace, args.model, args) if args.rounds else []
    bench = Bench(args)
    prompts = [len(item.prompt) for items in sessions for item in items]
    print(
        f"{describe_machine()}; {bench.model.what}; {len(sessions)} sessions, {len(prompts)} "
        f"prompts of {sum(prompts)} tokens (longest {max(prompts, default=0)}); "
        f"{bench.limits.num_slots:,} tokens of KV",
        flush=True,
    )
    if args.rounds:
        bench.sessions(sessions, args.rounds)
    if args.pairs:
        bench.cost(args.pairs, prompt=128, output=16)


if __name__ == "__main__":
    main()
