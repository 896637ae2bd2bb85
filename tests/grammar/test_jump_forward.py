"""Jump-forward: fewer forward passes, the same answers."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.core.structured import StructuredOutput
from octavo.engine.factory import EngineParts
from octavo.models.checkpoint import open_checkpoint
from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.runner.grammar import GrammarCompiler
from support_engine import Recorder, byte_tokenizer, tiny_parts
from support_grammar import GREEDY, ask, ask_all, fits, grammar_setup, vocabulary

SO = StructuredOutput
WORDS = ("name", "id", "population", "order", "orderId", "a b", "x", "é", "kind", "unit_price")


def schemas(count: int) -> Iterator[dict[str, Any]]:
    """Yield objects with templated keys, as answers in production have them."""
    rng = random.Random(7)
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 6},
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"enum": ["red", "green", "greenish"]},
        {"type": "boolean"},
        {"const": "fixed text"},
        {"type": "array", "items": {"enum": ["on", "off"]}, "maxItems": 2},
    ]
    for _ in range(count):
        keys = rng.sample(WORDS, rng.randint(1, 4))
        yield {
            "type": "object",
            "properties": {key: rng.choice(kinds) for key in keys},
            "required": keys[: rng.randint(0, len(keys))],
            "additionalProperties": False,
        }


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineParts, EngineParts]:
    """The same tiny random model, with jump-forward and without."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    settings: dict[str, Any] = {"max_model_len": 256, "debug_invariants": True}
    on = tiny_parts(folder, Recorder(), **settings)
    return on, tiny_parts(folder, Recorder(), enable_jump_forward=False, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_answers_on_and_off(
    engines: tuple[EngineParts, EngineParts], temperature: float
) -> None:
    """CO-10: 50 schemas give the same tokens, texts and reasons with jump-forward on and off."""
    shapes = [SO.json_schema(schema) for schema in schemas(50)]
    params = [
        SamplingParams(temperature=temperature, max_tokens=90, seed=i) for i in range(len(shapes))
    ]
    on, off = (ask_all(parts, shapes, params) for parts in engines)
    assert [a.token_ids for a in on] == [a.token_ids for a in off]
    assert [(a.text, a.reason) for a in on] == [(a.text, a.reason) for a in off]
    for answer, shape in zip(on, shapes, strict=True):
        assert answer.reason is FinishReason.LENGTH or fits(json.loads(shape.text), answer.text)
    assert any(answer.reason is FinishReason.STOP for answer in on)


def test_logprobs_are_the_models_own(engines: tuple[EngineParts, EngineParts]) -> None:
    """CO-10: with logprobs every token, forced or not, has one entry, which is its own and the
    model's: such a request is not jumped."""
    shapes = [SO.json_schema(schema) for schema in schemas(6)]
    params = SamplingParams(temperature=0.0, max_tokens=60, logprobs=2)
    on, off = (ask_all(parts, shapes, params) for parts in engines)
    for answer, plain in zip(on, off, strict=True):
        assert [item.token_id for item in answer.logprobs] == list(answer.token_ids)
        assert answer.token_ids == plain.token_ids
        assert [i.logprob for i in answer.logprobs] == pytest.approx(
            [i.logprob for i in plain.logprobs], abs=1e-4
        )
        assert all(len(item.top) == 2 for item in answer.logprobs)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The vocabulary of bytes."""
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


def test_forced_tokens_cost_no_pass_each(tokenizer: Tokenizer) -> None:
    """Turns red when forced tokens are sampled one by one, or their KV is never computed."""
    text = "all of this is forced, " * 3
    jumping = grammar_setup(tokenizer)
    assert ask(jumping.parts, SO.choice([text])).text == text
    assert len(jumping.runner.steps) == 1
    jumping = grammar_setup(tokenizer)
    middle = SO.regex(f"(a|b){text}(a|b)")
    assert len(ask(jumping.parts, middle).token_ids) == len(text) + 2
    plans = [plan for plan, _ in jumping.runner.steps]
    computed = sum(plan.num_tokens for plan in plans)
    assert computed == len("Answer: ") + 1 + len(text)
    assert len(plans) == 1 + -(-(1 + len(text)) // 32)  # a step has 32 tokens
    plain = grammar_setup(tokenizer, jump_forward=False)
    ask(plain.parts, middle)
    assert len(plain.runner.steps) == len(text) + 2


def test_decodes_do_not_wait_for_forced_tokens(tokenizer: Tokenizer) -> None:
    """Turns red when the long forced run of one sequence stops the decodes of others."""
    setup = grammar_setup(tokenizer, max_num_batched_tokens=10)
    shapes = [None, None, SO.regex(f"a{'g' * 60}(h|i)"), SO.regex(f"b{'g' * 60}(h|i)")]
    params = [replace(GREEDY, max_tokens=40, ignore_eos=True)] * 2 + [GREEDY] * 2
    answers = ask_all(setup.parts, shapes, params)
    assert [len(answer.token_ids) for answer in answers] == [40, 40, 62, 62]
    for free in (0, 1):  # sequences are numbered in the order of adding
        sampled = [free in result.sampled for _, result in setup.runner.steps]
        first, last = sampled.index(True), len(sampled) - sampled[::-1].index(True)
        assert all(sampled[first:last])


def test_forced_tokens_are_cached_as_any(tokenizer: Tokenizer) -> None:
    """CO-10: the prefix cache holds the final ids, forced ones included."""
    setup = grammar_setup(tokenizer)
    shape = SO.regex("(a|b) forced text of some length (c|d)")
    first = ask(setup.parts, shape)
    prompt = [*b"Answer: ", *first.token_ids, 1]
    [again] = ask_all(setup.parts, [None], replace(GREEDY, max_tokens=1), prompt=prompt)
    computed = len(prompt) - 2  # the KV of the last sampled token was never needed
    assert again.num_cached == computed // 4 * 4
    [fresh] = ask_all(
        grammar_setup(tokenizer).parts, [None], replace(GREEDY, max_tokens=1), prompt=prompt
    )
    assert again.token_ids == fresh.token_ids


@pytest.mark.model
def test_only_canonical_tokens_are_forced(model_path: Path) -> None:
    """CO-10, FIELD's trap: what is forced is what the tokenizer would write whatever follows.

    ``order`` is not forced where ``orderId`` may come, nor a token that could merge with the
    first of a free text.
    """
    checkpoint = open_checkpoint(model_path)
    tokenizer = load_tokenizer(checkpoint.tokenizer_source)
    compiler = GrammarCompiler(vocabulary(tokenizer))
    for choices in (
        ["order", "orderId"],
        ["the order of things", "the orderId of things"],
        ['{"name": "', '{"name": "a'],
        ["12", "123", "1234"],
        ["    x", "     x"],
        ["don", "don't"],
    ):
        forced = compiler.compile(SO.choice(choices)).new_matcher().compute_ff_tokens()
        for text in choices:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert ids[: len(forced)] == forced, (text, forced)
    for schema in schemas(20):
        matcher = compiler.compile(SO.json_schema(schema)).new_matcher()
        forced = matcher.compute_ff_tokens()
        text = tokenizer.decode(forced)
        for more in ("", "a", '"', '",', " x", "1", "}"):
            ids = tokenizer.encode(text + more, add_special_tokens=False)
            assert ids[: len(forced)] == forced or text + more not in _starts(schema)


def _starts(schema: dict[str, Any]) -> set[str]:
    """Return the first characters of all answers that are known without a value."""
    first = [f'{{"{key}": ' for key in schema["properties"]]
    return {text[:n] for text in first for n in range(1, len(text) + 1)}
