"""The front end of servers: streams, aborts, failures and what is counted."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from octavo.core.errors import ContextLengthError, InvalidRequestError, UnavailableError
from octavo.core.events import RequestFinished, StateChanged, StepCompleted
from octavo.core.plan import ModelRunnerOutput, SchedulerOutput
from octavo.core.request import FinishReason
from octavo.core.sampling import SamplingParams
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.core import STEP_FAILED
from octavo.engine.outputs import GenerationDelta
from octavo.models.tokenizer import Tokenizer
from octavo.runner.fake import Faults
from support import PATIENCE_S
from support_engine import Held, Recorder, byte_tokenizer, collect, fake_parts, running, text_of

PROMPT = list(b"The quick brown fox")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


async def settled(engine: AsyncEngine) -> None:
    """Wait until the engine has had its last word on everything."""
    assert await engine.drain(PATIENCE_S)


async def test_stream_is_the_whole_completion(tokenizer: Tokenizer) -> None:
    """Turns red when a token is lost, doubled or reordered on its way across the border."""
    recorder = Recorder()
    async with running(fake_parts(tokenizer, recorder)) as engine:
        deltas = await collect(engine, PROMPT, SamplingParams(max_tokens=20, temperature=0))
        again = await collect(engine, PROMPT, SamplingParams(max_tokens=20, temperature=0))
        await settled(engine)
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert len(tokens) == 20
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert text_of(deltas) == tokenizer.decode(tokens, skip_special_tokens=True)
    assert tokens == [token for delta in again for token in delta.token_ids]
    assert again[0].num_cached_tokens == len(PROMPT) - 1


async def test_choices_are_complete_and_apart(tokenizer: Tokenizer) -> None:
    """ST-15: turns red when one of n completions overwrites another or vanishes."""
    async with running(fake_parts(tokenizer, Recorder())) as engine:
        for n in (2, 4, 8):
            sampling = SamplingParams(n=n, max_tokens=9, temperature=1.0, seed=n)
            deltas = await collect(engine, PROMPT, sampling, name=f"n{n}")
            ends = [d.index for d in deltas if d.finish_reason is not None]
            assert sorted(ends) == list(range(n))
            texts = [[t for d in deltas if d.index == i for t in d.token_ids] for i in range(n)]
            assert all(len(tokens) == 9 for tokens in texts)
            assert len({tuple(tokens) for tokens in texts}) == n


async def test_completion_i_has_seed_plus_i(tokenizer: Tokenizer) -> None:
    """Turns red when the seeds of n completions are not what FIELD.md says of n-sample seeds."""
    async with running(fake_parts(tokenizer, Recorder())) as engine:
        both = await collect(engine, PROMPT, SamplingParams(n=2, max_tokens=6, seed=41), "both")
        alone = await collect(engine, PROMPT, SamplingParams(max_tokens=6, seed=42), "alone")
    assert [t for d in both if d.index == 1 for t in d.token_ids] == [
        t for d in alone for t in d.token_ids
    ]


async def test_closing_a_stream_aborts_it(tokenizer: Tokenizer) -> None:
    """HT-09: turns red when a client that leaves keeps blocks, or is not counted as aborted."""
    recorder, runner = Recorder(), Held(after=3)
    async with running(fake_parts(tokenizer, recorder, runner=runner)) as engine:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=100), request_id="gone")
        await anext(stream)
        await stream.aclose()
        runner.gate.set()
        await settled(engine)
        stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.usage.num_used) == (0, 0, 0)
    (finished,) = recorder.of(RequestFinished)
    assert finished.stats.finish_reason is FinishReason.ABORT
    gauges = [e for e in recorder.events if isinstance(e, StateChanged | StepCompleted)][-1]
    assert gauges.stats.num_running == 0
    assert gauges.stats.usage.num_used == 0


async def test_stop_string_ends_the_request_in_the_engine(tokenizer: Tokenizer) -> None:
    """Turns red when a stop string ends the stream but not the work, or is counted as abort."""
    recorder = Recorder()
    async with running(fake_parts(tokenizer, recorder)) as engine:
        whole = text_of(
            await collect(engine, PROMPT, SamplingParams(max_tokens=60, temperature=0), "whole")
        )
        stop = next(c for c in whole[20:] if c not in whole[:20])
        deltas = await collect(
            engine, PROMPT, SamplingParams(max_tokens=100, temperature=0, stop=(stop,)), "cut"
        )
        await settled(engine)
    assert text_of(deltas) == whole[: whole.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == stop
    last = recorder.of(RequestFinished)[-1].stats
    assert last.finish_reason is FinishReason.STOP
    assert last.num_generation_tokens == deltas[-1].num_generated_tokens


async def test_stop_string_with_the_last_allowed_token(tokenizer: Tokenizer) -> None:
    """ST-11: turns red when an answer that both stops and hits its limit is counted as length."""
    recorder = Recorder()
    async with running(fake_parts(tokenizer, recorder)) as engine:
        whole = await collect(engine, PROMPT, SamplingParams(max_tokens=40, temperature=0), "a")
        text = ""
        for delta in whole:
            text += delta.text
            if delta.text and text.index(delta.text) == len(text) - len(delta.text):
                stop, limit = delta.text, delta.num_generated_tokens
        sampling = SamplingParams(max_tokens=limit, temperature=0, stop=(stop,))
        deltas = await collect(engine, PROMPT, sampling, "b")
        await settled(engine)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert recorder.of(RequestFinished)[-1].stats.finish_reason is FinishReason.STOP


async def test_refusals_come_before_anything_runs(tokenizer: Tokenizer) -> None:
    """SC-14: turns red when a prompt that can never fit reaches the engine's queue."""
    recorder = Recorder()
    async with running(fake_parts(tokenizer, recorder)) as engine:
        with pytest.raises(ContextLengthError):
            await collect(engine, [65] * 200, SamplingParams(max_tokens=4))
        with pytest.raises(InvalidRequestError):
            await collect(engine, [], SamplingParams(max_tokens=4))
        with pytest.raises(InvalidRequestError):
            await collect(engine, [10**6], SamplingParams(max_tokens=4))
        assert len(await collect(engine, PROMPT, SamplingParams(max_tokens=1))) == 1
    assert len(recorder.of(RequestFinished)) == 1


