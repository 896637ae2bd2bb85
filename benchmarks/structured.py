"""Structured output: forward passes saved by jump-forward, equality of answers, time of masks.

python benchmarks/structured.py
python benchmarks/structured.py --suite JSON-Schema-Test-Suite.tar.xz

The first compares three ways to follow the same schemas, greedily, one request at a time:

* ``jump``: forced tokens are appended without a forward pass each.
* ``plain``: a mask at every token. llguidance's mask allows, where text is forced, only the token
  that the tokenizer would write, so this can differ from ``jump`` by rounding alone.
* ``free``: masks that allow every spelling of a forced text; what a grammar without a tokenizer
  would do. Here the model may choose tokens that its tokenizer never writes.

The second walks at random through the schemas of the JSON Schema test suite, with the model's
vocabulary but without the model, and checks each finished answer with the jsonschema library.
"""

import argparse
import asyncio
import json
import random
import re
import tarfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import describe_machine, quantile
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend, validator_for

from octavo.core.errors import InvalidRequestError
from octavo.core.events import Event, StepCompleted
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.engine.factory import EngineParts, EngineSettings, async_engine, build_engine
from octavo.models.source import default_cache_dir, resolve_model
from octavo.runner.grammar_source import JSON_OPTIONS

TEXT = {"type": "string", "maxLength": 24}
COUNT = {"type": "integer", "minimum": 0, "maximum": 9999999}


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def one_of(*values: str) -> dict[str, Any]:
    """Return the schema of a choice."""
    return {"enum": list(values)}


