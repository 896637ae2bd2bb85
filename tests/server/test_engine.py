"""The server around the real engine: what scripted answers cannot show."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.factory import EngineSettings, build_engine
from octavo.models.tokenizer import Tokenizer
from octavo.runner.fake import Faults
from support import PATIENCE_S
from support_engine import Recorder, byte_tokenizer, fake_parts, patient_engine, tiny_parts
from support_server import (
    CHAT,
    COMPLETIONS,
    HELLO,
    NAME,
    check_error,
    client_of,
    live_server,
    parse_events,
    reasons_of,
    texts_of,
)

PROMPT = "The quick brown fox jumps over it"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@contextlib.asynccontextmanager
async def serving(engine: AsyncEngine) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running engine."""
    engine.start()
    try:
        async with client_of(engine) as client:
            yield client
        assert await engine.drain(PATIENCE_S)
        assert engine.stats().usage.num_used == 0
    finally:
        engine.shutdown()


def fake(tokenizer: Tokenizer, **settings: Any) -> AsyncEngine:
    """The real engine around a runner whose tokens are a pure function of what came before."""
    return patient_engine(fake_parts(tokenizer, Recorder(), **settings))


def tiny(folder: Path) -> AsyncEngine:
    """The real engine with a tiny random model."""
    return patient_engine(tiny_parts(folder, Recorder(), max_model_len=128, block_size=16))


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def stream(client: httpx.AsyncClient, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    return parse_events(response.content)


async def test_streams_equal_whole_answers(tokenizer: Tokenizer) -> None:
    """ST-01, ST-04: with random bytes for tokens, a stop string and a cut, each choice's joined
    chunks are the whole answer's text, and reasons and usage agree."""
    async with serving(fake(tokenizer)) as client:
        for seed in range(8):
            body = {"prompt": PROMPT, "max_tokens": 40, "seed": seed, "n": 3, "stop": ["e", "ab"]}
            whole = await ask(client, COMPLETIONS, **body)
            chunks = await stream(
                client, COMPLETIONS, **body, stream_options={"include_usage": True}
            )
            assert texts_of(chunks) == {c["index"]: c["text"] for c in whole["choices"]}
            assert reasons_of(chunks) == {
                c["index"]: [c["finish_reason"]] for c in whole["choices"]
            }
            usages = [chunks[-1]["usage"], whole["usage"]]
            assert usages[0]["completion_tokens"] == usages[1]["completion_tokens"]
            for choice in whole["choices"]:
                assert "e" not in choice["text"]
                assert (choice["stop_reason"] in ("e", "ab")) == (choice["finish_reason"] == "stop")


async def test_finish_reasons_of_the_engine(tokenizer: Tokenizer) -> None:
    """ST-11: the limit and the context's end are length; the model's end token, a stop token or a
    stop string that comes with the last allowed token is stop."""
    body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    async with serving(fake(tokenizer, max_model_len=64)) as client:
        free = await ask(client, COMPLETIONS, return_token_ids=True, **body)
        (choice,) = free["choices"]
        tokens = choice["token_ids"]
        assert (choice["finish_reason"], len(set(tokens))) == ("length", 4)
        by_id = await ask(client, COMPLETIONS, stop_token_ids=[tokens[3]], **body)
        by_text = await ask(client, COMPLETIONS, stop=[choice["text"][-1]], **body)
        for answer in (by_id, by_text):
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 4
        chat = await ask(client, CHAT, messages=HELLO, temperature=0)
        assert chat["choices"][0]["finish_reason"] == "length"
        assert chat["usage"]["total_tokens"] == 64
    async with serving(fake(tokenizer, end_token_ids=frozenset({tokens[3]}))) as client:
        ended = await ask(client, COMPLETIONS, **body)
        assert ended["choices"][0]["finish_reason"] == "stop"
        assert ended["usage"]["completion_tokens"] == 4
        ignored = await ask(client, COMPLETIONS, ignore_eos=True, **body)
        assert ignored["choices"][0]["finish_reason"] == "length"


async def test_allowed_tokens_and_bad_words(tmp_path: Path) -> None:
    """vLLM's fields: only allowed tokens come, no bad word does, whole or at its last token; both
    hold for each of several choices, beside a grammar too, and an id outside of the vocabulary is
    refused."""
    async with serving(tiny(tmp_path)) as client:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "return_token_ids": True}
        for extra in (
            {"temperature": 0},
            {"n": 3, "seed": 1},
            {"n": 2, "seed": 2, "min_tokens": 9},
        ):
            allowed = await ask(
                client, COMPLETIONS, allowed_token_ids=[65, 66, 67], **body, **extra
            )
            assert {i for c in allowed["choices"] for i in c["token_ids"]} <= {65, 66, 67}
        free = await ask(client, COMPLETIONS, temperature=0, allowed_token_ids=[65, 66], **body)
        text = free["choices"][0]["text"]
        letters = {"structured_outputs": {"regex": "[AB]{20}"}, "temperature": 0}
        for word in ("A", "B", "AB", "BA", "AAA", text[:2], text[-4:]):
            bound = await ask(client, COMPLETIONS, bad_words=[word], **letters, **body)
            assert len(bound["choices"][0]["text"]) == 20
            assert word not in bound["choices"][0]["text"]
            bad = {"bad_words": [word], "allowed_token_ids": [65, 66], "temperature": 0}
            assert word not in (await ask(client, COMPLETIONS, **bad, **body))["choices"][0]["text"]
        for refused in (
            {"allowed_token_ids": [10**6]},
            {"allowed_token_ids": [65], "use_beam_search": True},
            {"bad_words": ["A"], "use_beam_search": True},
            {"allowed_token_ids": [65], "bad_words": ["A"]},
        ):
            check_error(await client.post(COMPLETIONS, json={"prompt": "a", **refused}), 400)