async def test_a_name_in_use_is_refused(tokenizer: Tokenizer) -> None:
    """Turns red when two live requests of one name mix their tokens."""
    runner = Held(after=3)
    async with running(fake_parts(tokenizer, Recorder(), runner=runner)) as engine:
        first = engine.generate(PROMPT, SamplingParams(max_tokens=50), request_id="same")
        await anext(first)
        with pytest.raises(InvalidRequestError, match="already running"):
            await collect(engine, PROMPT, SamplingParams(max_tokens=1), "same")
        runner.gate.set()
        assert [d async for d in first][-1].finish_reason is FinishReason.LENGTH


async def test_a_failed_step_hurts_only_its_plan(tokenizer: Tokenizer) -> None:
    """Turns red when one failing step stops the engine or a request that was not in it."""
    recorder = Recorder()
    parts = fake_parts(tokenizer, recorder, faults=Faults(raises=lambda call: call == 2))
    async with running(parts) as engine:
        failed = await collect(engine, PROMPT, SamplingParams(max_tokens=30), "failed")
        fine = await collect(engine, PROMPT, SamplingParams(max_tokens=5), "fine")
        await settled(engine)
        assert engine.is_running
        assert engine.stats().usage.num_used == 0
    assert failed[-1].finish_reason is FinishReason.ERROR
    assert str(failed[-1].error) == STEP_FAILED
    assert fine[-1].finish_reason is FinishReason.LENGTH
    reasons = [event.stats.finish_reason for event in recorder.of(RequestFinished)]
    assert reasons == [FinishReason.ERROR, FinishReason.LENGTH]


class Liar:
    """A runner that answers for sequences that were never planned: a bug."""

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        return ModelRunnerOutput(sampled={})


async def test_a_bug_ends_every_stream_with_a_sentence(tokenizer: Tokenizer) -> None:
    """Turns red when clients hang after the engine has died."""
    async with running(fake_parts(tokenizer, Recorder(), runner=Liar())) as engine:
        with pytest.raises(UnavailableError, match="fault"):
            async with asyncio.timeout(PATIENCE_S):
                await collect(engine, PROMPT, SamplingParams(max_tokens=5))
        assert not engine.is_running
        with pytest.raises(UnavailableError):
            await collect(engine, PROMPT, SamplingParams(max_tokens=5), "later")


async def test_shutdown_ends_live_streams(tokenizer: Tokenizer) -> None:
    """Turns red when a stream hangs for ever because the engine was shut down."""
    runner = Held(after=3)
    async with running(fake_parts(tokenizer, Recorder(), runner=runner)) as engine:
        stream: AsyncGenerator[GenerationDelta, None] = engine.generate(
            PROMPT, SamplingParams(max_tokens=100), request_id="live"
        )
        await anext(stream)
        asyncio.get_running_loop().run_in_executor(None, runner.gate.set)
        engine.shutdown()
        with pytest.raises(UnavailableError, match="shutting down"):
            async for _ in stream:
                pass


async def test_many_clients_with_cancels_leave_nothing(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """KV-02: turns red when a block, a request or a gauge is left after 300 mixed requests."""
    recorder = Recorder()
    async with running(fake_parts(tokenizer, recorder, num_blocks=40)) as engine:
        gate = asyncio.Semaphore(16)

        async def client(number: int) -> None:
            prompt = list(b"shared prefix, ") + [number % 256] * (1 + number % 17)
            sampling = SamplingParams(max_tokens=1 + number % 13, seed=number)
            async with gate:
                stream = engine.generate(prompt, sampling, request_id=str(number))
                async for delta in stream:
                    if number % 3 == 0 and delta.num_generated_tokens > number % 5:
                        break
                await stream.aclose()

        await asyncio.gather(*(client(number) for number in range(300)))
        await settled(engine)
        usage = engine.stats().usage
    assert usage.num_used == 0
    assert usage.num_free + usage.num_cached == usage.num_total
    assert len(recorder.of(RequestFinished)) == 300
