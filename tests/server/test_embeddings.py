"""Embeddings over HTTP, on the real engine around a tiny model."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.factory import async_engine
from octavo.kernels.batch import StepBatch
from octavo.kernels.numpy_backend import NumpyBackend
from octavo.models.checkpoint import open_checkpoint
from octavo.models.decoder import build_decoder
from octavo.runner import pooling
from support import PATIENCE_S
from support_engine import Recorder, tiny_parts
from support_server import NAME, ScriptedEngine, check_error, client_of, live_server, post

PATH = "/v1/embeddings"
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps."


def engine_of(folder: Path, **settings: Any) -> AsyncEngine:
    settings = {"max_model_len": 128, "block_size": 16, **settings}
    return async_engine(tiny_parts(folder, Recorder(), **settings))


@asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    engine = engine_of(folder, dtype="float32", **settings)
    engine.start()
    try:
        async with client_of(engine) as client:
            yield client
        assert await engine.drain(PATIENCE_S)
        assert engine.stats().usage.num_used == 0
    finally:
        engine.shutdown()


async def embed(client: httpx.AsyncClient, **body: Any) -> np.ndarray:
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return np.array([item["embedding"] for item in data])


def states_of(folder: Path, ids: list[int]) -> np.ndarray:
    """The normed hidden states of all tokens, computed in one call without an engine."""
    checkpoint = open_checkpoint(folder)
    backend = NumpyBackend("float32")
    decoder = build_decoder(checkpoint.config, checkpoint.tensors, backend)
    count = len(ids)
    blocks = -(-count // 16)
    backend.allocate_kv(decoder.kv_spec(16, "float32"), blocks)
    every = np.arange(count, dtype=np.int32)
    batch = StepBatch(
        token_ids=np.array(ids, dtype=np.int32),
        cu_query_lens=np.array([0, count], dtype=np.int32),
        kv_lens=np.array([count], dtype=np.int32),
        block_tables=np.arange(blocks, dtype=np.int32)[None],
        logits_rows=every,
    )
    states: np.ndarray = np.array(backend.compile(decoder.hidden)(batch), dtype=np.float64)
    return states


@pytest.mark.parametrize("budget", [8, 512], ids=["in chunks", "at once"])
async def test_vectors_are_the_models_states(tmp_path: Path, budget: int) -> None:
    """last is the last token's normed state, mean the mean over all, whether the prompt was
    computed at once or in chunks, and however often it is asked."""
    async with serving(tmp_path, max_num_batched_tokens=budget, max_num_seqs=4) as client:
        ids = (await client.post("/tokenize", json={"prompt": TEXT})).json()["tokens"]
        states = states_of(tmp_path, ids)
        expected = {"last": states[-1], "mean": states.mean(axis=0)}
        for _ in range(2):  # the second time the prompt is cached
            for pooling, vector in expected.items():
                asked = {"input": TEXT, "pooling": pooling}
                plain = await embed(client, **asked, normalize=False)
                np.testing.assert_allclose(plain[0], vector, rtol=2e-4, atol=2e-5)
                unit = await embed(client, **asked)
                np.testing.assert_allclose(unit[0], vector / np.linalg.norm(vector), atol=1e-5)
        assert not np.allclose(expected["last"], expected["mean"], atol=1e-2)


async def test_company_changes_nothing(tmp_path: Path) -> None:
    """A vector is the same alone, among others of both poolings, and beside generation."""
    async with serving(tmp_path, max_num_batched_tokens=24, max_num_seqs=4) as client:
        texts = [TEXT[:40], TEXT, "a", TEXT[::-1]]
        for pooling in ("last", "mean"):
            alone = [(await embed(client, input=text, pooling=pooling))[0] for text in texts]
            talk = client.post(
                "/v1/completions", json={"prompt": "abc", "max_tokens": 40, "temperature": 0}
            )
            together, other, said = await asyncio.gather(
                embed(client, input=texts, pooling=pooling),
                embed(client, input=texts[1], pooling="last"),
                talk,
            )
            np.testing.assert_allclose(together, alone, atol=1e-5)
            assert said.status_code == 200
            assert other.shape == (1, together.shape[1])


async def test_inputs_of_every_shape(tmp_path: Path) -> None:
    """A text and its ids have one vector; usage counts every token once; both encodings agree."""
    async with serving(tmp_path) as client:
        ids = (await client.post("/tokenize", json={"prompt": "abcd"})).json()["tokens"]
        text = await embed(client, input="abcd")
        for shape in (["abcd"], ids, [ids]):
            np.testing.assert_array_equal(await embed(client, input=shape), text)
        body = {"input": ["abcd", "ab"], "encoding_format": "base64"}
        answer = (await client.post(PATH, json=body)).json()
        first = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
        np.testing.assert_array_equal(first, text[0].astype("<f4"))
        assert answer["object"] == "list"
        assert answer["model"] == NAME
        assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"]
        assert answer["usage"]["prompt_tokens"] >= len(ids) + 1
        cut = await embed(client, input=TEXT, truncate_prompt_tokens=len(ids))
        assert cut.shape == text.shape
        long = {"input": "x" * 500}
        check_error(await client.post(PATH, json=long), 400, "input")
        assert (await embed(client, **long, truncate_prompt_tokens=-1)).shape == text.shape


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": 5}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 8}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "normalize": "yes"}, "normalize"),
        ({"input": "a", "priority": 1}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "stream": True}, "stream"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    """HT-01: a body that cannot be served is a 400 that names the field."""
    check_error(await post(ScriptedEngine(), PATH, body), 400, param)


async def test_states_that_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SA-07's kind: NaN in the hidden states fails that request, and is never a vector."""
    monkeypatch.setattr(pooling.np, "isfinite", lambda values: np.zeros(1, dtype=bool))
    async with serving(tmp_path) as client:
        check_error(await client.post(PATH, json={"input": "a"}), 500)
        monkeypatch.undo()
        assert (await embed(client, input="a")).size


def test_openai_client(tmp_path: Path) -> None:
    """The unmodified client, which asks for base64 unless told otherwise."""
    with (
        live_server(lambda: engine_of(tmp_path), api_key="k") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
    ):
        answer = client.embeddings.create(model=NAME, input=["hello", "world"])
        vectors = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
        numbers = client.embeddings.create(
            model=NAME, input="hello", encoding_format="float", extra_body={"pooling": "last"}
        )
        np.testing.assert_allclose(numbers.data[0].embedding, vectors[0], atol=1e-6)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=NAME, input="a", dimensions=2)