async def test_cached_tokens_are_reported(tokenizer: Tokenizer) -> None:
    """The second time, every full block but the last needed one comes from the cache, and the
    text is the same; another salt shares nothing."""
    async with serving(fake(tokenizer)) as client:
        answers = [await ask(client, COMPLETIONS, prompt=PROMPT, **GREEDY) for _ in range(2)]
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
        assert cached == [0, (len(PROMPT) - 1) // 4 * 4]
        assert answers[0]["choices"] == answers[1]["choices"]
        salted = await ask(client, COMPLETIONS, prompt=PROMPT, cache_salt="other", **GREEDY)
        assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize("length", [15, 16, 17, 33])
async def test_prompt_scores_on_cached_prefixes(tmp_path: Path, length: int) -> None:
    """SA-17: a prompt's scores are the same the second time, one for each token but the first."""
    async with serving(tiny(tmp_path)) as client:
        prompt = [(7 * index) % 200 for index in range(length)]
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        first, second = [
            (await ask(client, COMPLETIONS, **body))["choices"][0]["logprobs"] for _ in range(2)
        ]
        assert len(first["token_logprobs"]) == length + 1
        assert first["token_logprobs"][0] is None
        assert all(score < 0 for score in first["token_logprobs"][1:])
        assert second["tokens"] == first["tokens"]
        assert second["token_logprobs"][1:] == pytest.approx(first["token_logprobs"][1:], abs=1e-5)
        chunks = await stream(client, COMPLETIONS, **body)
        streamed = [
            s for c in chunks for s in (c["choices"][0]["logprobs"] or {}).get("tokens", [])
        ]
        assert streamed == first["tokens"]


async def test_scoring_without_generating(tmp_path: Path) -> None:
    """SC-16: max_tokens 0 scores the prompt on the real engine, alone and without echo."""
    async with serving(tiny(tmp_path)) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 0}
        scored = await ask(client, COMPLETIONS, **body, echo=True, logprobs=1)
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == 3
        for answer in (scored, await ask(client, COMPLETIONS, **body)):
            assert answer["usage"]["completion_tokens"] == 0
            assert answer["choices"][0]["finish_reason"] == "length"


async def test_candidates_without_probability(tmp_path: Path) -> None:
    """SA-16: with one candidate left, the others' scores are finite JSON numbers."""
    async with serving(tiny(tmp_path)) as client:
        body = {"prompt": [5, 6, 7], "max_tokens": 3, "top_k": 1, "logit_bias": {"9": -100}}
        for answer in await stream(client, COMPLETIONS, **body, logprobs=5):
            for choice in answer["choices"]:
                for scores in (choice["logprobs"] or {"top_logprobs": []})["top_logprobs"]:
                    assert all(-9999.0 <= score <= 0.0 for score in scores.values())
        chat = await ask(
            client, CHAT, messages=HELLO, logprobs=True, top_logprobs=20, max_tokens=3, top_k=1
        )
        for entry in chat["choices"][0]["logprobs"]["content"]:
            assert len(entry["top_logprobs"]) == 20


async def test_bans_and_forces(tmp_path: Path) -> None:
    """SA-10: a bias of 100 is always picked by greedy sampling, one of -100 never."""
    async with serving(tiny(tmp_path)) as client:
        body = {"prompt": [5, 6, 7], "return_token_ids": True, **GREEDY}
        forced = await ask(client, COMPLETIONS, **body, logit_bias={"65": 100})
        assert forced["choices"][0]["token_ids"] == [65] * 12
        free = (await ask(client, COMPLETIONS, **body))["choices"][0]["token_ids"]
        banned = await ask(client, COMPLETIONS, **body, logit_bias={str(free[0]): -100})
        assert free[0] not in banned["choices"][0]["token_ids"]