TASKS: dict[str, dict[str, Any]] = {
    "Describe the city of Paris.": record(
        name=TEXT, country=TEXT, population=COUNT, continent=one_of("Europe", "Asia", "Africa")
    ),
    "Describe the city of Tokyo.": record(
        city_name=TEXT, population_in_millions=COUNT, capital=TEXT
    ),
    "Classify this ticket: my parcel never came.": record(
        category=one_of("delivery", "payment", "account"),
        priority=one_of("low", "medium", "high"),
        needs_human_agent={"type": "boolean"},
    ),
    "Rate this review: great phone, poor battery.": record(
        sentiment=one_of("positive", "negative", "mixed"),
        stars={"type": "integer", "minimum": 1, "maximum": 5},
        mentioned_features={"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2},
    ),
    "Book a flight from Rome to Oslo for two.": record(
        origin=record(city=TEXT, country_code=TEXT),
        destination=record(city=TEXT, country_code=TEXT),
        number_of_passengers=COUNT,
    ),
    "Make a character sheet for a wizard.": record(
        character_name=TEXT,
        character_class=TEXT,
        attributes=record(strength=COUNT, dexterity=COUNT, intelligence=COUNT, wisdom=COUNT),
    ),
    "Write an invoice for three chairs.": record(
        invoice_number=TEXT,
        line_items={
            "type": "array",
            "items": record(description=TEXT, quantity=COUNT, unit_price=COUNT),
            "minItems": 1,
            "maxItems": 2,
        },
        currency=one_of("EUR", "USD"),
    ),
    "What is the weather like in May?": record(
        month=TEXT, average_temperature_celsius=COUNT, chance_of_rain_percent=COUNT
    ),
    "Extract the contact: Ann Lee, ann@lee.org.": record(
        first_name=TEXT, last_name=TEXT, email_address=TEXT, phone_number={"type": "null"}
    ),
    "Plan a workout.": record(
        exercise_name=TEXT, number_of_sets=COUNT, repetitions_per_set=COUNT, rest_in_seconds=COUNT
    ),
}


class PassCounter:
    """An observer that counts forward passes."""

    def __init__(self) -> None:
        self.num_passes = 0

    def on_event(self, event: Event) -> None:
        """Count a step."""
        self.num_passes += isinstance(event, StepCompleted)


@dataclass(frozen=True)
class Answer:
    """What came of one task, and at what cost."""

    text: str
    token_ids: tuple[int, ...]
    num_passes: int
    seconds: float


def free_shape(schema: dict[str, Any]) -> StructuredOutput:
    """Return a shape whose mask allows every spelling of what is forced."""
    text = json.dumps({**schema, "x-guidance": dict(JSON_OPTIONS)})
    return StructuredOutput.grammar(f'%llguidance {{"no_forcing": true}}\nstart: %json {text}')


async def answers(model: Path, *, jump: bool, free: bool, max_tokens: int) -> list[Answer]:
    """Answer all tasks on an engine of their own."""
    counter = PassCounter()
    settings = EngineSettings(
        model=model,
        served_model_name="model",
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        enable_jump_forward=jump,
    )
    parts = build_engine(settings, counter)
    engine = async_engine(parts)
    engine.start()
    found = []
    try:
        for index, (task, schema) in enumerate(TASKS.items()):
            shape = free_shape(schema) if free else StructuredOutput.json_schema(schema)
            message = {"role": "user", "content": f"{task} Answer in JSON."}
            prompt = parts.tokenizer.encode(
                parts.tokenizer.render_chat([message]), add_special_tokens=False
            )
            sampling = SamplingParams(
                temperature=0.0, max_tokens=max_tokens, structured_output=shape
            )
            before, started = counter.num_passes, time.perf_counter()
            deltas = [d async for d in engine.generate(prompt, sampling, request_id=f"r{index}")]
            found.append(
                Answer(
                    "".join(delta.text for delta in deltas),
                    tuple(i for delta in deltas for i in delta.token_ids),
                    counter.num_passes - before,
                    time.perf_counter() - started,
                )
            )
    finally:
        engine.shutdown()
    return found


def compare(tokenizer: Any, name: str, ours: Sequence[Answer], theirs: Sequence[Answer]) -> None:
    """Print how many answers are equal, and where each of the others first differs."""
    same_tokens = sum(a.token_ids == b.token_ids for a, b in zip(ours, theirs, strict=True))
    same_texts = sum(a.text == b.text for a, b in zip(ours, theirs, strict=True))
    print(f"jump = {name}: tokens {same_tokens} of {len(ours)}, texts {same_texts} of {len(ours)}")
    for task, a, b in zip(TASKS, ours, theirs, strict=True):
        if a.text == b.text:
            continue
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        place = next(i for i, (x, y) in enumerate(pairs) if x != y)
        spelt = [tokenizer.token_text(answer.token_ids[place]) for answer in (a, b)]
        print(f"  {task} first differs at token {place}: {spelt[0]!r}, {name} {spelt[1]!r}")
        print(f"    jump {a.text}\n    {name} {b.text}")


def mask_times(parts: EngineParts, found: Sequence[Answer]) -> list[float]:
    """Return the CPU seconds of each mask that the answers needed."""
    assert parts.grammars is not None
    times = []
    for schema, answer in zip(TASKS.values(), found, strict=True):
        matcher = parts.grammars.compile(StructuredOutput.json_schema(schema)).new_matcher()
        for token_id in answer.token_ids:
            started = time.thread_time()
            matcher.compute_bitmask()
            times.append(time.thread_time() - started)
            matcher.consume_token(token_id)
    return times


async def run_tasks(model: Path, max_tokens: int) -> None:
    """Compare the three ways and print what each cost."""
    runs: dict[str, list[Answer]] = {}
    for name in ("jump", "plain", "free"):
        found = await answers(
            model, jump=name == "jump", free=name == "free", max_tokens=max_tokens
        )
        runs[name] = found
        print(
            f"{name}: {sum(a.num_passes for a in found)} forward passes for "
            f"{sum(len(a.token_ids) for a in found)} tokens, {sum(a.seconds for a in found):.1f} s",
            flush=True,
        )
    passes = {name: sum(a.num_passes for a in found) for name, found in runs.items()}
    print(f"forward passes saved by jump-forward: {1 - passes['jump'] / passes['plain']:.1%}")
    parts = build_engine(
        EngineSettings(model=model, served_model_name="model", kv_cache_memory_bytes=64 << 20),
        PassCounter(),
    )
    compare(parts.tokenizer, "plain", runs["jump"], runs["plain"])
    compare(parts.tokenizer, "free", runs["jump"], runs["free"])
    times = [1e6 * seconds for seconds in mask_times(parts, runs["plain"])]
    print(
        f"mask time over {len(times)} tokens: p50 {quantile(times, 0.5):.0f} us, "
        f"p99 {quantile(times, 0.99):.0f} us, max {max(times):.0f} us"
    )


def suite(archive: Path) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of the test suite, each with its place."""
    drafts = {"draft2020-12": "draft/2020-12/schema", "draft7": "draft-07/schema#"}
    with tarfile.open(archive) as tar:
        for member in tar:
            draft = next((d for d in drafts if member.name.startswith(f"tests/{d}/")), None)
            file = tar.extractfile(member)
            if draft is None or file is None or not member.name.endswith(".json"):
                continue
            for group in json.load(file):
                schema = group["schema"]
                if isinstance(schema, dict):
                    host = "http" if draft == "draft7" else "https"
                    uri = f"{host}://json-schema.org/{drafts[draft]}"
                    schema = {"$schema": uri, **schema}
                yield f"{member.name}: {group['description']}", schema


def walk(parts: EngineParts, matcher: Any, rng: random.Random, max_tokens: int) -> bytes | None:
    """Return the bytes of a random answer; None if it has no end after ``max_tokens``."""
    ends = parts.tokenizer.end_token_ids
    tokens: list[int] = []
    while len(tokens) < max_tokens and not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        closing = [i for i in allowed[:400] if parts.tokenizer.token_bytes(int(i)) in CLOSING]
        token_id = int(rng.choice(closing if closing and rng.random() < 0.5 else allowed))
        if not matcher.consume_token(token_id):
            return None
        tokens.append(token_id)
    if not matcher.is_stopped():
        return None
    return b"".join(parts.tokenizer.token_bytes(i) for i in tokens if i not in ends)


CLOSING = (b'"', b"}", b"]", b"<|im_end|>")


def search_pattern(
    validator: Any, pattern: str, instance: object, schema: Any
) -> Iterator[ValidationError]:
    r"""Check ``pattern`` as the specification has it: \w and \d are ASCII, unlike in Python."""
    for theirs, ours in ((r"\w", "[A-Za-z0-9_]"), (r"\W", "[^A-Za-z0-9_]"), (r"\d", "[0-9]")):
        pattern = pattern.replace(theirs, ours)
    if isinstance(instance, str) and not re.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def run_suite(model: Path, archive: Path, walks: int) -> None:
    """Walk through every schema that is not refused, and print the counts."""
    parts = build_engine(
        EngineSettings(model=model, served_model_name="model", kv_cache_memory_bytes=64 << 20),
        PassCounter(),
    )
    assert parts.grammars is not None
    rng = random.Random(0)
    schemas: Counter[str] = Counter()
    instances: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for place, schema in suite(archive):
        try:
            grammar = parts.grammars.compile(StructuredOutput.json_schema(schema))
        except InvalidRequestError as error:
            schemas["refused"] += 1
            reasons[re.sub(r"[\"'].*", "…", error.message.partition(": ")[2])] += 1
            continue
        schemas["accepted"] += 1
        kind = validator_for(schema, default=Draft202012Validator)
        for _ in range(walks):
            data = walk(parts, grammar.new_matcher(), rng, 200)
            if data is None:
                instances["cut at 200 tokens"] += 1
                continue
            try:
                extend(kind, {"pattern": search_pattern})(schema).validate(json.loads(data))
                instances["valid"] += 1
            except re.error:
                instances["not judged"] += 1
            except (ValueError, ValidationError) as error:
                instances["invalid"] += 1
                print(f"{place}: {data!r}: {error.args[0]}")
    print(f"schemas: {dict(schemas)}; instances: {dict(instances)}")
    for why, count in reasons.most_common():
        print(f"  refused {count}: {why}")


def main() -> None:
    """Read the arguments and run what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=120)
    parser.add_argument("--suite", type=Path, help="archive of the JSON Schema test suite")
    parser.add_argument("--walks", type=int, default=3, help="random answers per schema")
    args = parser.parse_args()
    model = resolve_model(args.model, cache_dir=default_cache_dir()).path
    print(describe_machine())
    if args.suite is not None:
        run_suite(model, args.suite, args.walks)
    else:
        asyncio.run(run_tasks(model, args.max_tokens))


if __name__ == "__main__":
    main()
