"""The offline front end, as vLLM users call it."""

import math
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.core.errors import ContextLengthError, InvalidRequestError, LoadError
from octavo.core.request import FinishReason
from octavo.engine.outputs import scaled
from support_loading import write_hf_folder

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_hf_folder(tmp_path_factory.mktemp("llm") / "tiny", "llama")
    # float32: rounded to 8 bits or bfloat16, near-ties hang on who shares a step
    return LLM(folder, kv_cache_memory_bytes=4 << 20, max_model_len=128, seed=0, dtype="float32")


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **changes)


def test_results_come_in_the_order_of_prompts(llm: LLM) -> None:
    """Turns red when results follow the order in which requests end."""
    prompts = ["a", "much longer than the others", "b b"]
    params = [greedy(max_tokens=count) for count in (9, 1, 5)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [out.prompt for out in outputs] == prompts
    assert [len(out.outputs[0].token_ids) for out in outputs] == [9, 1, 5]


def test_one_prompt_of_text_or_ids(llm: LLM) -> None:
    """Turns red when a single prompt, as text or as token ids, is taken for several."""
    (text,) = llm.generate("hello", greedy(max_tokens=4), use_tqdm=False)
    (ids,) = llm.generate(list(text.prompt_token_ids), greedy(max_tokens=4), use_tqdm=False)
    assert ids.outputs[0].token_ids == text.outputs[0].token_ids
    assert ids.prompt is None


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    """Turns red when the prompts before a refused one keep running in the engine."""
    with pytest.raises(ContextLengthError):
        llm.generate(["fine", "x" * 500], greedy(max_tokens=4), use_tqdm=False)
    assert not llm.parts.core.has_work()
    assert llm.parts.core.stats().usage.num_used == 0


@pytest.mark.parametrize("calls_before", range(0, 120, 7))
def test_ctrl_c_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, calls_before: int
) -> None:
    """Turns red when Ctrl-C cuts a step in half, or requests of a stopped call live on."""
    prompts = ["one two", "three"]
    expected = llm.generate(prompts, greedy(max_tokens=12), use_tqdm=False)
    core, calls = llm.parts.core, 0

    def tick(real: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == calls_before + 1:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        for owner, names in (
            (core._scheduler, ("add", "schedule", "update")),
            (core._runner, ("execute",)),
        ):
            for name in names:
                patch.setattr(owner, name, partial(tick, getattr(owner, name)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([*prompts, "f" * 60] * 3, greedy(max_tokens=60), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not core.has_work()
    assert core.stats().usage.num_used == 0
    again = llm.generate(prompts, greedy(max_tokens=12), use_tqdm=False)
    assert [out.outputs for out in again] == [out.outputs for out in expected]


def test_a_callers_own_interrupt_handler_keeps_working(llm: LLM) -> None:
    """Turns red when a program that handles Ctrl-C itself loses its handler."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        signal.raise_signal(signal.SIGINT)
        llm.generate("a", greedy(max_tokens=2), use_tqdm=False)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] * 2


def test_threads_take_turns(llm: LLM) -> None:
    """Turns red when two threads drive one engine at once."""
    prompts = ["one two", "three", "four"]
    expected = llm.generate(prompts, greedy(max_tokens=20), use_tqdm=False)
    answers: list[Any] = []

    def work() -> None:
        answers.append(llm.generate(prompts, greedy(max_tokens=20), use_tqdm=False))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[out.outputs for out in answer] for answer in answers] == [
        [out.outputs for out in expected]
    ] * 4


def test_several_completions(llm: LLM) -> None:
    """ST-15: turns red when one of n completions is missing."""
    (out,) = llm.generate("go", SamplingParams(n=3, max_tokens=6, seed=1), use_tqdm=False)
    assert [completion.index for completion in out.outputs] == [0, 1, 2]
    assert len({completion.token_ids for completion in out.outputs}) == 3


def test_embeddings(llm: LLM) -> None:
    """Turns red when a vector belongs to another prompt, depends on company or on what is cached,
    has another length than asked, or a pooled prompt leaves something behind."""
    prompts = ["a", "much longer than the others", [98, 99, 100]]
    for pooling in ("last", "mean"):
        together = llm.embed(prompts, pooling=pooling)
        assert [len(item.prompt_token_ids) for item in together] == [1, 27, 3]
        for prompt, item in zip(prompts, together, strict=True):
            (alone,) = llm.embed(prompt, pooling=pooling, normalize=False)
            assert math.isclose(math.hypot(*item.embedding), 1.0, rel_tol=1e-6)
            assert item.embedding == pytest.approx(scaled(alone.embedding), abs=1e-4)
    last, mean = (llm.embed("abc", pooling=pooling)[0].embedding for pooling in ("last", "mean"))
    assert last != pytest.approx(mean, abs=1e-3)
    assert scaled((0.0, 0.0)) == (0.0, 0.0)
    with pytest.raises(InvalidRequestError, match="pooling"):
        llm.embed("a", pooling="max")  # type: ignore[arg-type]
    assert llm.parts.core.stats().usage.num_used == 0


def test_bad_words_and_allowed_tokens_offline(llm: LLM) -> None:
    """Turns red when vLLM's ways to forbid tokens do nothing offline."""
    free = llm.generate("a", greedy(max_tokens=12))[0].outputs[0]
    bound = llm.generate("a", greedy(max_tokens=12, allowed_token_ids=(65, 66)))[0].outputs[0]
    assert set(bound.token_ids) <= {65, 66}
    word = bytes([bound.token_ids[0]]).decode()
    other = greedy(max_tokens=12, allowed_token_ids=(65, 66), bad_words=(word,))
    assert word not in llm.generate("a", other)[0].outputs[0].text
    assert len(free.token_ids) == 12


def test_wrong_calls_are_refused_by_name(llm: LLM) -> None:
    """Turns red when a caller's mistake is not told in one sentence."""
    with pytest.raises(InvalidRequestError, match="one each"):
        llm.generate(["a", "b"], [greedy()], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        llm.chat(FRANCE, chat_template_kwargs={"add_generation_prompt": False})
    with pytest.raises(LoadError):
        LLM(Path("/no/such/model"))


@pytest.mark.model
def test_capital_of_france(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Turns red when the default model no longer answers, or no progress is shown."""
    llm = LLM(model_path, max_model_len=256, kv_cache_memory_bytes=64 << 20)
    (out,) = llm.chat(FRANCE, greedy(max_tokens=20))
    assert out.outputs[0].text == "The capital of France is Paris."
    assert out.outputs[0].finish_reason is FinishReason.STOP
    assert "Processed prompts" in capsys.readouterr().err
    (again,) = llm.chat([FRANCE], greedy(max_tokens=20), use_tqdm=False)
    assert again.outputs == out.outputs
    assert again.num_cached_tokens == 32