async def test_requests_beyond_the_pool(tokenizer: Tokenizer) -> None:
    """SC-01, SC-14: what the context would hold but the pool cannot is refused at once, in both
    modes, alone or in a batch; the default length is cut to the pool, and others are served."""
    async with serving(fake(tokenizer, num_blocks=10, max_model_len=128)) as client:
        for streamed in (False, True):
            for prompt in ([65] * 60, [[65], [65] * 60]):
                body = {"prompt": prompt, "max_tokens": 5, "stream": streamed}
                check_error(await client.post(COMPLETIONS, json=body), 400)
        answer = await ask(client, COMPLETIONS, prompt=[65] * 38)
        assert answer["usage"]["completion_tokens"] == 3
        assert (await ask(client, COMPLETIONS, prompt="a"))["usage"]["completion_tokens"] == 16


async def test_context_limits_agree(tokenizer: Tokenizer) -> None:
    """SC-11: the server's limit is the engine's own: what one lets in, the other does."""
    async with serving(fake(tokenizer, max_model_len=64, num_blocks=64)) as client:
        for length, max_tokens, status in ((63, 1, 200), (63, 2, 400), (64, 1, 400), (64, 0, 200)):
            body = {"prompt": [65] * length, "max_tokens": max_tokens}
            assert (await client.post(COMPLETIONS, json=body)).status_code == status


async def test_a_failing_step_hurts_one_request(tokenizer: Tokenizer) -> None:
    """A request whose computation fails is a 500 with a sentence; the next one is served."""
    engine = fake(tokenizer, faults=Faults(raises=lambda call: call == 1))
    async with serving(engine) as client:
        failed = [await client.post(COMPLETIONS, json={"prompt": "a"}) for _ in range(3)]
        statuses = [response.status_code for response in failed]
        assert statuses.count(500) == 1
        check_error(failed[statuses.index(500)], 500)
        assert (await client.get("/health")).status_code == 200


@pytest.fixture(scope="module")
def assistant(model_path: Path) -> Iterator[str]:
    """The address of a server of the default model."""
    settings = EngineSettings(model=model_path, served_model_name=NAME, max_model_len=512)
    parts = build_engine(settings, Recorder())
    with live_server(lambda: patient_engine(parts)) as server:
        yield server.url


@pytest.mark.model
def test_the_capital_of_france(assistant: str) -> None:
    """The main job: OpenAI's client asks the default model, which knows Paris; the stream says
    the same, and the second answer takes its prompt from the cache."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with openai.OpenAI(base_url=f"{assistant}/v1", api_key="none", timeout=300) as client:
        answer = client.chat.completions.create(
            model=NAME, messages=question, temperature=0, max_tokens=12
        )
        text = answer.choices[0].message.content
        assert "Paris" in text
        *chunks, last = client.chat.completions.create(
            model=NAME,
            messages=question,
            temperature=0,
            max_tokens=12,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert last.usage.prompt_tokens_details.cached_tokens > 0
        continued = client.completions.create(
            model=NAME, prompt="1, 2, 3, 4,", temperature=0, max_tokens=8, stop=["6"]
        )
        assert continued.choices[0].text == " 5, "
        assert continued.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_kv_16_a_beam_search_ends_within_max_tokens(tokenizer: Tokenizer, path: str) -> None:
    """KV-16: every beam has a reason and at most max_tokens; with stop strings it is refused."""
    body: dict[str, Any] = {"n": 2, "use_beam_search": True, "max_tokens": 10, "temperature": 0}
    body |= {"prompt": "Hi"} if path == COMPLETIONS else {"messages": HELLO}
    async with serving(fake(tokenizer)) as client:
        answer = await ask(client, path, **body)
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        assert len(reasons) == 2
        assert set(reasons) <= {"length", "stop"}
        assert answer["usage"]["completion_tokens"] <= 20
        check_error(await client.post(path, json={**body, "stop": ["###"]}), 400, "stop")


async def test_best_of_returns_n_choices(tokenizer: Tokenizer) -> None:
    """Turns red when candidates that lost come out, or logprobs that were not asked for."""
    async with serving(fake(tokenizer)) as client:
        asked = {"prompt": PROMPT, "max_tokens": 6, "seed": 4}
        every = await ask(client, COMPLETIONS, n=5, logprobs=0, **asked)
        best = await ask(client, COMPLETIONS, n=2, best_of=5, **asked)
    totals = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"]) for choice in every["choices"]
    }
    ranked = sorted(totals, key=lambda text: -totals[text])
    assert [choice["text"] for choice in best["choices"]] == ranked[:2]
    assert all(choice["logprobs"] is None for choice in best["choices"])


async def test_a_grammar_that_gets_too_costly_is_a_clients_mistake(tmp_path: Path) -> None:
    """CO-07's kind: turns red when what a client's grammar causes is answered as the server's
    fault, which clients would send again."""
    ways = [{"properties": {f"a{number}": {}}} for number in range(500)]
    costly = {"json": {"type": "object", "anyOf": ways}}
    async with serving(tiny(tmp_path)) as client:
        bias = {str(ord('"')): 100}  # leads to where all ways are open
        body = {"prompt": "a", "structured_outputs": costly, "max_tokens": 50, "logit_bias": bias}
        response = await client.post(COMPLETIONS, json=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"]
        assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200
