"""Octavo against OpenVINO GenAI, llama.cpp and vLLM on CPUs: same model, same tokens, side by side.

``python benchmarks/peers/compare.py`` makes what is missing, then measures; see README.md.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from chart import svg
from command_line import check_peers, say, unwind_on_sigterm
from conversions import ModelFormats
from environments import PEERS, PeerUnavailable, ensure_environment, peers_cache
from machine import cpu_times, describe_machine, measure_ceilings, stolen_share
from process import Worker, WorkerError
from report import Comparison, Loaded, Measurement, markdown
from scenarios import GROUPS, SCENARIOS, Prompt, PromptMaker, Scenario, chosen
from variants import OCTAVO, PEER_VARIANTS, Launcher, Variant, octavo_variant

from octavo.models.checkpoint import open_checkpoint
from octavo.models.source import default_cache_dir, resolve_model

MAX_MODEL_LEN: Final = 8192
"""Context length of every engine, whatever the scenarios, so that vLLM compiles only once."""
IDLE_S: Final = 2.0
"""Before each run, as between the bursts of a server. Being stopped is not being idle: an engine
could then not do what it puts off until nobody waits for it."""
WARM_UP_TOKENS: Final = 8
BUSY_LOAD: Final = 0.5


@dataclass
class Field:
    """The engines that are still in the race, and why others are not."""

    workers: dict[str, Worker] = field(default_factory=dict)
    loaded: list[Loaded] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)

    def enter(self, variant: Variant, launcher: Launcher) -> None:
        """Start an engine, or note why it cannot be."""
        say(f"Loading {variant.name} ...")
        try:
            worker = launcher.start(variant)
        except (PeerUnavailable, WorkerError) as error:
            self.absent[variant.name] = str(error)
            say(f"{variant.name} stays out: {error}")
            return
        self.workers[variant.name] = worker
        made = None
        if variant.peer != OCTAVO:
            made = ensure_environment(PEERS[variant.peer], launcher.cache)
        self.loaded.append(
            Loaded(
                variant,
                worker.version,
                worker.load_s,
                worker.settings,
                made.install_s if made else None,
                made.size_mb if made else None,
            )
        )

    def drop(self, name: str, scenario: Scenario, error: WorkerError) -> None:
        """Take out an engine that failed."""
        self.absent[name] = f"It fell out at {scenario.name}: {error}"
        say(f"{name} falls out at {scenario.name}: {error}")
        self.workers.pop(name).close()

    def close(self) -> None:
        """End all engines."""
        for worker in self.workers.values():
            worker.close()


@dataclass(frozen=True)
class Batch:
    """The prompts of one scenario in one round, the same for every engine."""

    scenario: Scenario
    round: int
    prompts: Sequence[Prompt]
    warm_up: Sequence[Prompt]

    @classmethod
    def of(cls, scenario: Scenario, number: int, maker: PromptMaker) -> "Batch":
        """Draw new prompts."""
        warm_up = replace(scenario, prompt_lengths=(32,))
        return cls(scenario, number, maker.prompts(scenario), maker.prompts(warm_up))

    def measure(self, name: str, worker: Worker) -> Measurement:
        """Run it once, after a while without work and a few tokens that bring the engine's weights
        back into the caches."""
        scenario = self.scenario
        worker.idle(IDLE_S)
        worker.run(self.warm_up, WARM_UP_TOKENS)
        streamed = scenario.figure == "decode"
        before = cpu_times()
        run = worker.run(self.prompts, scenario.max_tokens, streamed=streamed)
        return Measurement(
            scenario=scenario.name,
            variant=name,
            round=self.round,
            wall_s=run.wall_s,
            figure=scenario.value(run.wall_s, run.times_s),
            stolen_share=stolen_share(before, cpu_times()),
            times_s=run.times_s,
            tokens=tuple(tuple(tokens) for tokens in run.tokens),
        )


def race(
    field_: Field, scenarios: Sequence[Scenario], rounds: int, maker: PromptMaker, threads: int
) -> tuple[list[Measurement], list[dict[str, Any] | None]]:
    """Measure round by round, the engines in turn and each round another one first."""
    measurements: list[Measurement] = []
    ceilings = []
    for number in range(rounds):
        ceilings.append(measure_ceilings(threads))
        for scenario in scenarios:
            batch = Batch.of(scenario, number, maker)
            names = list(field_.workers)
            turn = number % max(1, len(names))
            for name in names[turn:] + names[:turn]:
                try:
                    done = batch.measure(name, field_.workers[name])
                except WorkerError as error:
                    field_.drop(name, scenario, error)
                else:
                    measurements.append(done)
                    figure = f"{done.figure:9.4g} {scenario.unit}"
                    say(f"round {number + 1}/{rounds}  {scenario.name:<11} {name:<18} {figure}")
    return measurements, ceilings


def compare(arguments: argparse.Namespace) -> Comparison:
    """Make, load and measure what was asked for."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])
    machine = describe_machine()
    if machine.load_average > BUSY_LOAD:
        say(f"Others are at work (load average {machine.load_average:.1f}): expect noise.")
    cache = peers_cache(arguments.cache)
    source = resolve_model(arguments.model, cache_dir=default_cache_dir()).path
    max_model_len = min(MAX_MODEL_LEN, open_checkpoint(source).config.max_position)
    scenarios = [item for item in chosen(arguments.scenarios) if item.max_len <= max_model_len]
    formats = ModelFormats.of(source, cache)
    launcher = Launcher(formats, cache, arguments.threads, max_model_len, say)
    field_ = Field()
    try:
        for variant in _variants(arguments):
            field_.enter(variant, launcher)
        maker = PromptMaker(source, arguments.seed)
        measurements, ceilings = race(field_, scenarios, arguments.rounds, maker, arguments.threads)
    finally:
        field_.close()
    return Comparison(
        model=source.name,
        threads=arguments.threads,
        machine=machine,
        ceilings=tuple(ceilings),
        scenarios=tuple(scenarios),
        engines=tuple(field_.loaded),
        absent=field_.absent,
        measurements=tuple(measurements),
    )


