"""Engines that follow grammars, around a toy model whose tastes a test chooses."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend, validator_for
from numpy.typing import NDArray

from octavo.core.errors import RequestError
from octavo.core.plan import ModelRunnerOutput, SchedulerOutput
from octavo.core.request import FinishReason, TokenLogprobs
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.engine.factory import EngineParts
from octavo.engine.output_processor import OutputProcessor
from octavo.kernels.sampling.numpy_sampler import NumpySampler
from octavo.models.tokenizer import Tokenizer
from octavo.runner.grammar import GrammarCompiler, Vocabulary
from octavo.runner.grammar_rows import GrammarRows
from octavo.runner.runner import Runner
from support_engine import Recorder, byte_tokenizer, fake_parts
from support_runner import BLOCK_SIZE, ToyModel

PROMPT = [ord(c) for c in "Answer: "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
Taste = Callable[[bytes], float]


class TastefulModel(ToyModel):
    """The toy model with a liking for some tokens, by their bytes."""

    def __init__(self, tokenizer: Tokenizer, taste: Taste | None, *, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks, vocab_size=tokenizer.vocab_size)
        tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        likes = [0.0 if taste is None else taste(token) for token in tokens]
        self._likes = np.array(likes, dtype=np.float32)

    def __call__(self, batch: Any) -> NDArray[np.float32]:
        logits = super().__call__(batch) + self._likes
        logits.setflags(write=False)
        return logits


class CountingRunner:
    """Counts forward passes, and keeps each step's plan and result."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps: list[tuple[SchedulerOutput, ModelRunnerOutput]] = []

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        result = self._runner.execute(plan)
        self.steps.append((plan, result))
        return result


@dataclass(frozen=True)
class Setup:
    """An engine, the runner in it, and the compiler that both ends share."""

    parts: EngineParts
    runner: CountingRunner
    compiler: GrammarCompiler
    rows: GrammarRows


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """Describe a tokenizer whose end-of-turn id is the tiny models'."""
    return Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.end_token_ids)


def byte_compiler(folder: Path) -> GrammarCompiler:
    """Return a compiler for the vocabulary of bytes."""
    return GrammarCompiler(vocabulary(byte_tokenizer(folder)))


def grammar_setup(
    tokenizer: Tokenizer,
    taste: Taste | None = None,
    *,
    jump_forward: bool = True,
    num_blocks: int = 256,
    max_model_len: int = 512,
    **sizes: int,
) -> Setup:
    """Build the real scheduler, runner and grammars around a toy model."""
    model = TastefulModel(tokenizer, taste, num_blocks=num_blocks)
    compiler = GrammarCompiler(vocabulary(tokenizer))
    size = tokenizer.vocab_size
    rows = GrammarRows(compiler, vocab_size=size, jump_forward=jump_forward)
    runner = CountingRunner(
        Runner(
            model,
            model.copy_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=8,
            vocab_size=size,
            sampler=NumpySampler(size),
            grammars=rows,
        )
    )
    parts = fake_parts(
        tokenizer,
        Recorder(),
        runner=runner,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        end_token_ids=tokenizer.end_token_ids,
        **sizes,
    )
    return Setup(replace(parts, grammars=compiler), runner, compiler, rows)


@dataclass(frozen=True)
class Answer:
    """One whole completion."""

    text: str
    token_ids: tuple[int, ...]
    reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...]
    error: RequestError | None
    num_cached: int


def ask_all(
    parts: EngineParts,
    shapes: Sequence[StructuredOutput | None],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    prompt: Sequence[int] = PROMPT,
) -> list[Answer]:
    """Run requests side by side to their ends; free text where a shape is None."""
    params = [sampling] * len(shapes) if isinstance(sampling, SamplingParams) else sampling
    processor = OutputProcessor(parts.tokenizer, parts.observer)
    deltas: dict[str, list[Any]] = {}
    held = []
    for index, (shape, param) in enumerate(zip(shapes, params, strict=True)):
        if shape is not None:
            assert parts.grammars is not None
            held.append(parts.grammars.compile(shape))
        request = parts.requests.build(
            prompt, replace(param, structured_output=shape), request_id=f"{id(deltas)}-{index}"
        )
        processor.add(request)
        parts.core.add(request)
        deltas[request.request_id] = []
    while len(processor):
        update = parts.core.step()
        finished = list(update.finished)
        for done in processor.process(update.outputs):
            deltas[done.request_id] += done.deltas
            if done.stopped_after is not None:
                stats = parts.core.finish(done.request_id, done.stopped_after, done.index)
                finished += [] if stats is None else [stats]
        processor.settle(finished)
    return [_answer(items) for items in deltas.values()]


def ask(
    parts: EngineParts, shape: StructuredOutput | None, sampling: SamplingParams = GREEDY
) -> Answer:
    """Run one request to its end."""
    return ask_all(parts, [shape], sampling)[0]


def _answer(deltas: Sequence[Any]) -> Answer:
    return Answer(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(i for delta in deltas for i in delta.token_ids),
        reason=deltas[-1].finish_reason,
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
        error=deltas[-1].error,
        num_cached=deltas[-1].num_cached_tokens,
    )


def _search_pattern(
    validator: Any, pattern: str, instance: object, schema: Any
) -> Iterator[ValidationError]:
    r"""Check ``pattern`` as the specification has it: \w and \d are ASCII, unlike in Python."""
    for theirs, ours in ((r"\w", "[A-Za-z0-9_]"), (r"\W", "[^A-Za-z0-9_]"), (r"\d", "[0-9]")):
        pattern = pattern.replace(theirs, ours)
    if isinstance(instance, str) and not re.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def fits(schema: Mapping[str, Any] | bool, text: str) -> bool:
    """Whether a text is JSON that a schema allows, says the ``jsonschema`` library.

    Raises:
        re.error: the schema has a pattern that this library cannot read.
    """
    kind = validator_for(schema, default=Draft202012Validator)
    try:
        extend(kind, {"pattern": _search_pattern})(schema).validate(json.loads(text))
    except (ValueError, ValidationError):
        return False
    return True