def _variants(arguments: argparse.Namespace) -> list[Variant]:
    named = {name: getattr(arguments, name) for name in ("backend", "dtype", "quantization")}
    settings = {name: value for name, value in named.items() if value is not None}
    octavos = [octavo_variant(text) for text in arguments.octavo or [OCTAVO]]
    octavos = [replace(item, settings={**settings, **item.settings}) for item in octavos]
    peers = [
        item
        for item in PEER_VARIANTS
        if item.peer in arguments.peers or item.name in arguments.peers
    ]
    return octavos + peers


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2", help="a GGUF file or an alias")
    add(
        "--peers", nargs="*", default=list(PEERS), help="peers or their variants; none: Octavo only"
    )
    add("--octavo", action="append", help="NAME:setting=value,...; once for each variant of Octavo")
    add("--backend", help="Octavo's, for all its variants that name none")
    add("--dtype", help="likewise")
    add("--quantization", help="likewise")
    add("--scenarios", nargs="+", default=["default"], help="names or groups: see --list")
    add("--rounds", type=int, default=5)
    add("--threads", type=int, default=2, help="of each engine; all run on the same CPUs")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--cache", help="folder of environments, models and results")
    add("--output", help="folder for report.md, results.json and chart.svg")
    add("--list", action="store_true", help="list scenarios and variants, and stop")
    arguments = parser.parse_args()
    check_peers(parser, arguments.peers)
    if unknown := sorted(set(arguments.scenarios) - {*SCENARIOS, *GROUPS}):
        parser.error(f"there is no scenario {unknown[0]!r}; see --list")
    return arguments


def main() -> int:
    """Compare, then print and write the report."""
    unwind_on_sigterm()
    arguments = _arguments()
    if arguments.list:
        print("scenarios:", *SCENARIOS, "\ngroups:", *GROUPS)
        print("variants:", OCTAVO, *(item.name for item in PEER_VARIANTS))
        return 0
    comparison = compare(arguments)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    default = peers_cache(arguments.cache) / "results" / stamp
    folder = Path(arguments.output) if arguments.output else default
    folder.mkdir(parents=True, exist_ok=True)
    report = markdown(comparison)
    (folder / "report.md").write_text(report + "\n")
    (folder / "results.json").write_text(json.dumps(comparison.as_dict(), indent=1))
    (folder / "chart.svg").write_text(svg(comparison))
    print(report)
    say(f"Written to {folder}")
    return 0 if comparison.measurements else 1


if __name__ == "__main__":
    sys.exit(main())
